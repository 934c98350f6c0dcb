"""Simulates a schedule with given times: the start and end of each action of each
stage. Pure Python.

Invariant: the events follow the lists that the runtime executes. An action starts when
its stage is free and its inputs have arrived; a boundary between stages carries one
message per direction at a time; a step of all stages starts when all have reduced their
gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_2bw.schedules import REDUCE, STEP, Action, B, F, Schedule, Shape

PerStage = float | Sequence[float]


@dataclass(frozen=True)
class Times:
    """Durations in one unit; each a number, or one per stage (of all its chunks
    together)."""

    forward: PerStage = 1.0  # t_f of one microbatch
    backward: PerStage = 2.0  # t_b of one microbatch
    # of a message over the boundary after the stage (the last stage's leads to the
    # first)
    transfer: PerStage = 0.0
    # the part of `transfer` in which the boundary carries no other message
    occupied: PerStage = 0.0
    # the part of a message's time in which its sender cannot compute
    sending: PerStage = 0.0
    reduce: PerStage = 0.0  # of the gradients over the stage's replicas
    step: float = 0.0  # of the optimizer's step, after all stages have reduced
    # stages that step alone compare their norms after each batch, as Megatron's loop
    # does
    joint_step: bool = False
    # what a step that overlaps the computation takes from the stage's own time
    overlap_cost: PerStage = 0.0

    def of(self, name: str, stages: int) -> list[float]:
        """The field `name` as a list, one entry per stage."""
        given = getattr(self, name)
        if type(given) is list:
            return given
        return (
            [float(given)] * stages
            if isinstance(given, (int, float))
            else [float(time) for time in given]
        )

    def computations(self, stages: int) -> dict[str, list[float]]:
        """Each stage's time of a microbatch, by kind of action. A schedule with more
        kinds adds them."""
        return {F: self.of("forward", stages), B: self.of("backward", stages)}


class Event(NamedTuple):
    """An action in time, simulated or measured."""

    stage: int
    action: Action
    start: float
    end: float
    asked: float = 0.0  # when the stage was free for it
    # when its message left; later than `end` if it waited for its link
    sent: float = 0.0


def simulate(schedule: Schedule, shape: Shape, times: Times = Times()) -> list[Event]:
    """Events of iterations shape.first ... shape.end - 1, in order of start. ValueError
    if the lists deadlock."""
    return simulate_lists(schedule, _lists(schedule, shape), times)


def _lists(schedule: Schedule, shape: Shape) -> list[list[Action]]:
    """The actions of each stage in all iterations of `shape`."""
    return [
        [
            action
            for j in range(shape.first, shape.end)
            for action in schedule.actions(shape, stage, j)
        ]
        for stage in range(shape.stages)
    ]


def simulate_lists(
    schedule: Schedule, lists: list[list[Action]], times: Times, partial: bool = False
) -> list[Event]:
    """Like `simulate`, for lists of actions, one per stage, that follow the rules of
    `schedule`.

    partial: the lists may end anywhere; the events up to there
    """
    events = _Run(schedule, prepared(lists, schedule.chunks), times).play(partial)
    return sorted(events, key=lambda event: (event.start, event.stage))


def by_stage(events: Iterable[Event], stages: int) -> list[list[Event]]:
    """Each stage's events, in their order."""
    rows: list[list[Event]] = [[] for _ in range(stages)]
    for event in events:
        rows[event.stage].append(event)
    return rows


def scaled(events: Iterable[Event], factor: float) -> list[Event]:
    """The events in another unit of time."""
    return [
        Event(stage, action, *(factor * time for time in times))
        for stage, action, *times in events
    ]


class Prepared(NamedTuple):
    """An action with the message that it needs, the message that it gives, and the
    boundary."""

    action: Action
    # the message (F or B, part of the model, microbatch) that it waits for
    needs: tuple[str, int, int] | None
    gives: tuple[str, int, int] | None
    boundary: int


