"""Dry run of a schedule's action lists that reports the first broken rule. Pure Python.

Invariant: lists that pass can be executed in any timing by a neighbour exchange whose
receives block and whose sends do not: no stage waits for a message that is never sent,
and no weights that are still read are overwritten.
"""

from typing import NoReturn

from megatron_2bw.schedules.base import (
    PREDICT,
    REDUCE,
    STEP,
    Action,
    B,
    F,
    Schedule,
    Shape,
)


class ScheduleError(ValueError):
    """A fault in a schedule; the message ends with the rank x step grid, the fault
    marked by > <."""


class _Stage:
    """The progress of one stage.

    forwards   microbatches in the order in which their outputs are sent; so backwards
    in_flight  the weight version of each microbatch between its forward and backward
    versions   of all forwards so far
    predicted  batches whose weights are predicted
    newest     the newest weight version
    held       the weight versions in the stores
    """

    def __init__(
        self,
        index: int,
        actions: list[Action],
        newest: int,
    ):
        self.index = index
        self.actions = actions
        self.position = 0
        self.forwards: list[int] = []
        self.backwards: list[int] = []
        self.in_flight: dict[int, int] = {}
        self.versions: dict[int, int] = {}
        self.predicted: set[int] = set()
        self.newest = newest
        # a resumed 2BW run starts with W(first) and the shadow weights W(first - 1)
        self.held = self.kept() | {newest}

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
            if action.kind in (F, PREDICT):
                versions.add(action.version)
        return {version for version in versions if version <= self.newest}

    def has_reduced(self, batch: int) -> bool:
        for action in reversed(self.actions[: self.position]):
            if action.kind == REDUCE:
                return action.batch >= batch
        return False


def validate(schedule: Schedule, shape: Shape) -> None:
    """Check iterations shape.first ... shape.end - 1 of `schedule` on all stages.

    Raises ScheduleError naming the stage, the step and the rule that is broken.
    """
    actions: list[list[Action]] = []
    for stage in range(shape.stages):
        actions.append([])
        for iteration in range(shape.first, shape.end):
            actions[stage] += schedule.actions(shape, stage, iteration)
    check_actions(actions, schedule, shape)


def check_actions(
    actions: list[list[Action]],
    schedule: Schedule,
    shape: Shape,
) -> None:
    """Check action lists, one per stage, against the rules and the limits of
    `schedule`. Raises ScheduleError."""
    _DryRun(actions, schedule, shape).run()


