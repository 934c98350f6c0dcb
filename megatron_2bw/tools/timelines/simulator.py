"""Simulates a schedule with given times: the start and end of each action of each
stage. Pure Python.

Invariant: the events follow the lists that the runtime executes. An action starts when
its stage is free and its inputs have arrived; a boundary between stages carries one
message per direction at a time; a step of all stages starts when all have reduced their
gradients.
"""

import collections
import functools
import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_2bw.schedules import (
    PREDICT,
    REDUCE,
    STEP,
    Action,
    B,
    F,
    Schedule,
    Shape,
)

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
    predict: PerStage = 0.0  # of the weights of a batch
    reduce: PerStage = 0.0  # of the gradients over the stage's replicas
    step: float = 0.0  # of the optimizer's step, after all stages have reduced
    # stages that step alone compare their norms after each batch, as Megatron's loop
    # does
    joint_step: bool = False
    # what a step that overlaps the computation takes from the stage's own time
    overlap_cost: PerStage = 0.0

    def of(self, name: str, stages: int) -> list[float]:
        """The field `name` as a list, one entry per stage."""
        time = getattr(self, name)
        if isinstance(time, (int, float)):
            return [float(time)] * stages
        return list(time)

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

    @property
    def duration(self) -> float:
        return self.end - self.start


Events = list[Event]
Lists = list[list[Action]]  # one per stage


def simulate(schedule: Schedule, shape: Shape, times: Times = Times()) -> Events:
    """Events of iterations shape.first ... shape.end - 1, in order of start. ValueError
    if the lists deadlock."""
    return simulate_lists(schedule, _lists(schedule, shape), times)


def _lists(schedule: Schedule, shape: Shape) -> Lists:
    """The actions of each stage in all iterations of `shape`."""
    lists = [[] for _ in range(shape.stages)]
    for stage, actions in enumerate(lists):
        for iteration in range(shape.first, shape.end):
            actions += schedule.actions(shape, stage, iteration)
    return lists


def simulate_lists(
    schedule: Schedule, lists: Lists, times: Times, partial: bool = False
) -> Events:
    """Like `simulate`, for lists of actions, one per stage, that follow the rules of
    `schedule`.

    partial: the lists may end anywhere; the events up to there
    """
    events = _Run(schedule, prepared(lists, schedule.chunks), times).play(partial)
    return sorted(events, key=operator.attrgetter("start", "stage"))


def by_stage(events: Events, stages: int) -> list[Events]:
    """Each stage's events, in their order."""
    rows = [[] for _ in range(stages)]
    for event in events:
        rows[event.stage].append(event)
    return rows


def of_kind(events: Events, *kinds: str) -> Events:
    return [event for event in events if event.action.kind in kinds]


def actions_of(lists: list[Events]) -> Lists:
    return [[event.action for event in own] for own in lists]


def scaled(events: Events, factor: float) -> Events:
    """The events in another unit of time."""
    return [
        Event(stage, action, *(factor * time for time in times))
        for stage, action, *times in events
    ]


Message = tuple[
    str, int, int
]  # F or B, the part of the model that takes it, microbatch


class Prepared(NamedTuple):
    """An action, the message that it waits for, and the message that it sends."""

    action: Action
    needs: Message | None = None
    gives: Message | None = None


def prepared(lists: Lists, chunks: int) -> list[list[Prepared]]:
    """The actions of each stage's list with their messages."""
    stages = len(lists)
    rows = []
    for stage, actions in enumerate(lists):
        rows.append([_prepared(each, stage, stages, chunks) for each in actions])
    return rows


def _prepared(action: Action, stage: int, stages: int, chunks: int) -> Prepared:
    kind = action.kind
    if kind not in (F, B):
        return Prepared(action)
    part = action.chunk * stages + stage
    ahead = 1 if kind == F else -1
    before = part - ahead
    after = part + ahead
    parts = range(chunks * stages)
    needs = (kind, part, action.number) if before in parts else None
    gives = (kind, after, action.number) if after in parts else None
    return Prepared(action, needs, gives)


