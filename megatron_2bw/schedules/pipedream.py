"""PipeDream: no flush, each stage's newest weights at a forward, kept for its backward
(paper, section 2)."""

from dataclasses import dataclass

from megatron_2bw.schedules.base import Schedule, Shape


@dataclass(frozen=True)
class PipeDream(Schedule):
    """Each stage steps after m backwards of its own, so the gradient delay differs by
    stage; m = 1 is the paper's."""

    name = "pipedream"
    summary = (
        "no flush, each stage's newest weights at a forward, gradient delay by stage"
    )
    flushes = False
    global_step = False
    same_version_everywhere = False

    def version(
        self,
        shape: Shape,
        stage: int,
        microbatch: int,
    ) -> int:
        """Updates that `stage` has completed when the forward of `microbatch` runs."""
        updates = (microbatch - shape.warmup(stage)) // shape.microbatches
        return max(updates, shape.first)

    def crossing(
        self,
        shape: Shape,
        stage: int,
        batch: int,
    ) -> int:
        return shape.warmup(stage)

    def max_versions(self, shape: Shape, stage: int) -> int:
        return -(-shape.warmup(stage) // shape.microbatches) + 1

    def max_in_flight(self, shape: Shape, stage: int) -> int:
        return shape.warmup(stage) + 1
