"""Runs a schedule against times: when each action of each stage starts and ends. Pure Python.

Invariant: the events follow the same lists that the runtime executes; an action starts when its stage is free and
its inputs have arrived, a boundary between stages carries one message a direction at a time, and a step that spans
all stages starts when all have reduced their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_2bw.schedules import B, F, REDUCE, STEP, W, Action, Schedule, Shape

PerStage = float | Sequence[float]


@dataclass(frozen=True)
class Times:
    """Durations in any one unit; each a number, or one a stage (of all its chunks together).

    forward, backward   t_f and t_b of one microbatch; where W is apart, of the inputs' part
    weight              of the weights' part, in schedules that have it apart
    transfer            of a message over the boundary behind the stage (the last one's leads to the first)
    occupied            the part of `transfer` in which the boundary carries nothing else
    sending             of a message, what it takes from its sender's own time
    reduce              of the gradients over the stage's replicas
    step                of the optimizer's step, once all stages have reduced
    burden              what a step made beside the computation takes from the stage's own time
    """

    forward: PerStage = 1.0
    backward: PerStage = 2.0
    weight: PerStage = 0.0
    transfer: PerStage = 0.0
    occupied: PerStage = 0.0
    sending: PerStage = 0.0
    reduce: PerStage = 0.0
    step: float = 0.0
    burden: PerStage = 0.0

    def of(self, name: str, stages: int) -> list[float]:
        """The field `name` as a list, one a stage."""
        given = getattr(self, name)
        return [float(given)] * stages if isinstance(given, (int, float)) else [float(time) for time in given]


class Event(NamedTuple):
    """An action in time."""

    stage: int
    action: Action
    start: float
    end: float


def simulate(schedule: Schedule, shape: Shape, times: Times = Times()) -> list[Event]:
    """Events of iterations shape.first ... shape.end - 1, in order of start. ValueError if the lists deadlock."""
    return simulate_lists(schedule, _lists(schedule, shape), times)


def _lists(schedule: Schedule, shape: Shape) -> list[list[Action]]:
    """The actions of each stage in all iterations of `shape`."""
    return [
        [action for j in range(shape.first, shape.end) for action in schedule.actions(shape, stage, j)]
        for stage in range(shape.stages)
    ]


def simulate_lists(schedule: Schedule, lists: list[list[Action]], times: Times) -> list[Event]:
    """As `simulate`, for lists of actions, one a stage, that follow the rules of `schedule`."""
    run = _Run(schedule, lists, times)
    run.play()
    return sorted(run.events, key=lambda event: (event.start, event.stage))


class _Run:
    """The state of one simulation: where each stage is in its list, and what has arrived when."""

    def __init__(self, schedule: Schedule, lists: list[list[Action]], times: Times):
        self.schedule, self.lists, self.stages = schedule, lists, len(lists)
        chunks = schedule.chunks
        self.last = chunks * self.stages - 1  # the last part of the model
        self.forward, self.backward, self.weight = (
            [time / chunks for time in times.of(name, self.stages)] for name in ("forward", "backward", "weight")
        )
        self.transfer, self.occupied = (times.of(name, self.stages) for name in ("transfer", "occupied"))
        self.sending, self.step = times.of("sending", self.stages), times.step
        self.reduce, self.burden = (times.of(name, self.stages) for name in ("reduce", "burden"))
        self.position, self.free = [0] * self.stages, [0.0] * self.stages
        self.arrived: dict[tuple[str, int, int], float] = {}  # (F or B, part of the model, microbatch) -> time
        self.link_free = {F: [0.0] * self.stages, B: [0.0] * self.stages}
        self.reduced: dict[int, list[float]] = {}  # batch -> when each stage had its gradients
        self.waiting: dict[object, list[int]] = {}  # what has not come yet -> the stages that wait for it
        self.events: list[Event] = []

    def play(self) -> None:
        runnable = list(range(self.stages))
        while runnable:
            stage = runnable.pop()
            actions = self.lists[stage]
            while self.position[stage] < len(actions):
                missing = self._do(stage, actions[self.position[stage]], runnable)
                if missing is not None:
                    self.waiting.setdefault(missing, []).append(stage)
                    break
                self.position[stage] += 1
        stuck = [stage for stage in range(self.stages) if self.position[stage] < len(self.lists[stage])]
        if stuck:
            raise ValueError(f"{self.schedule.name} deadlocks: stages {stuck} wait for each other")

    def _do(self, stage: int, action: Action, runnable: list[int]) -> object | None:
        """Give the action its place in time; or return the key of what it waits for."""
        kind, x, _, chunk = action
        start = self.free[stage]
        if kind == F or kind == B:
            part = chunk * self.stages + stage
            if part != (0 if kind == F else self.last):
                key = (kind, part, x)
                came = self.arrived.get(key)
                if came is None:
                    return key
                start = max(start, came)
            end = start + (self.forward if kind == F else self.backward)[stage]
            self.free[stage] = end
            if part != (self.last if kind == F else 0):
                self._send(stage, kind, part, x, end, runnable)
        elif kind == W:
            end = self.free[stage] = start + self.weight[stage]
        elif kind == REDUCE:
            end = self.free[stage] = start + self.burden[stage]
            ends = self.reduced.setdefault(x, [])
            ends.append(start + self.reduce[stage])
            if len(ends) == self.stages:
                runnable += self.waiting.pop((STEP, x), [])
        else:
            ready = self._step_ready(stage, x)
            if ready is None:
                return (STEP, x)
            end = self.free[stage] = max(start, ready)
            start = start if self.schedule.late_step else end - self.step
        self.events.append(Event(stage, action, start, end))
        return None

    def _step_ready(self, stage: int, batch: int) -> float | None:
        """When the weights that the step of `batch` writes are there, or None while a stage has not reduced."""
        if not self.schedule.global_step:
            return self.free[stage] + self.reduce[stage] + self.step
        ends = self.reduced.get(batch, [])
        return max(ends) + self.step if len(ends) == self.stages else None

    def _send(self, stage: int, kind: str, part: int, x: int, end: float, runnable: list[int]) -> None:
        boundary = stage if kind == F else (stage - 1) % self.stages
        start = max(end, self.link_free[kind][boundary])
        self.link_free[kind][boundary] = start + self.occupied[boundary]
        key = (kind, part + (1 if kind == F else -1), x)
        self.arrived[key] = start + self.transfer[boundary]
        self.free[stage] = end + self.sending[boundary]
        if key in self.waiting:
            runnable += self.waiting.pop(key)


def makespan(events: list[Event]) -> float:
    return max(event.end for event in events)


def iteration_time(schedule: Schedule, stages: int, microbatches: int, times: Times = Times()) -> float:
    """Time from one optimizer step to the next after the pipeline has filled, on the stage that has most to do."""
    if schedule.flushes and schedule.global_step:  # all stages start together again, so every iteration is the first
        return makespan(_run(schedule, Shape(stages, microbatches, 0, 1), times))
    work = [f + b for f, b in zip(times.of("forward", stages), times.of("backward", stages))]
    # Iterations differ where batch j + 2 waits for the step of batch j, or messages are slower than computation.
    count, skipped = max(min(stages, 4), 2), 2 + 8 // stages  # a short pipeline takes longer to settle, and is cheap
    busiest = work.index(max(work))  # its own work bounds the time in every iteration, also while others still queue
    ends = [
        event.end
        for event in _run(schedule, Shape(stages, microbatches, 0, skipped + count + 3), times)
        if event.stage == busiest and event.action.kind == STEP
    ]
    return (ends[skipped + count] - ends[skipped]) / count


def _run(schedule: Schedule, shape: Shape, times: Times) -> list[Event]:
    """The events of `simulate`, in any order; the lists of one shape are made once."""
    key = (type(schedule), getattr(schedule, "gradient_slots", 0), schedule.chunks, shape)
    lists = _made.get(key)
    if lists is None:
        if len(_made) > 64:
            _made.clear()
        lists = _made[key] = _lists(schedule, shape)
    run = _Run(schedule, lists, times)
    run.play()
    return run.events


_made: dict[tuple, list[list[Action]]] = {}


def long_iteration_time(schedule: Schedule, stages: int, microbatches: int, times: Times = Times()) -> float:
    """As `iteration_time`, in a time that does not grow with the microbatches.

    Past the pipeline's filling each further microbatch adds the same time, so two short batches tell what a long one
    takes. Where a late step lasts longer than its window, another and smaller rate holds until the window is as long.
    It differs from `iteration_time` by 1 % at most, by 3 % where messages take longer than the computation
    (tests/unit/test_simulator.py).
    """
    short = 3 * stages + microbatches % stages
    long = short + 2 * stages
    if microbatches <= long:
        return iteration_time(schedule, stages, microbatches, times)
    if schedule.flushes and schedule.global_step:
        return _long_flush(schedule, stages, microbatches, times, short, long)
    beside = replace(times, reduce=0.0, step=0.0) if schedule.late_step else times
    before, after = (iteration_time(schedule, stages, m, beside) for m in (short, long))
    each = (after - before) / (long - short)
    seconds = after + (microbatches - long) * each
    if beside is times:
        return seconds
    waiting = iteration_time(schedule, stages, long, times)
    if waiting <= after:
        return seconds
    slope = (waiting - iteration_time(schedule, stages, short, times)) / (long - short)
    return max(seconds, waiting + (microbatches - long) * min(max(slope, 0.0), each))


def _long_flush(schedule, stages: int, microbatches: int, times: Times, short: int, long: int) -> float:
    """Each stage's last backward grows with the microbatches at a rate of its own."""
    ends = []
    for m in (short, long):
        events = _run(schedule, Shape(stages, m, 0, 1), times)
        ends.append({event.stage: event.start for event in events if event.action.kind == REDUCE})
    before, after = ends
    share = (microbatches - long) / (long - short)
    last = (after[s] + (after[s] - before[s]) * share + r for s, r in enumerate(times.of("reduce", stages)))
    return max(last) + times.step
