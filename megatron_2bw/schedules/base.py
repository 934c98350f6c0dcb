"""An action of a pipeline stage, its text form, and the two orders of actions that all
schedules are built from. Pure Python.

Invariant: `parse_actions(str(action)) == [action]`.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

F, B, REDUCE, STEP = "F", "B", "R", "S"


class Action(NamedTuple):
    """What a stage does next.

    kind     F (forward), B (backward), R (start of the data-parallel reduction), S
             (optimizer step)
    number   of the `microbatch` of F and B; of the `batch` of R and S
    version  F, B: the microbatch runs on W(version); R: the version its gradients
             belong to; S: the step writes W(version)
    chunk    the part of the stage's model, where a stage holds several
    """

    kind: str
    number: int
    version: int
    chunk: int = 0

    @property
    def microbatch(self) -> int:
        """The microbatch of F and B, counted from the start of training: batch j holds
        microbatches jm ... (j+1)m - 1."""
        assert self.kind not in (REDUCE, STEP), f"{self} is of a batch"
        return self.number

    @property
    def batch(self) -> int:
        """The batch of R and S."""
        assert self.kind in (REDUCE, STEP), f"{self} is of a microbatch"
        return self.number

    def __str__(self) -> str:
        return f"{self.kind}{self.number}@{self.version}" + (
            f".{self.chunk}" if self.chunk else ""
        )


def parse_actions(text: str) -> list[Action]:
    """The actions written in `text`, such as "F0@0 F1@0 B0@0"; the inverse of joining
    str(action) by spaces.

    Raises ValueError for a word that is not an action.
    """
    actions = []
    for word in text.split():
        match = re.fullmatch(r"([FBRS])(\d+)@(\d+)(?:\.(\d+))?", word)
        if match is None:
            raise ValueError(f"not an action: {word!r} (expected for instance F12@3)")
        actions.append(
            Action(match[1], int(match[2]), int(match[3]), int(match[4] or 0))
        )
    return actions


@dataclass(frozen=True)
class Shape:
    """The pipeline and the range of iterations that a schedule fills.

    stages        d, the pipeline depth
    microbatches  m, microbatches per batch and pipeline
    first         the first iteration of this run (where a resumed run starts)
    end           the iteration after the last planned one
    """

    stages: int
    microbatches: int
    first: int = 0
    end: int = 1 << 40

    def warmup(self, stage: int) -> int:
        """w, the forwards that `stage` is ahead of its backwards: d - 1 - s."""
        return self.stages - 1 - stage

    def batch(self, microbatch: int) -> int:
        """The batch of `microbatch`."""
        return microbatch // self.microbatches


class Schedule:
    """A pipeline schedule: for a stage, the list of its actions in an iteration.

    Subclasses define `actions` and the limits that the validator enforces. One
    iteration is one batch is one weight update. Subclasses are frozen dataclasses:
    schedules with equal options are equal and hash alike.
    """

    name: str
    summary: str
    flushes: bool = True  # the pipeline is empty between iterations
    global_step: bool = True  # the step's gradient norm and inf flag span all stages
    # a microbatch runs on the same W on every stage
    same_version_everywhere: bool = True
    chunks: int = 1  # parts of the model that a stage holds
    # a batch's optimizer step overlaps the next batch, between its REDUCE and its STEP
    late_step: bool = False
    # batches at the start without gradient delay, in a schedule that delays the others
    sync_iterations: int = 0
    # of a batch, if not all are on older weights
    late_microbatches: int | str | None = None
    # microbatches after which the pipeline drains inside a batch, in a schedule that
    # does
    round: int | None = None

    def actions(
        self,
        shape: Shape,
        stage: int,
        iteration: int,
    ) -> list[Action]:
        """The actions of `stage` in `iteration`, in order.

        At STEP the update must be complete: at the end of the batch's iteration, or,
        with `late_step`, in the next.
        """
        raise NotImplementedError

    def version(
        self,
        shape: Shape,
        stage: int,
        microbatch: int,
    ) -> int:
        """The weight version of `microbatch`, forward and backward; here its own
        batch's, so without gradient delay."""
        return shape.batch(microbatch)

    def ahead(self, shape: Shape, stage: int) -> int:
        """Forwards before the first backward, not counting the one that alternates with
        it."""
        return shape.warmup(stage)

    def reads_late(self, version: int) -> bool:
        """Whether W(version) is read only by batches with microbatches whose gradients
        come an update late."""
        return False

    def min_microbatches(self, stages: int) -> int:
        """The smallest number of microbatches per batch that the schedule allows."""
        return 1

    def max_versions(self, shape: Shape, stage: int) -> int:
        """Weight versions that `stage` holds at most (Table in docs/schedules.md)."""
        return 1

    def max_in_flight(self, shape: Shape, stage: int) -> int:
        """Microbatches whose activations `stage` holds at most."""
        raise NotImplementedError


def reduce(iteration: int) -> Action:
    """The start of the reduction of batch `iteration`."""
    return Action(REDUCE, iteration, iteration)


def step(iteration: int) -> Action:
    """The step of batch `iteration`, which writes W(iteration + 1)."""
    return Action(STEP, iteration, iteration + 1)


def finish(iteration: int) -> list[Action]:
    """Reduction and step of batch `iteration`, one after the other."""
    return [reduce(iteration), step(iteration)]


def one_forward_one_backward(
    forwards: list[Action],
    backwards: list[Action],
    ahead: int,
) -> list[Action]:
    """`ahead` forwards, then forward and backward in turn, then the remaining backwards
    (1F1B)."""
    order = forwards[:ahead]
    rest = forwards[ahead:]
    for index, backward in enumerate(backwards):
        order += rest[index : index + 1]
        order.append(backward)
    return order


def with_flush(
    schedule: Schedule,
    shape: Shape,
    stage: int,
    iteration: int,
) -> list[Action]:
    """An iteration on the newest weights that empties the pipeline before its step, and
    after each round."""
    ahead = schedule.ahead(shape, stage)
    size = schedule.round or shape.microbatches
    end = (iteration + 1) * shape.microbatches
    order: list[Action] = []
    for first in range(iteration * shape.microbatches, end, size):
        microbatches = range(first, min(first + size, end))
        forwards = [Action(F, x, iteration) for x in microbatches]
        backwards = [Action(B, x, iteration) for x in microbatches]
        order += one_forward_one_backward(forwards, backwards, ahead)
    return order + finish(iteration)


def without_flush(
    schedule: Schedule,
    shape: Shape,
    stage: int,
    iteration: int,
) -> list[Action]:
    """Forwards and backwards of an iteration of a pipeline that is never drained
    (paper, Figure 2).

    Forwards run w = `schedule.ahead(shape, stage)` microbatches ahead of the backwards
    all through training: for k = 0 ... m-1, F(jm + w + k) and B(jm + k). Only the first
    iteration fills the pipeline, only the last drains it.
    """
    start = iteration * shape.microbatches
    end = start + shape.microbatches
    ahead = schedule.ahead(shape, stage)
    fill = ahead if iteration == shape.first else 0
    last = min(end + ahead, shape.end * shape.microbatches)
    forwards = []
    for x in range(start + ahead - fill, last):
        forwards.append(Action(F, x, schedule.version(shape, stage, x)))
    backwards = []
    for x in range(start, end):
        backwards.append(Action(B, x, schedule.version(shape, stage, x)))
    return one_forward_one_backward(forwards, backwards, fill)
