"""Runs a schedule against times: when each action of each stage starts and ends. Pure Python.

Invariant: the events follow the same lists that the runtime executes; an action starts when its stage is free and
its inputs have arrived, and a step that spans all stages starts when all have reached it.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_2bw.schedules import B, F, STEP, Action, Schedule, Shape


@dataclass(frozen=True)
class Times:
    """Durations of one microbatch on one stage, in any one unit.

    forward, backward   t_f and t_b
    transfer            of a message to the neighbouring stage
    step                of the optimizer's step
    """

    forward: float = 1.0
    backward: float = 2.0
    transfer: float = 0.0
    step: float = 0.0

    def of(self, action: Action) -> float:
        return {F: self.forward, B: self.backward, STEP: self.step}.get(action.kind, 0.0)


@dataclass(frozen=True)
class Event:
    """An action in time."""

    stage: int
    action: Action
    start: float
    end: float


def simulate(schedule: Schedule, shape: Shape, times: Times = Times()) -> list[Event]:
    """Events of iterations shape.first ... shape.end - 1, in order of start. ValueError if the lists deadlock."""
    todo = [
        [action for j in range(shape.first, shape.end) for action in schedule.actions(shape, stage, j)]
        for stage in range(shape.stages)
    ]
    position, free = [0] * shape.stages, [0.0] * shape.stages
    done: dict[tuple[int, str, int], float] = {}  # (stage, kind, microbatch) -> end
    events: list[Event] = []
    while any(position[s] < len(todo[s]) for s in range(shape.stages)):
        ready = [s for s in range(shape.stages) if position[s] < len(todo[s])]
        starts = {s: _start(schedule, shape, times, s, todo[s][position[s]], free, done) for s in ready}
        if all(start is None for start in starts.values()):
            raise ValueError(f"{schedule.name} deadlocks: stages {ready} wait for each other")
        for stage, start in starts.items():
            if start is None:
                continue
            action = todo[stage][position[stage]]
            end = start + times.of(action)
            done[stage, action.kind, action.microbatch] = free[stage] = end
            position[stage] += 1
            events.append(Event(stage, action, start, end))
    return sorted(events, key=lambda event: (event.start, event.stage))


def _start(schedule, shape, times, stage, action, free, done) -> float | None:
    """When `action` of `stage` can start, or None while an input's time is not known yet."""
    if action.kind == F and stage > 0:
        needed = [(stage - 1, F, action.microbatch)]
    elif action.kind == B and stage < shape.stages - 1:
        needed = [(stage + 1, B, action.microbatch)]
    elif action.kind == STEP and schedule.global_step:
        needed = [(other, "R", action.microbatch) for other in range(shape.stages)]
    else:
        needed = []
    if any(key not in done for key in needed):
        return None
    delay = times.transfer if action.kind in (F, B) else 0.0
    return max([free[stage], *(done[key] + delay for key in needed)])


def makespan(events: list[Event]) -> float:
    return max(event.end for event in events)


def iteration_time(schedule: Schedule, stages: int, microbatches: int, times: Times = Times()) -> float:
    """Time from one optimizer step of the first stage to the next, after the pipeline has filled."""
    events = simulate(schedule, Shape(stages, microbatches, 0, 6), times)
    ends = [event.end for event in events if event.stage == 0 and event.action.kind == STEP]
    return ends[3] - ends[2]