@dataclass
class _Run:
    """One simulation. Each stage is a generator that yields the input that it waits
    for.

    `events` has all actions, or without `computed` only reductions and steps, of which
    each stage ends with one.
    """

    schedule: Schedule
    lists: list[list[Prepared]]
    times: Times
    computed: bool = True

    def __post_init__(self) -> None:
        self.stages = len(self.lists)
        self.computations = self.times.computations(self.stages)
        self.joint_step = self.schedule.global_step or self.times.joint_step
        self.arrived = {}  # message -> when
        # batch -> when each stage had its gradients
        self.reduced = collections.defaultdict(list)
        # missing input -> the stages that wait for it
        self.waiting = collections.defaultdict(list)
        self.runnable = list(range(self.stages))
        self.events = []

    def play(self, partial: bool = False) -> Events:
        stages = [self._stage(stage) for stage in self.runnable]
        while self.runnable:
            stage = self.runnable.pop()
            missing = next(stages[stage], None)
            if missing is not None:
                self.waiting[missing].append(stage)
        stuck = sorted(itertools.chain(*self.waiting.values()))
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
        arrived = self.arrived
        computed = self.computed
        transfer = self.times.of("transfer", self.stages)
        occupied = self.times.of("occupied", self.stages)
        sending = self.times.of("sending", self.stages)
        reduce = self.times.of("reduce", self.stages)[stage]
        overlap_cost = self.times.of("overlap_cost", self.stages)[stage]
        predict = self.times.of("predict", self.stages)[stage]
        durations = {}
        for kind, each in self.computations.items():
            durations[kind] = each[stage] / self.schedule.chunks
        boundaries = {F: stage, B: stage - 1}  # -1: from the first stage to the last
        link_free = {F: 0.0, B: 0.0}
        free = 0.0
        for action, needs, gives in self.lists[stage]:
            kind = action[0]
            asked = start = free
            if needs is not None:
                if needs not in arrived:
                    yield needs
                start = max(start, arrived[needs])
            if kind in durations:
                sent = end = free = start + durations[kind]
                if gives is not None:
                    boundary = boundaries[kind]
                    sent = max(end, link_free[kind])
                    link_free[kind] = sent + occupied[boundary]
                    arrived[gives] = sent + transfer[boundary]
                    free = end + sending[boundary]
                    self._wake(gives)
                if computed:
                    self.events.append(Event(stage, action, start, end, asked, sent))
                continue
            if kind == PREDICT:
                free = start + predict
                if computed:
                    self.events.append(Event(stage, action, start, free, asked, free))
                continue
            reduced = self.reduced[action.batch]
            if kind == REDUCE:
                reduced.append(start + reduce)
                if len(reduced) == self.stages:
                    self._wake((STEP, action.batch))
                free = start + overlap_cost
            else:
                if self.joint_step and len(reduced) < self.stages:
                    yield STEP, action.batch
                ready = max(reduced) if self.joint_step else asked + reduce
                free = max(asked, ready + self.times.step)
                if not self.schedule.late_step:
                    # not before `asked` by rounding
                    start = max(free - self.times.step, asked)
            self.events.append(Event(stage, action, start, free, asked, free))

    def _wake(self, arrival: object) -> None:
        if arrival in self.waiting:
            self.runnable += self.waiting.pop(arrival)


def makespan(events: Events) -> float:
    return max(event.end for event in events)


