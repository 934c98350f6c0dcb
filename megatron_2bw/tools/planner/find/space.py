"""The choices of a search. Pure Python."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megatron_2bw.tools.planner.descriptions.plan import RECOMPUTE

PLANNED = ("2bw", "pipedream-flush", "megatron")
# with larger bubbles than 1F1B: on request
OTHERS = ("gpipe", "no-pipelining")
RECOMPUTES = (*RECOMPUTE, "stage")
MEMORY = ("two-slots", "one-slot", "shard", "remainders", "host")


# Of a schedule, by its cost: two gradient slots of 2bw become one and a shard, Megatron's
# main weights the 16 bits that the weights lack (--use-precision-aware-optimizer), and
# the optimizer of either is in host memory.
LEANER = {"2bw": ("shard", "host"), "megatron": ("remainders", "host")}


@dataclass(frozen=True)
class Space:
    """The choices of a search. None: all that are legal.

    batch         the largest safe global batch; a plan uses the largest multiple of its
                  microbatches up to that
    microbatch    sizes; by default powers of two
    virtual       chunks per stage of Megatron's interleaved schedule; by default all
                  divisors of the stage's layers
    recompute     "stage" keeps the stages' inputs only. It takes as long as "full", so
                  it is tried where that does not fit
    uneven        whether first and last stages may have other numbers of layers than
                  the others
    extra_warmup  for each plan of 2bw also the plan with the extra warm-up that hides
                  its messages (Cost.extra_warmup)
    memory        of 2bw; what LEANER has is tried where two-slots does not fit
    max_gap       of 2bw with the correction auto, in per cent of the loss
                  (run/flags/correction_notes.py); None: the paper's 2bw, all late and
                  without a correction
    context       context-parallel sizes; only 1 by default
    expert        expert-parallel sizes
    grad_reduce_in_bf16  of all plans
    """

    batch: int
    schedules: tuple[str, ...] = PLANNED
    tensor: tuple[int, ...] | None = None
    depth: tuple[int, ...] | None = None
    microbatch: tuple[int, ...] | None = None
    recompute: tuple[str, ...] = RECOMPUTES
    memory: tuple[str, ...] = MEMORY
    distributed_optimizer: tuple[bool, ...] = (False, True)
    pipeline_inside: tuple[bool, ...] = (False, True)
    virtual: tuple[int, ...] | None = None
    uneven: bool = True
    sequence_parallel: bool = True
    extra_warmup: bool = True
    max_gap: float | None = None
    context: tuple[int, ...] | None = (1,)
    expert: tuple[int, ...] | None = None
    grad_reduce_in_bf16: bool = False

    @property
    def exact(self) -> Space:
        """The plans without late gradients."""
        return replace(self, max_gap=-math.inf)