def prepared(lists: list[list[Action]], chunks: int) -> list[list[Prepared]]:
    """The actions of each stage's list with their messages."""
    stages, parts = len(lists), range(chunks * len(lists))

    def of(action: Action, stage: int) -> Prepared:
        kind, part, onward = (
            action.kind,
            action.chunk * stages + stage,
            {F: 1, B: -1}.get(action.kind),
        )
        needs = (
            (kind, part, action.number) if onward and part - onward in parts else None
        )
        gives = (
            (kind, part + onward, action.number)
            if onward and part + onward in parts
            else None
        )
        return Prepared(
            action, needs, gives, stage if kind == F else (stage - 1) % stages
        )

    return [[of(action, stage) for action in own] for stage, own in enumerate(lists)]


class _Run:
    """One simulation. Each stage is a generator that yields the input that it waits
    for.

    `events` has all actions, or without `computed` only reductions and steps, of which
    each stage ends with one.
    """

    def __init__(
        self,
        schedule: Schedule,
        lists: list[list[Prepared]],
        times: Times,
        computed: bool = True,
    ):
        self.schedule, self.lists, self.stages, self.computed = (
            schedule,
            lists,
            len(lists),
            computed,
        )
        self.took = {
            kind: [time / schedule.chunks for time in each]
            for kind, each in times.computations(self.stages).items()
        }
        self.times, self.common = times, schedule.global_step or times.joint_step
        self.arrived: dict[tuple[str, int, int], float] = {}  # messages
        # batch -> when each stage had its gradients
        self.reduced: dict[int, list[float]] = {}
        # missing input -> the stages that wait for it
        self.waiting: dict[object, list[int]] = {}
        self.runnable = list(range(self.stages))
        self.events: list[Event] = []

    def play(self, partial: bool = False) -> list[Event]:
        stages = [self._stage(stage) for stage in self.runnable]
        while self.runnable:
            stage = self.runnable.pop()
            missing = next(stages[stage], None)
            if missing is not None:
                self.waiting.setdefault(missing, []).append(stage)
        stuck = sorted(stage for own in self.waiting.values() for stage in own)
        if stuck and not partial:
            raise ValueError(
                f"{self.schedule.name} deadlocks: stages {stuck} wait for each other"
            )
        return self.events

    def _stage(self, stage: int) -> Iterator[object]:
        """Times the stage's actions.

        A search of the planner spends most of its time here: hence the local names and
        the single function.
        """
        times, stages, arrived, waiting, runnable = (
            self.times,
            self.stages,
            self.arrived,
            self.waiting,
            self.runnable,
        )
        transfer, occupied, sending = (
            times.of(name, stages) for name in ("transfer", "occupied", "sending")
        )
        reduce, cost = (
            times.of("reduce", stages)[stage],
            times.of("overlap_cost", stages)[stage],
        )
        took = {kind: each[stage] for kind, each in self.took.items()}
        link_free, append, computed, free = (
            {F: 0.0, B: 0.0},
            self.events.append,
            self.computed,
            0.0,
        )
        for action, needs, gives, boundary in self.lists[stage]:
            kind, asked, start = action[0], free, free
            if needs is not None:
                if needs not in arrived:
                    yield needs
                start = max(start, arrived[needs])
            if kind in took:
                sent = end = free = start + took[kind]
                if gives is not None:
                    sent = max(end, link_free[kind])
                    link_free[kind] = sent + occupied[boundary]
                    arrived[gives] = sent + transfer[boundary]
                    free = end + sending[boundary]
                    if gives in waiting:
                        runnable += waiting.pop(gives)
                if computed:
                    append(Event(stage, action, start, end, asked, sent))
                continue
            ends = self.reduced.setdefault(action.batch, [])
            if kind == REDUCE:
                ends.append(start + reduce)
                if len(ends) == stages:
                    runnable += waiting.pop((STEP, action.batch), [])
                free = start + cost
            else:
                if self.common and len(ends) < stages:
                    yield STEP, action.batch
                free = max(
                    asked, (max(ends) if self.common else asked + reduce) + times.step
                )
                if not self.schedule.late_step:
                    # not before `asked` by rounding
                    start = max(free - times.step, asked)
            append(Event(stage, action, start, free, asked, free))


def makespan(events: list[Event]) -> float:
    return max(event.end for event in events)