def iteration_time(
    schedule: Schedule, stages: int, microbatches: int, times: Times = Times()
) -> float:
    """Time from one optimizer step to the next after the pipeline has filled, on the
    stage with the most work."""
    # all stages restart together: every iteration equals the first
    if schedule.flushes and schedule.global_step:
        return makespan(_updates(schedule, Shape(stages, microbatches, 0, 1), times))
    # Iterations differ where batch j + 2 waits for the step of batch j, or messages are
    # slower than computation. A short pipeline needs more iterations to settle, and is
    # cheap.
    count = max(min(stages, 4), 2) if stages <= 8 else 2
    skipped = 2 + 8 // stages
    shape = Shape(stages, microbatches, 0, skipped + count + 3)
    # its work bounds every iteration, also while messages still queue elsewhere
    computations = times.computations(stages).values()
    work = list(map(sum, zip(*computations)))
    busiest = work.index(max(work))
    ends = []
    for event in of_kind(_updates(schedule, shape, times), STEP):
        if event.stage == busiest:
            ends.append(event.end)
    return (ends[skipped + count] - ends[skipped]) / count


def busy(
    schedule: Schedule, stages: int, microbatches: int, times: Times = Times()
) -> float:
    """The share of an iteration in which the stages compute, after the pipeline has
    filled."""
    work = sum(map(sum, times.computations(stages).values()))
    seconds = iteration_time(schedule, stages, microbatches, times)
    return microbatches * work / (stages * seconds)


def _updates(schedule: Schedule, shape: Shape, times: Times) -> Events:
    """The reductions and steps of `simulate`, in any order."""
    lists = _prepared_lists(schedule, shape)
    return _Run(schedule, lists, times, computed=False).play()


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
    least = 1
    if schedule.late_step:
        ahead = schedule.ahead(Shape(stages, microbatches), 0)
        least = ahead + 1
        if isinstance(schedule.late, int):
            least = max(least, schedule.late)
    short = max(settled * stages, least + stages) + microbatches % stages
    long = short + (settled - 1) * stages
    if microbatches <= long:
        return iteration_time(schedule, stages, microbatches, times)
    if schedule.flushes and schedule.global_step:
        return _long_flush(schedule, stages, microbatches, times, short, long)
    added = microbatches - long
    alone = replace(times, reduce=0.0, step=0.0) if schedule.late_step else times
    before = iteration_time(schedule, stages, short, alone)
    after = iteration_time(schedule, stages, long, alone)
    each = (after - before) / (long - short)
    seconds = after + added * each
    if not schedule.late_step:
        return seconds
    waiting = iteration_time(schedule, stages, long, times)
    if waiting <= after:
        return seconds
    slope = (waiting - iteration_time(schedule, stages, short, times)) / (long - short)
    return max(seconds, waiting + added * min(max(slope, 0.0), each))


def _in_rounds(
    schedule: Schedule, stages: int, microbatches: int, times: Times
) -> float:
    """Stage 0 runs a round's last backward and the next round's first forward, so
    rounds follow each other whole."""
    size = schedule.round
    one_round = replace(schedule, round=None)
    full_rounds = (microbatches - 1) // size
    rest = microbatches - full_rounds * size
    without_update = replace(times, reduce=0.0, step=0.0)
    last = long_iteration_time(one_round, stages, rest, times)
    each = long_iteration_time(one_round, stages, size, without_update)
    return full_rounds * each + last


def _long_flush(
    schedule: Schedule,
    stages: int,
    microbatches: int,
    times: Times,
    short: int,
    long: int,
) -> float:
    """The end of each stage's last backward grows with the microbatches at its own
    rate."""
    before = _last_backwards(schedule, Shape(stages, short, 0, 1), times)
    after = _last_backwards(schedule, Shape(stages, long, 0, 1), times)
    share = (microbatches - long) / (long - short)
    ends = []
    for stage, reduce in enumerate(times.of("reduce", stages)):
        growth = (after[stage] - before[stage]) * share
        ends.append(after[stage] + growth + reduce)
    return max(ends) + times.step


def _last_backwards(schedule: Schedule, shape: Shape, times: Times) -> dict[int, float]:
    """When each stage ends its last backward and starts its reduction."""
    events = _updates(schedule, shape, times)
    return {event.stage: event.start for event in of_kind(events, REDUCE)}
