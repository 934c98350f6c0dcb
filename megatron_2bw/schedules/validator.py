"""Dry run of a schedule's action lists that reports the first broken rule. Pure Python.

Invariant: lists that pass can be executed in any timing by a neighbour exchange whose
receives block and whose sends do not: no stage waits for a message that is never sent,
and no weights that are still read are overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

from megatron_2bw.schedules.action import REDUCE, STEP, Action, B, F, Shape
from megatron_2bw.schedules.base import Schedule


class ScheduleError(ValueError):
    """A fault in a schedule; the message ends with the rank x step grid, the fault
    marked by > <."""


@dataclass
class _Stage:
    """The progress of one stage."""

    index: int
    actions: list[Action]
    newest: int
    position: int = 0
    # in the order in which their outputs are sent
    forwards: list[int] = field(default_factory=list)
    backwards: list[int] = field(default_factory=list)
    in_flight: dict[int, int] = field(default_factory=dict)  # microbatch -> version
    version_of: dict[int, int] = field(default_factory=dict)  # of all forwards so far
    held: set[int] = field(default_factory=set)  # weight versions in the stores

    @property
    def next(self) -> Action | None:
        if self.position == len(self.actions):
            return None
        return self.actions[self.position]

    def kept(self) -> set[int]:
        """Versions that a step must not overwrite: those in flight and those that later
        forwards still read."""
        versions = set(self.in_flight.values())
        for action in self.actions[self.position :]:
            if action.kind == F and action.version <= self.newest:
                versions.add(action.version)
        return versions

    def has_reduced(self, batch: int) -> bool:
        done = reversed(self.actions[: self.position])
        return any(action.kind == REDUCE and action.batch == batch for action in done)


def validate(schedule: Schedule, shape: Shape) -> None:
    """Check iterations shape.first ... shape.end - 1 of `schedule` on all stages.

    Raises ScheduleError naming the stage, the step and the rule that is broken.
    """
    needed = schedule.min_microbatches(shape.stages)
    if shape.microbatches < needed:
        raise ScheduleError(
            f"{schedule.name} needs at least {needed} microbatches with {shape.stages} stages"
        )
    actions: list[list[Action]] = []
    for stage in range(shape.stages):
        actions.append([])
        for iteration in range(shape.first, shape.end):
            actions[stage] += schedule.actions(shape, stage, iteration)
    check_actions(actions, schedule, shape)


def check_actions(
    actions: list[list[Action]], schedule: Schedule, shape: Shape
) -> None:
    """Check action lists, one per stage, against the rules and the limits of
    `schedule`. Raises ScheduleError."""
    _DryRun(actions, schedule, shape).run()


class _DryRun:
    def __init__(self, actions: list[list[Action]], schedule: Schedule, shape: Shape):
        self.schedule = schedule
        self.shape = shape
        self.stages: list[_Stage] = []
        for index, own in enumerate(actions):
            stage = _Stage(index, own, newest=shape.first)
            # a resumed 2BW run starts with W(first) and the shadow weights W(first - 1)
            stage.held = {shape.first, *stage.kept()}
            self.stages.append(stage)

    def run(self) -> None:
        """Each stage runs as far as its messages let it, until all have ended."""
        waiting = [stage for stage in self.stages if stage.next]
        while waiting:
            progressed = False
            for stage in waiting:
                while stage.next and self.is_ready(stage, stage.next):
                    self.execute(stage, stage.next)
                    stage.position += 1
                    progressed = True
            if not progressed:
                reason = f"deadlock: {waiting[0].next} waits for a message that is never sent"
                self.fail(waiting[0], reason)
            waiting = [stage for stage in waiting if stage.next]
        for stage in self.stages:
            self.check_complete(stage)

    def before(self, stage: _Stage) -> _Stage | None:
        """The stage that sends activations to `stage`."""
        return self.stages[stage.index - 1] if stage.index > 0 else None

    def after(self, stage: _Stage) -> _Stage | None:
        """The stage that sends gradients to `stage`."""
        last = stage.index == len(self.stages) - 1
        return None if last else self.stages[stage.index + 1]

    def is_ready(self, stage: _Stage, action: Action) -> bool:
        """Whether the inputs of a stage's next action have arrived. Messages of a
        boundary arrive in the order sent."""
        if action.kind == F and (before := self.before(stage)):
            return len(before.forwards) > len(stage.forwards)
        if action.kind == B and (after := self.after(stage)):
            return len(after.backwards) > len(stage.backwards)
        if action.kind == STEP and self.schedule.global_step:
            return all(other.has_reduced(action.batch) for other in self.stages)
        return True

    def execute(self, stage: _Stage, action: Action) -> None:
        if action.chunk >= self.schedule.chunks:
            self.fail(
                stage, f"{action} names a model chunk that the stage does not hold"
            )
        if action.kind == F:
            self.forward(stage, action)
        elif action.kind == B:
            self.backward(stage, action)
        elif action.kind == REDUCE:
            self.reduce(stage, action)
        else:
            self.step(stage, action)

    def forward(self, stage: _Stage, action: Action) -> None:
        x = action.microbatch
        if x in stage.forwards:
            self.fail(stage, f"microbatch {x} runs forward twice")
        before = self.before(stage)
        if before is not None:
            sent = before.forwards[len(stage.forwards)]
            if sent != x:
                self.fail(
                    stage,
                    f"{action} would take the activations of microbatch {sent} that stage "
                    f"{before.index} sent",
                )
        reads = f"{action} reads W({action.version})"
        if action.version not in stage.held:
            self.fail(stage, f"{reads}, which the stage does not hold")
        if before is not None and self.schedule.same_version_everywhere:
            other = before.version_of[x]
            if other != action.version:
                self.fail(stage, f"{reads}, stage {before.index} read W({other})")
        stage.forwards.append(x)
        stage.version_of[x] = action.version
        stage.in_flight[x] = action.version
        limit = self.schedule.max_in_flight(self.shape, stage.index)
        count = len(stage.in_flight)
        if count > limit:
            self.fail(stage, f"{count} microbatches in flight, at most {limit} allowed")

    def backward(self, stage: _Stage, action: Action) -> None:
        x = action.microbatch
        if x not in stage.in_flight:
            self.fail(stage, f"microbatch {x} runs backward without its forward")
        if after := self.after(stage):
            sent = after.backwards[len(stage.backwards)]
            if sent != x:
                self.fail(
                    stage,
                    f"{action} would take the gradient of microbatch {sent} that stage "
                    f"{after.index} sent",
                )
        version = stage.in_flight.pop(x)
        if version != action.version:
            self.fail(
                stage,
                f"{action} reads W({action.version}), its forward read W({version})",
            )
        stage.backwards.append(x)

    def reduce(self, stage: _Stage, action: Action) -> None:
        self.check_backwards(stage, action)
        kept = stage.kept()
        limit = self.schedule.max_versions(self.shape, stage.index)
        if self.schedule.late_step and len(kept) > limit - 1:
            self.fail(
                stage,
                f"{action}: versions {sorted(kept)} leave no free weight store for its step",
            )

    def step(self, stage: _Stage, action: Action) -> None:
        self.check_backwards(stage, action)
        if not stage.has_reduced(action.batch):
            self.fail(stage, f"{action} before R{action.batch}")
        if action.version != stage.newest + 1:
            self.fail(
                stage, f"{action} skips a version: the newest is W({stage.newest})"
            )
        stage.held = {action.version, *stage.kept()}
        limit = self.schedule.max_versions(self.shape, stage.index)
        if len(stage.held) > limit:
            held = f"{len(stage.held)} weight versions {sorted(stage.held)}"
            self.fail(stage, f"{held}, at most {limit} allowed")
        stage.newest = action.version

    def check_backwards(self, stage: _Stage, action: Action) -> None:
        m = self.shape.microbatches
        for x in range(action.batch * m, (action.batch + 1) * m):
            if x not in stage.backwards:
                self.fail(stage, f"{action} before the backward of microbatch {x}")

    def check_complete(self, stage: _Stage) -> None:
        shape = self.shape
        expected = range(
            shape.first * shape.microbatches, shape.end * shape.microbatches
        )
        for run in (stage.backwards, stage.forwards):
            differing = set(run).symmetric_difference(expected)
            if differing:
                self.fail(stage, f"microbatch {min(differing)} is not run exactly once")
        for kind, name in ((REDUCE, "reduced"), (STEP, "stepped")):
            batches = [action.batch for action in stage.actions if action.kind == kind]
            if batches != [*range(shape.first, shape.end)]:
                self.fail(stage, f"each batch is {name} once, in order, not {batches}")

    def fail(self, stage: _Stage, reason: str) -> NoReturn:
        step = min(stage.position, len(stage.actions) - 1)
        table = grid([each.actions for each in self.stages], (stage.index, step))
        raise ScheduleError(f"stage {stage.index}, step {step}: {reason}\n{table}")


def grid(actions: list[list[Action]], mark: tuple[int, int] | None = None) -> str:
    """The rank x step table of action lists as text; the action at `mark` = (stage,
    step) stands between > <."""
    cells = [[str(action) for action in own] for own in actions]
    if mark is not None and cells[mark[0]]:
        stage, step = mark
        cells[stage][step] = f">{cells[stage][step]}<"
    steps = [str(step) for step in range(max(map(len, cells)))]
    width = max(len(cell) for own in [["F0@0.0"], *cells] for cell in own)
    rows = [("step", steps)]
    for stage, own in enumerate(cells):
        rows.append((f"stage {stage}", own))
    lines = []
    for title, row in rows:
        columns = [cell.ljust(width) for cell in row]
        lines.append(title.ljust(9) + " ".join(columns))
    return "\n".join(line.rstrip() for line in lines)