def iteration_time(
    schedule: Schedule, stages: int, microbatches: int, times: Times = Times()
) -> float:
    """Time from one optimizer step to the next after the pipeline has filled, on the
    stage with the most work."""
    # all stages restart together: every iteration equals the first
    if schedule.flushes and schedule.global_step:
        return makespan(_run(schedule, Shape(stages, microbatches, 0, 1), times))
    work = [
        f + b for f, b in zip(times.of("forward", stages), times.of("backward", stages))
    ]
    # Iterations differ where batch j + 2 waits for the step of batch j, or messages are
    # slower than computation. A short pipeline needs more iterations to settle, and is
    # cheap.
    count, skipped = max(min(stages, 4), 2) if stages <= 8 else 2, 2 + 8 // stages
    # its work bounds every iteration, also while messages still queue elsewhere
    busiest = work.index(max(work))
    ends = [
        event.end
        for event in _run(
            schedule, Shape(stages, microbatches, 0, skipped + count + 3), times
        )
        if event.stage == busiest and event.action.kind == STEP
    ]
    return (ends[skipped + count] - ends[skipped]) / count


def _run(schedule: Schedule, shape: Shape, times: Times) -> list[Event]:
    """The reductions and steps of `simulate`, in any order."""
    return _Run(
        schedule, _prepared_lists(schedule, shape), times, computed=False
    ).play()


@functools.lru_cache(64)
def _prepared_lists(schedule: Schedule, shape: Shape) -> list[list[Prepared]]:
    return prepared(_lists(schedule, shape), schedule.chunks)


def long_iteration_time(
    schedule: Schedule, stages: int, microbatches: int, times: Times = Times()
) -> float:
    """Like `iteration_time`, at a cost that does not grow with the microbatches.

    After the pipeline has filled, each microbatch adds the same time, so two short
    batches determine a long one. If a late step is longer than its window, a smaller
    rate holds until the window is as long. The difference to `iteration_time` is at
    most 1 % (tests/unit/test_simulator.py); 2.2 % was seen with another stage's chain
    ahead.
    """
    if schedule.round and schedule.round < microbatches:
        return _in_rounds(schedule, stages, microbatches, times)
    # of a deep pipeline without flushes a batch costs most
    settled = 2 if stages > 8 and not schedule.flushes else 3
    least = max(schedule.min_microbatches(stages), schedule.late_microbatches or 0)
    short = max(settled * stages, least + stages) + microbatches % stages
    long = short + (settled - 1) * stages
    if microbatches <= long:
        return iteration_time(schedule, stages, microbatches, times)
    if schedule.flushes and schedule.global_step:
        return _long_flush(schedule, stages, microbatches, times, short, long)
    hidden = replace(times, reduce=0.0, step=0.0) if schedule.late_step else times
    before, after = (iteration_time(schedule, stages, m, hidden) for m in (short, long))
    each = (after - before) / (long - short)
    seconds = after + (microbatches - long) * each
    if hidden is times:
        return seconds
    waiting = iteration_time(schedule, stages, long, times)
    if waiting <= after:
        return seconds
    slope = (waiting - iteration_time(schedule, stages, short, times)) / (long - short)
    return max(seconds, waiting + (microbatches - long) * min(max(slope, 0.0), each))


def _in_rounds(schedule, stages: int, microbatches: int, times: Times) -> float:
    """Stage 0 runs a round's last backward and the next round's first forward, so
    rounds follow each other whole."""
    one, before = replace(schedule, round=None), (microbatches - 1) // schedule.round
    alone = replace(times, reduce=0.0, step=0.0)
    last = long_iteration_time(
        one, stages, microbatches - before * schedule.round, times
    )
    return before * long_iteration_time(one, stages, schedule.round, alone) + last


def _long_flush(
    schedule, stages: int, microbatches: int, times: Times, short: int, long: int
) -> float:
    """The end of each stage's last backward grows with the microbatches at its own
    rate."""
    ends = []
    for m in (short, long):
        events = _run(schedule, Shape(stages, m, 0, 1), times)
        ends.append(
            {
                event.stage: event.start
                for event in events
                if event.action.kind == REDUCE
            }
        )
    before, after = ends
    share = (microbatches - long) / (long - short)
    last = (
        after[s] + (after[s] - before[s]) * share + r
        for s, r in enumerate(times.of("reduce", stages))
    )
    return max(last) + times.step
