"""An action of a pipeline stage, its text form, and the order of actions from which all
schedules are built. Pure Python.

Invariant: `parse_actions(str(action)) == [action]`.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

F, B, REDUCE, STEP, PREDICT = "F", "B", "R", "S", "P"


class Action(NamedTuple):
    """What a stage does next.

    kind     F (forward), B (backward), R (start of the data-parallel reduction), S
             (optimizer step), P (prediction of the weights that a late batch needs)
    number   of the `microbatch` of F and B; of the `batch` of R, S and P
    version  F, B: the microbatch runs on W(version); R: the version its gradients
             belong to; S: the step writes W(version); P: the batch runs on the store
             of W(version), which gets the prediction of W(version + 1)
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
        assert self.kind in (F, B), f"{self} is of a batch"
        return self.number

    @property
    def batch(self) -> int:
        """The batch of R, S and P."""
        assert self.kind not in (F, B), f"{self} is of a microbatch"
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
        match = re.fullmatch(r"([FBRSP])(\d+)@(\d+)(?:\.(\d+))?", word)
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

    Subclasses define the order and the limits that the validator enforces. One
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
    late: int | str = 0  # microbatches of a batch that run on older weights
    predicts: bool = False  # its late microbatches run on predicted weights
    memory: str = "two-slots"  # where a late step finds gradients and optimizer
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
        return [
            *self.order(shape, stage, iteration),
            reduce(iteration),
            step(iteration),
        ]

    def order(
        self,
        shape: Shape,
        stage: int,
        iteration: int,
    ) -> list[Action]:
        """The forwards and backwards of an iteration, in turn (1F1B). Each stage is
        `ahead` forwards ahead of its backwards.

        `crossing` forwards of the batch have run in the iteration before, and as many
        of the next batch run in this one.
        """
        size = shape.microbatches
        start = iteration * size
        begun = 0
        early = 0
        if iteration > shape.first:
            begun = self.crossing(shape, stage, iteration)
        if iteration + 1 < shape.end:
            early = self.crossing(shape, stage, iteration + 1)
        last = min(start + size + early, shape.end * size)
        forwards = []
        for x in range(start + begun, last):
            forwards.append(Action(F, x, self.version(shape, stage, x)))
        backwards = []
        for x in range(start, start + size):
            backwards.append(Action(B, x, self.version(shape, stage, x)))
        fill = self.ahead(shape, stage) - begun
        return one_forward_one_backward(forwards, backwards, fill)

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

    def crossing(
        self,
        shape: Shape,
        stage: int,
        batch: int,
    ) -> int:
        """Forwards of `batch` that run before the last backward of the batch before it.
        None: a flush."""
        return 0

    def reads_late(self, version: int) -> bool:
        """Whether W(version) is read only by batches with microbatches whose gradients
        come an update late."""
        return False

    def is_predicted(self, shape: Shape, batch: int) -> bool:
        """Whether the microbatches of `batch` run on predicted weights."""
        return False

    def max_versions(self, shape: Shape, stage: int) -> int:
        """Weight versions that `stage` holds at most (Table in docs/schedules.md)."""
        return 1

    def max_in_flight(self, shape: Shape, stage: int) -> int:
        """Microbatches whose activations `stage` holds at most."""
        return min(self.ahead(shape, stage) + 1, shape.microbatches)


def reduce(iteration: int) -> Action:
    """The start of the reduction of batch `iteration`."""
    return Action(REDUCE, iteration, iteration)


def step(iteration: int) -> Action:
    """The step of batch `iteration`, which writes W(iteration + 1)."""
    return Action(STEP, iteration, iteration + 1)


def one_forward_one_backward(
    forwards: list[Action], backwards: list[Action], ahead: int
) -> list[Action]:
    """`ahead` forwards, then forward and backward in turn, then the remaining backwards
    (1F1B)."""
    order = forwards[:ahead]
    rest = forwards[ahead:]
    for index, backward in enumerate(backwards):
        order += rest[index : index + 1]
        order.append(backward)
    return order
