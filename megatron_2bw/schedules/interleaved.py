"""Megatron's interleaved 1F1B with a flush, for the planner: Megatron's own loop runs
it, not our runtime."""

from dataclasses import dataclass

from megatron_2bw.schedules.base import (
    Action,
    B,
    F,
    Schedule,
    Shape,
    one_forward_one_backward,
)


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

    def order(
        self,
        shape: Shape,
        stage: int,
        iteration: int,
    ) -> list[Action]:
        forwards: list[Action] = []
        backwards: list[Action] = []
        start = iteration * shape.microbatches
        end = start + shape.microbatches
        for first in range(start, end, shape.stages):
            group = range(first, min(first + shape.stages, end))
            for chunk in range(self.chunks):
                backward_chunk = self.chunks - 1 - chunk
                for x in group:
                    forwards.append(Action(F, x, iteration, chunk))
                    backwards.append(Action(B, x, iteration, backward_chunk))
        ahead = min(self._warmup(shape, stage), len(forwards))
        return one_forward_one_backward(forwards, backwards, ahead)

    def _warmup(self, shape: Shape, stage: int) -> int:
        """Forwards of chunks before the first backward."""
        earlier_chunks = self.chunks - 1
        return 2 * shape.warmup(stage) + earlier_chunks * shape.stages

    def max_in_flight(self, shape: Shape, stage: int) -> int:
        """Counted in chunks of microbatches."""
        forwards = shape.microbatches * self.chunks
        return min(self._warmup(shape, stage) + 1, forwards)
