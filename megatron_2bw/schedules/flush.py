"""The schedules that drain the pipeline at every batch: one weight version, no gradient
delay.

They differ in how many forwards a stage runs ahead of its backwards. Forwards run in
the order of the microbatches in all of them, and so do backwards. So all add the
gradients in the same order and give the same bits.
"""

from dataclasses import dataclass

from megatron_2bw.schedules.base import Action, Schedule, Shape, with_flush


@dataclass(frozen=True)
class Flush(Schedule):
    """The common part of the schedules with a flush."""

    def actions(
        self,
        shape: Shape,
        stage: int,
        iteration: int,
    ) -> list[Action]:
        return with_flush(self, shape, stage, iteration)

    def max_in_flight(self, shape: Shape, stage: int) -> int:
        return min(self.ahead(shape, stage) + 1, shape.microbatches)


@dataclass(frozen=True)
class PipeDreamFlush(Flush):
    """1F1B with a flush (paper, section 3.2; Megatron's own schedule without
    interleaving)."""

    name = "pipedream-flush"
    summary = "1F1B with a flush, one weight version"


@dataclass(frozen=True)
class GPipe(Flush):
    """All forwards, then all backwards (paper, Figure 1).

    round  N: a batch runs in ceil(m / N) rounds of at most N microbatches, each all
           forwards, then all backwards. So a stage holds N activations, not m, and the
           pipeline drains after each round (paper, section 5.2). The gradients add up
           over the rounds; the last one is smaller if N does not divide m. None: one
           round.
    """

    name = "gpipe"
    summary = "all forwards, then all backwards, flush"

    round: int | None = None

    def ahead(self, shape: Shape, stage: int) -> int:
        return min(self.round or shape.microbatches, shape.microbatches)

    def max_in_flight(self, shape: Shape, stage: int) -> int:
        return self.ahead(shape, stage)


@dataclass(frozen=True)
class NoPipelining(Flush):
    """Inter-layer model parallelism: one microbatch at a time in the whole pipeline
    (paper, section 5.2)."""

    name = "no-pipelining"
    summary = "inter-layer model parallelism, one microbatch at a time"

    def ahead(self, shape: Shape, stage: int) -> int:
        return 0
