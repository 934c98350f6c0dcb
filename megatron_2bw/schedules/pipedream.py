"""PipeDream: no flush, each stage's newest weights at a forward, kept for its backward
(paper, section 2)."""

from dataclasses import dataclass

from megatron_2bw.schedules.base import Action, Schedule, Shape, finish, without_flush


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
        return max(
            (microbatch - shape.warmup(stage)) // shape.microbatches, shape.first
        )

    def actions(
        self,
        shape: Shape,
        stage: int,
        iteration: int,
    ) -> list[Action]:
        return without_flush(self, shape, stage, iteration) + finish(iteration)

    def max_versions(self, shape: Shape, stage: int) -> int:
        return -(-shape.warmup(stage) // shape.microbatches) + 1

    def max_in_flight(self, shape: Shape, stage: int) -> int:
        return shape.warmup(stage) + 1
