"""Process groups of the late step, so that its collectives never meet those of the
training thread.

See docs/design.md, rule 10 and [Note: collectives concurrent with point-to-point
traffic].
"""

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
    (`engine.process_groups.StepGroup`).

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
        parts: Sequence[Any],
        host: bool,
        experts: dist.ProcessGroup | None,
    ):
        self._timeout = timeout
        self._device = device
        # One for each set of ranks: Megatron takes one norm of parts whose groups are
        # one.
        self._statistics = {}
        self.world = self._twin(dist.group.WORLD, "world", "gloo")
        for part in parts:
            group = part.get_grad_stats_parallel_group()
            self._add_statistics(group or dist.group.WORLD)
        if experts is not None:
            self._add_statistics(megatron.tp_dp_cp)
            self._add_statistics(mpu.get_tensor_and_context_parallel_group())
        self.data = (self._twin(megatron.dp_cp, "data"),)
        if experts is not None:
            self.data += (self._twin(experts, "experts"),)
        self.embedding = self._twin(
            megatron.embd, "embedding", "gloo" if host else None
        )
        for group in self.data:
            self._connect(group)
        # Nobody uses an embedding group of one rank; NCCL may take 512 MiB for it (its
        # issue 2363).
        if self.embedding.size() > 1:
            self._connect(self.embedding)
        self._embedding_barrier = self._twin(megatron.embd, "embedding meeting", "gloo")
        # The collection for Megatron's finalize function. What is not replaced has one
        # rank or is not used.
        ours = self.megatron = copy.copy(megatron)
        ours.pp = self._twin(megatron.pp, "pipeline", "gloo")
        ours.tp = self._twin(megatron.tp, "tensor", "gloo")
        tokens = self.data[0]
        if host:
            tokens = self._twin(megatron.dp_cp, "tokens", "gloo")
        # of the token count, which Megatron prefers to take from the other one:
        ours.dp_cp = tokens
        ours.dp_cp_gtp_remat = tokens
        if experts is not None:
            ours.tp_dp_cp = self.twin_of(megatron.tp_dp_cp)
        ours.embd = None if megatron.embd is None else self.embedding
        for part in parts:
            # Muon orthogonalises a matrix that the tensor-parallel ranks share; every
            # stage has such a part, or none.
            collection = getattr(part.optimizer, "pg_collection", None)
            if collection is not None:
                part.optimizer.pg_collection = copy.copy(collection)
                part.optimizer.pg_collection.tp = self._twin(megatron.tp, "matrices")
                self._connect(part.optimizer.pg_collection.tp)

    def _twin(
        self, group: dist.ProcessGroup | None, name: str, backend: str | None = None
    ) -> Any:
        """A step group of the same ranks; of this rank, if it is in no such group."""
        ranks = [dist.get_rank()]
        if group is not None:
            ranks = dist.get_process_group_ranks(group)
        return StepGroup(new_group(ranks, name, backend, self._timeout))

    def _add_statistics(self, group: dist.ProcessGroup) -> None:
        ranks = frozenset(dist.get_process_group_ranks(group))
        if ranks not in self._statistics:
            self._statistics[ranks] = self._twin(group, "statistics", "gloo")

    def _connect(self, group: Any) -> None:
        """NCCL creates a communicator at first use: here, where every rank is, and not
        concurrently with training."""
        dist.all_reduce(torch.zeros(1, device=self._device), group=group)

    def twin_of(self, group: dist.ProcessGroup | None) -> Any:
        """The twin of one of Megatron's groups for statistics."""
        if group is None:
            return None
        return self._statistics[frozenset(dist.get_process_group_ranks(group))]

    def align_embedding_ranks(self) -> None:
        """Barrier (gloo) before the tied embeddings' all-reduce: an NCCL kernel that
        waits would occupy the GPU."""
        nccl = dist.get_backend(self.embedding) == "nccl"
        if nccl and self._embedding_barrier.size() > 1:
            dist.barrier(group=self._embedding_barrier)

    def gather_over_pipeline(self, values: Sequence[float]) -> list[list[float]]:
        """The `values` of all stages of the pipeline, first stage to last."""
        return gather(values, self.megatron.pp)

    def any_rank(self, *flags: bool) -> list[bool]:
        """For each flag, whether it is set on any rank of the world."""
        values = torch.tensor(flags, dtype=torch.int, device="cpu")
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.world)
        return values.bool().tolist()
