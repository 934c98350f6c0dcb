"""Megatron's interleaved 1F1B with a flush, for the planner: Megatron's own loop runs
it, not our runtime."""

from dataclasses import dataclass

from megatron_2bw.schedules.action import Action, B, F, Shape
from megatron_2bw.schedules.base import Schedule, finish, one_forward_one_backward


@dataclass(frozen=True)
class Interleaved(Schedule):
    """Each stage holds `chunks` model chunks; chunk c of stage s is part c·d + s of the
    model.

    Microbatches pass the chunks in groups of d (Narayanan et al. 2021, arXiv
    2104.04473, section 2.2; Megatron's schedules.py, get_schedule_table).
    """

    name = "megatron-interleaved"
    summary = "Megatron's 1F1B with several model chunks a stage, with a flush"

    chunks: int

    def actions(self, shape: Shape, stage: int, iteration: int) -> list[Action]:
        order = self._order(shape, iteration)
        forwards = [Action(F, x, iteration, chunk) for x, chunk in order]
        backwards = [
            Action(B, x, iteration, self.chunks - 1 - chunk) for x, chunk in order
        ]
        ahead = min(
            2 * shape.warmup(stage) + (self.chunks - 1) * shape.stages, len(order)
        )
        return one_forward_one_backward(forwards, backwards, ahead) + finish(iteration)

    def _order(self, shape: Shape, iteration: int) -> list[tuple[int, int]]:
        """(microbatch, chunk) of the forwards, group by group."""
        start, m, d = iteration * shape.microbatches, shape.microbatches, shape.stages
        groups = [range(start + k, start + min(k + d, m)) for k in range(0, m, d)]
        return [
            (x, chunk)
            for group in groups
            for chunk in range(self.chunks)
            for x in group
        ]

    def min_microbatches(self, stages: int) -> int:
        return stages

    def max_in_flight(self, shape: Shape, stage: int) -> int:
        """Counted in chunks of microbatches."""
        return min(
            2 * shape.warmup(stage) + (self.chunks - 1) * shape.stages + 1,
            shape.microbatches * self.chunks,
        )
