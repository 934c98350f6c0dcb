"""PipeDream-2BW: no flush, two weight versions, gradients delayed by one update (paper, section 3.1)."""

from megatron_2bw.schedules.action import Action, Shape
from megatron_2bw.schedules.base import Schedule, without_flush


class TwoBW(Schedule):
    """Every microbatch of batch j runs on W(max(j-1, 0)), forward and backward, on every stage."""

    name = "2bw"
    summary = "no flush, two weight versions, gradient delay 1"
    flushes = False

    def version(self, shape: Shape, stage: int, microbatch: int) -> int:
        return max(shape.batch(microbatch) - 1, 0)

    def actions(self, shape: Shape, stage: int, iteration: int) -> list[Action]:
        return without_flush(self, shape, stage, iteration)

    def min_microbatches(self, stages: int) -> int:
        # With fewer, a forward would need W(j) before the last backward of batch j-1 has started its step.
        return stages

    def max_versions(self, shape: Shape, stage: int) -> int:
        return 2

    def max_in_flight(self, shape: Shape, stage: int) -> int:
        return shape.warmup(stage) + 1