class _DryRun:
    def __init__(
        self,
        actions: list[list[Action]],
        schedule: Schedule,
        shape: Shape,
    ):
        self.schedule = schedule
        self.shape = shape
        self.stages: list[_Stage] = []
        for index, own in enumerate(actions):
            self.stages.append(_Stage(index, own, newest=shape.first))

    def run(self) -> None:
        """Each stage runs as far as its messages let it, until all have ended."""
        waiting = [stage for stage in self.stages if stage.next]
        while waiting:
            progressed = False
            for stage in waiting:
                while self.is_ready(stage):
                    self.execute(stage)
                    progressed = True
            if not progressed:
                action = waiting[0].next
                reason = f"deadlock: {action} waits for a message that is never sent"
                self.fail(waiting[0], reason)
            waiting = [stage for stage in waiting if stage.next]
        for stage in self.stages:
            self.check_complete(stage)

    def before(self, stage: _Stage) -> _Stage | None:
        """The stage that sends activations to `stage`."""
        if stage.index == 0:
            return None
        return self.stages[stage.index - 1]

    def after(self, stage: _Stage) -> _Stage | None:
        """The stage that sends gradients to `stage`."""
        if stage is self.stages[-1]:
            return None
        return self.stages[stage.index + 1]

    def is_ready(self, stage: _Stage) -> bool:
        """Whether a stage has a next action, and its inputs have arrived. Messages of a
        boundary arrive in the order sent."""
        action = stage.next
        before = self.before(stage)
        after = self.after(stage)
        if action is None:
            return False
        if action.kind == F and before is not None:
            return len(before.forwards) > len(stage.forwards)
        if action.kind == B and after is not None:
            return len(after.backwards) > len(stage.backwards)
        if action.kind == STEP and self.schedule.global_step:
            return all(other.has_reduced(action.batch) for other in self.stages)
        return True

    def execute(self, stage: _Stage) -> None:
        """The next action of a stage."""
        action = stage.next
        assert action is not None
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
        elif action.kind == PREDICT:
            self.predict(stage, action)
        else:
            self.step(stage, action)
        stage.position += 1

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
        batch = self.shape.batch(x)
        if self.schedule.is_predicted(self.shape, batch):
            if batch not in stage.predicted:
                self.fail(stage, f"{action} before P{batch}")
        if before is not None and self.schedule.same_version_everywhere:
            other = before.versions[x]
            if other != action.version:
                self.fail(stage, f"{reads}, stage {before.index} read W({other})")
        stage.forwards.append(x)
        stage.versions[x] = action.version
        stage.in_flight[x] = action.version
        limit = self.schedule.max_in_flight(self.shape, stage.index)
        count = len(stage.in_flight)
        if count > limit:
            self.fail(stage, f"{count} microbatches in flight, at most {limit} allowed")

    def backward(self, stage: _Stage, action: Action) -> None:
        x = action.microbatch
        if x not in stage.in_flight:
            self.fail(stage, f"microbatch {x} runs backward without its forward")
        after = self.after(stage)
        if after is not None:
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
        if self.schedule.late_step and len(kept) >= limit:
            self.fail(
                stage,
                f"{action}: versions {sorted(kept)} leave no free weight store for its step",
            )

    def predict(self, stage: _Stage, action: Action) -> None:
        if action.version != stage.newest:
            self.fail(stage, f"{action}: the newest weights are W({stage.newest})")
        if action.version in stage.versions.values():
            self.fail(stage, f"{action} overwrites weights that a forward has read")
        if action.batch in stage.predicted:
            self.fail(stage, f"{action} for the second time")
        first = (action.batch - 1) * self.shape.microbatches
        if first not in stage.backwards:
            self.fail(stage, f"{action} before the first backward of that batch")
        if stage.has_reduced(action.batch - 1):
            self.fail(stage, f"{action} while the step of that batch may run")
        stage.predicted.add(action.batch)

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
        count = self.shape.microbatches
        first = action.batch * count
        for x in range(first, first + count):
            if x not in stage.backwards:
                self.fail(stage, f"{action} before the backward of microbatch {x}")

    def check_complete(self, stage: _Stage) -> None:
        shape = self.shape
        first = shape.first * shape.microbatches
        end = shape.end * shape.microbatches
        expected = range(first, end)
        for run in (stage.backwards, stage.forwards):
            differing = set(run).symmetric_difference(expected)
            if differing:
                self.fail(stage, f"microbatch {min(differing)} is not run exactly once")
        for kind, name in ((REDUCE, "reduced"), (STEP, "stepped")):
            batches = []
            for action in stage.actions:
                if action.kind == kind:
                    batches.append(action.batch)
            if batches != [*range(shape.first, shape.end)]:
                self.fail(stage, f"each batch is {name} once, in order, not {batches}")

    def fail(self, stage: _Stage, reason: str) -> NoReturn:
        step = min(stage.position, len(stage.actions) - 1)
        place = f"stage {stage.index}, step {step}"
        actions = [each.actions for each in self.stages]
        table = grid(actions, mark=(stage.index, step))
        raise ScheduleError(f"{place}: {reason}\n{table}")


def grid(
    actions: list[list[Action]],
    mark: tuple[int, int] | None = None,
) -> str:
    """The rank x step table of action lists as text; the action at `mark` = (stage,
    step) stands between > <."""
    cells = [[str(action) for action in own] for own in actions]
    if mark is not None and cells[mark[0]]:
        stage, step = mark
        cells[stage][step] = f">{cells[stage][step]}<"
    width = len("F0@0.0")
    steps: list[str] = []
    for own in cells:
        width = max(width, *map(len, own))
        while len(steps) < len(own):
            steps.append(str(len(steps)))
    rows = [("step", steps)]
    for stage, own in enumerate(cells):
        rows.append((f"stage {stage}", own))
    lines = []
    for title, row in rows:
        line = title.ljust(8)
        for cell in row:
            line += " " + cell.ljust(width)
        lines.append(line.rstrip())
    return "\n".join(lines)
