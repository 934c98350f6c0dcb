"""Process groups of the late step, so that its collectives never meet those of the
training thread.

See docs/design.md, rule 10 and [Note: collectives concurrent with point-to-point
traffic].
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu

from megatron_2bw.engine.process_groups import StepGroup, new_group


def gather(values: Sequence[float], group: dist.ProcessGroup) -> list[list[float]]:
    """The `values` of all ranks of a group of gloo, by rank."""
    own = torch.tensor(values, dtype=torch.float64, device="cpu")
    rows = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(rows, own, group=group)
    return [row.tolist() for row in rows]


class Groups:
    """Twins of Megatron's process groups, with the same ranks, as step groups
    (`core.groups.StepGroup`).

    The small ones use gloo: no kernel of theirs waits on the GPU for another stage.
    Every rank must make them, at the same time and in the same order as all others.

    megatron    Megatron's ProcessGroupCollection
    parts       Megatron's optimizers of the stage
    host        whether the gradients are reduced on the host, once they are summed over
                the replicas
    experts     the ranks over which the gradients of experts are summed; None without
                experts
    """

    def __init__(
        self,
        megatron: Any,
        device: torch.device,
        timeout: timedelta | None,
        parts: Sequence[Any] = (),
        host: bool = False,
        experts: dist.ProcessGroup | None = None,
    ):
        self._twins: dict[frozenset[int], Any] = {}

        def twin(
            group: dist.ProcessGroup | None, name: str, backend: str | None = None
        ) -> Any:
            ranks = (
                [dist.get_rank()]
                if group is None
                else dist.get_process_group_ranks(group)
            )
            return StepGroup(new_group(ranks, name, backend, timeout))

        self.world = twin(dist.group.WORLD, "world", "gloo")
        # One for each set of ranks: Megatron takes one norm of parts whose groups are
        # one.
        shared = [
            part.get_grad_stats_parallel_group() or dist.group.WORLD for part in parts
        ]
        if experts is not None:
            shared += [megatron.tp_dp_cp, mpu.get_tensor_and_context_parallel_group()]
        for group in shared:
            ranks = frozenset(dist.get_process_group_ranks(group))
            self._twins[ranks] = self._twins.get(ranks) or twin(
                group, "statistics", "gloo"
            )
        self.data = (
            twin(megatron.dp_cp, "data"),
            *([twin(experts, "experts")] if experts is not None else []),
        )
        self.embedding = twin(megatron.embd, "embedding", "gloo" if host else None)
        for group in (*self.data, self.embedding):
            # NCCL creates a communicator at first use: here, where every rank is, and
            # not concurrently with training. Nobody uses an embedding group of one
            # rank; NCCL may take 512 MiB for it (its issue 2363).
            if group in self.data or group.size() > 1:
                dist.all_reduce(torch.zeros(1, device=device), group=group)
        self._embedding_barrier = twin(megatron.embd, "embedding meeting", "gloo")
        # The collection for Megatron's finalize function.
        self.megatron = copy.copy(megatron)
        self.megatron.pp = twin(megatron.pp, "pipeline", "gloo")
        self.megatron.tp = twin(megatron.tp, "tensor", "gloo")
        tokens = twin(megatron.dp_cp, "tokens", "gloo") if host else self.data[0]
        # of the token count, which Megatron prefers to take from the other one:
        self.megatron.dp_cp = tokens
        self.megatron.dp_cp_gtp_remat = tokens
        self.megatron.tp_dp_cp = (
            self.twin_of(megatron.tp_dp_cp) if experts is not None else None
        )
        self.megatron.embd = self.embedding if megatron.embd is not None else None
        # of one rank, but for a T5: never used
        position = twin(megatron.pos_embd, "position embedding", "gloo")
        self.megatron.pos_embd = position if megatron.pos_embd is not None else None
        for part in parts:
            # Muon orthogonalises a matrix that the tensor-parallel ranks share; every
            # stage has such a part, or none.
            if getattr(part.optimizer, "pg_collection", None) is not None:
                part.optimizer.pg_collection = copy.copy(part.optimizer.pg_collection)
                part.optimizer.pg_collection.tp = tensor = twin(megatron.tp, "matrices")
                dist.all_reduce(torch.zeros(1, device=device), group=tensor)

    def twin_of(self, group: dist.ProcessGroup | None) -> Any:
        """The twin of one of Megatron's groups for statistics."""
        return (
            None
            if group is None
            else self._twins[frozenset(dist.get_process_group_ranks(group))]
        )

    def align_embedding_ranks(self) -> None:
        """Barrier (gloo) before the tied embeddings' all-reduce: an NCCL kernel that
        waits would occupy the GPU."""
        if (
            dist.get_backend(self.embedding) == "nccl"
            and self._embedding_barrier.size() > 1
        ):
            dist.barrier(group=self._embedding_barrier)

    def gather_over_pipeline(self, values: Sequence[float]) -> list[list[float]]:
        """The `values` of all stages of the pipeline, first stage to last."""
        return gather(values, self.megatron.pp)

    def any_rank(self, *flags: bool) -> list[bool]:
        """For each flag, whether it is set on any rank of the world."""
        values = torch.tensor([int(flag) for flag in flags], device="cpu")
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.world)
        return [bool(value) for value in values]
