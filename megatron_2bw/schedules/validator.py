"""Dry run of a schedule's action lists that reports the first broken rule. Pure Python.

Invariant: lists that pass can be executed in any timing by a neighbour exchange whose
receives block and whose sends do not: no stage waits for a message that is never sent,
and no weights that are still read are overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_2bw.schedules.action import REDUCE, STEP, Action, B, F, Shape
from megatron_2bw.schedules.base import Schedule


class ScheduleError(ValueError):
    """A fault in a schedule; the message ends with the rank x step grid, the fault
    marked by > <."""


@dataclass
class _Stage:
    """The progress of one stage."""

    actions: list[Action]
    position: int = 0
    # in the order in which their outputs are sent
    forwards: list[int] = field(default_factory=list)
    backwards: list[int] = field(default_factory=list)
    in_flight: dict[int, int] = field(default_factory=dict)  # microbatch -> version
    # the same for all forwards so far
    version_of: dict[int, int] = field(default_factory=dict)
    newest: int = 0
    held: set[int] = field(default_factory=set)  # weight versions in the stores

    @property
    def next(self) -> Action | None:
        return (
            self.actions[self.position] if self.position < len(self.actions) else None
        )

    def kept(self) -> set[int]:
        """Versions that a step must not overwrite: those in flight and those that later
        forwards still read."""
        later = (
            a.version
            for a in self.actions[self.position :]
            if a.kind == F and a.version <= self.newest
        )
        return {*self.in_flight.values(), *later}


def validate(schedule: Schedule, shape: Shape) -> None:
    """Check iterations shape.first ... shape.end - 1 of `schedule` on all stages.

    Raises ScheduleError naming the stage, the step and the rule that is broken.
    """
    needed = schedule.min_microbatches(shape.stages)
    if shape.microbatches < needed:
        raise ScheduleError(
            f"{schedule.name} needs at least {needed} microbatches with {shape.stages} stages"
        )
    actions = [
        [
            action
            for iteration in range(shape.first, shape.end)
            for action in schedule.actions(shape, stage, iteration)
        ]
        for stage in range(shape.stages)
    ]
    check_actions(actions, schedule, shape)


def check_actions(
    actions: list[list[Action]], schedule: Schedule, shape: Shape
) -> None:
    """Check action lists, one per stage, against the rules and the limits of
    `schedule`. Raises ScheduleError."""
    stages = [_Stage(list(own), newest=shape.first) for own in actions]
    # a resumed 2BW run starts with W(first) and the shadow weights W(first - 1)
    for stage in stages:
        stage.held = {shape.first, *stage.kept()}
    while any(stage.next for stage in stages):
        progressed = False
        for index, stage in enumerate(stages):
            while (action := stage.next) and _ready(stages, index, action, schedule):
                _run(stages, index, action, schedule, shape)
                progressed = True
        if not progressed:
            index = next(i for i, stage in enumerate(stages) if stage.next)
            _fail(
                stages,
                index,
                f"deadlock: {stages[index].next} waits for a message that is never sent",
            )
    for index in range(len(stages)):
        _check_complete(stages, index, shape)


def _ready(
    stages: list[_Stage], index: int, action: Action, schedule: Schedule
) -> bool:
    """Whether the inputs of a stage's next action have arrived. Messages of a boundary
    arrive in the order sent."""
    stage = stages[index]
    if action.kind == F and index > 0:
        return len(stages[index - 1].forwards) > len(stage.forwards)
    if action.kind == B and index < len(stages) - 1:
        return len(stages[index + 1].backwards) > len(stage.backwards)
    if action.kind == STEP and schedule.global_step:
        return all(_has_reduced(other, action.batch) for other in stages)
    return True


def _has_reduced(stage: _Stage, batch: int) -> bool:
    return any(
        a.kind == REDUCE and a.batch == batch
        for a in reversed(stage.actions[: stage.position])
    )


def _run(
    stages: list[_Stage], index: int, action: Action, schedule: Schedule, shape: Shape
) -> None:
    if action.chunk >= schedule.chunks:
        _fail(
            stages, index, f"{action} names a model chunk that the stage does not hold"
        )
    if action.kind == F:
        _run_forward(stages, index, action, schedule, shape)
    elif action.kind == B:
        _run_backward(stages, index, action)
    else:
        _run_update(stages, index, action, schedule, shape)
    stages[index].position += 1


def _run_forward(
    stages: list[_Stage], index: int, action: Action, schedule: Schedule, shape: Shape
) -> None:
    stage, x = stages[index], action.microbatch
    if x in stage.forwards:
        _fail(stages, index, f"microbatch {x} runs forward twice")
    if index > 0 and stages[index - 1].forwards[len(stage.forwards)] != x:
        sent = stages[index - 1].forwards[len(stage.forwards)]
        _fail(
            stages,
            index,
            f"{action} would take the activations of microbatch {sent} that stage {index - 1} sent",
        )
    if action.version not in stage.held:
        _fail(
            stages,
            index,
            f"{action} reads W({action.version}), which the stage does not hold",
        )
    if (
        schedule.same_version_everywhere
        and index > 0
        and stages[index - 1].version_of[x] != action.version
    ):
        other = stages[index - 1].version_of[x]
        _fail(
            stages,
            index,
            f"{action} reads W({action.version}), stage {index - 1} read W({other})",
        )
    stage.forwards.append(x)
    stage.version_of[x] = stage.in_flight[x] = action.version
    limit = schedule.max_in_flight(shape, index)
    if len(stage.in_flight) > limit:
        _fail(
            stages,
            index,
            f"{len(stage.in_flight)} microbatches in flight, at most {limit} allowed",
        )


def _run_backward(stages: list[_Stage], index: int, action: Action) -> None:
    stage, x = stages[index], action.microbatch
    if x not in stage.in_flight:
        _fail(stages, index, f"microbatch {x} runs backward without its forward")
    if (
        index < len(stages) - 1
        and stages[index + 1].backwards[len(stage.backwards)] != x
    ):
        sent = stages[index + 1].backwards[len(stage.backwards)]
        _fail(
            stages,
            index,
            f"{action} would take the gradient of microbatch {sent} that stage {index + 1} sent",
        )
    if stage.in_flight[x] != action.version:
        _fail(
            stages,
            index,
            f"{action} reads W({action.version}), its forward read W({stage.in_flight[x]})",
        )
    del stage.in_flight[x]
    stage.backwards.append(x)


def _run_update(
    stages: list[_Stage], index: int, action: Action, schedule: Schedule, shape: Shape
) -> None:
    stage, batch = stages[index], action.batch
    of_batch = range(batch * shape.microbatches, (batch + 1) * shape.microbatches)
    missing = [x for x in of_batch if x not in stage.backwards]
    if missing:
        _fail(stages, index, f"{action} before the backward of microbatch {missing[0]}")
    if action.kind == REDUCE:
        if (
            schedule.late_step
            and len(stage.kept()) > schedule.max_versions(shape, index) - 1
        ):
            _fail(
                stages,
                index,
                (
                    f"{action}: versions {sorted(stage.kept())} leave no free weight "
                    "store for its step"
                ),
            )
        return
    if not _has_reduced(stage, batch):
        _fail(stages, index, f"{action} before R{batch}")
    if action.version != stage.newest + 1:
        _fail(
            stages, index, f"{action} skips a version: the newest is W({stage.newest})"
        )
    stage.held = {action.version, *stage.kept()}
    if len(stage.held) > schedule.max_versions(shape, index):
        limit = schedule.max_versions(shape, index)
        _fail(
            stages,
            index,
            f"{len(stage.held)} weight versions {sorted(stage.held)}, at most {limit} allowed",
        )
    stage.newest = action.version


def _check_complete(stages: list[_Stage], index: int, shape: Shape) -> None:
    stage = stages[index]
    expected = list(
        range(shape.first * shape.microbatches, shape.end * shape.microbatches)
    )
    if sorted(stage.forwards) != expected or sorted(stage.backwards) != expected:
        lost = sorted(set(expected) - set(stage.backwards)) or sorted(
            set(stage.forwards) ^ set(expected)
        )
        _fail(stages, index, f"microbatch {lost[0]} is not run exactly once")
    for kind, name in ((REDUCE, "reduced"), (STEP, "stepped")):
        batches = [action.batch for action in stage.actions if action.kind == kind]
        if batches != [*range(shape.first, shape.end)]:
            _fail(stages, index, f"each batch is {name} once, in order, not {batches}")


def _fail(stages: list[_Stage], index: int, reason: str) -> None:
    step = min(stages[index].position, len(stages[index].actions) - 1)
    raise ScheduleError(
        f"stage {index}, step {step}: {reason}\n{grid([s.actions for s in stages], (index, step))}"
    )


def grid(actions: list[list[Action]], mark: tuple[int, int] | None = None) -> str:
    """The rank x step table of action lists as text; the action at `mark` = (stage,
    step) stands between > <."""

    def cell(stage: int, step: int) -> str:
        text = str(actions[stage][step]) if step < len(actions[stage]) else ""
        return f">{text}<" if (stage, step) == mark else text

    steps = max(map(len, actions))
    width = max(
        6, *(len(cell(s, k)) for s in range(len(actions)) for k in range(steps))
    )
    rows = ["step".ljust(9) + " ".join(str(k).ljust(width) for k in range(steps))]
    for stage in range(len(actions)):
        rows.append(
            f"stage {stage}".ljust(9)
            + " ".join(cell(stage, k).ljust(width) for k in range(steps))
        )
    return "\n".join(row.rstrip() for row in rows)
