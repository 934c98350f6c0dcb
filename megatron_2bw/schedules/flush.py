"""The schedules that drain the pipeline at every batch: one weight version, no gradient
delay.

They differ in how many forwards a stage runs ahead of its backwards. Forwards run in
the order of the microbatches in all of them, and so do backwards. So all add the
gradients in the same order and give the same bits.
"""

import itertools
from dataclasses import dataclass

from megatron_2bw.schedules.base import Action, B, F, Schedule, Shape


@dataclass(frozen=True)
class PipeDreamFlush(Schedule):
    """1F1B with a flush (paper, section 3.2; Megatron's own schedule without
    interleaving)."""

    name = "pipedream-flush"
    summary = "1F1B with a flush, one weight version"


@dataclass(frozen=True)
class GPipe(Schedule):
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

    def order(
        self,
        shape: Shape,
        stage: int,
        iteration: int,
    ) -> list[Action]:
        size = shape.microbatches
        batch = range(iteration * size, (iteration + 1) * size)
        order: list[Action] = []
        for some in itertools.batched(batch, self.ahead(shape, stage)):
            order += [Action(F, x, iteration) for x in some]
            order += [Action(B, x, iteration) for x in some]
        return order

    def ahead(self, shape: Shape, stage: int) -> int:
        return min(self.round or shape.microbatches, shape.microbatches)

    def max_in_flight(self, shape: Shape, stage: int) -> int:
        return self.ahead(shape, stage)


@dataclass(frozen=True)
class NoPipelining(Schedule):
    """Inter-layer model parallelism: one microbatch at a time in the whole pipeline
    (paper, section 5.2)."""

    name = "no-pipelining"
    summary = "inter-layer model parallelism, one microbatch at a time"

    def ahead(self, shape: Shape, stage: int) -> int:
        return 0
