"""The gradient slots of a stage: one batch accumulates while the one before is reduced, clipped and applied.

Invariants: slot 0 is Megatron's own gradient buffer, the others have its layout; a batch's backwards accumulate into
its slot only, and the training thread does not touch that slot between `gradients_of` and its next `begin_batch`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


class Slot:
    """Gradient buffers with their buckets, and where each parameter's gradient lies in them."""

    def __init__(self, buffers: list[Any], bucket_groups: list[Any]):
        self.buffers, self.bucket_groups = buffers, bucket_groups
        self.group_of = {param: group for group in bucket_groups for param in group.params}
        self.main_grads: dict[torch.nn.Parameter, torch.Tensor] = {}
        for buffer in buffers:
            for param, (start, end, _) in buffer.param_index_map.items():
                self.main_grads[param] = buffer.grad_data[start:end].view(param.shape)

    def twin(self, new: Callable[[torch.Tensor], torch.Tensor] = torch.zeros_like) -> Slot:
        """A second slot with the same layout, whose buffers `new` makes. Bytes: those of the gradients."""
        buckets: dict[int, Any] = {}
        buffers = []
        for buffer in self.buffers:
            other = copy.copy(buffer)
            other.grad_data = new(buffer.grad_data)
            other.buckets = []
            for bucket in buffer.buckets:
                buckets[id(bucket)] = part = copy.copy(bucket)
                part.grad_data = other.grad_data[bucket.offset : bucket.offset + bucket.grad_data.numel()]
                other.buckets.append(part)
            buffers.append(other)
        groups = []
        for group in self.bucket_groups:
            other = copy.copy(group)
            other.buckets = [buckets[id(bucket)] for bucket in group.buckets]
            other.param_to_bucket = {param: buckets[id(bucket)] for param, bucket in group.param_to_bucket.items()}
            other.golden_per_param_grad_ready_counts, other.per_param_grad_ready_counts = {}, {}
            other.cached_grad_buffer_shard_list = [None] * len(other.buckets)
            groups.append(other)
        for group, other in zip(self.bucket_groups, groups):
            previous = group.previous_grad_reduce_bucket_group
            if previous is not None:
                other.previous_grad_reduce_bucket_group = groups[self.bucket_groups.index(previous)]
        return Slot(buffers, groups)

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Wait for the reduction over the data-parallel group, or run it, as Megatron's wrapper of this name does."""
        for group in self.bucket_groups:
            group.finish_grad_sync(force_all_reduce=force_all_reduce)

    def scale_gradients(self, scaling_factor: torch.Tensor) -> None:
        for buffer in self.buffers:
            buffer.scale_gradients(scaling_factor)


class GradientSlots:
    """`count` slots for the gradients of `ddp`, Megatron's DistributedDataParallel.

    group  the process group to reduce over; nothing else may use it in the training thread
    first  the first batch, whose slot is Megatron's own buffer
    shared the slots are one memory: each batch has buckets of its own there, and finds it zeroed (`complete_gradients`)
    """

    def __init__(self, ddp: Any, count: int, group: dist.ProcessGroup, first: int = 0, shared: bool = False):
        for bucket_group in ddp.bucket_groups:
            use_group(bucket_group, group)
        self._ddp, self._first = ddp, first
        self._slots = [Slot(ddp.buffers, ddp.bucket_groups)]
        new = (lambda data: data) if shared else torch.zeros_like
        self._slots += [self._slots[0].twin(new) for _ in range(1, count)]
        self._bound = self._slots[0]
        self._zero, self._zeroed, self._shared = ddp.zero_grad_buffer, False, shared
        # Megatron's training step zeroes the buffer before an iteration; with one slot that is too early.
        ddp.zero_grad_buffer = lambda: None

    def gradients_of(self, batch: int) -> Slot:
        """The slot of a batch."""
        return self._slots[(batch - self._first) % len(self._slots)]

    def bind(self, batch: int) -> None:
        """Point the parameters' main_grad to the slot of `batch`, before a forward or a backward of it.

        The forward too: kernels that accumulate the weight's gradient themselves note its main_grad there.
        """
        slot = self.gradients_of(batch)
        if slot is not self._bound:
            for param, gradient in slot.main_grads.items():
                param.main_grad = gradient
            self._bound = slot

    def begin_batch(self, batch: int) -> None:
        """Before the first backward of `batch`: Megatron's wrapper reduces its slot, which starts from zero."""
        slot = self.gradients_of(batch)
        self._ddp.buffers, self._ddp.bucket_groups = slot.buffers, slot.bucket_groups
        self._ddp.param_to_bucket_group = slot.group_of
        if not self._zeroed:
            self._zero()
            self._zeroed = self._shared
            return
        for param in self._ddp.params_with_grad:
            param.grad_added_to_main_grad = False
        for bucket_group in slot.bucket_groups:
            bucket_group.reset()

    def stash(self, params: Sequence[torch.nn.Parameter], values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of tensors as large as the parameters, in the memory of a slot; until the next `begin_batch`.

        Only when every batch that has begun is stepped. A gradient has at least as many bytes as its parameter.
        """
        grads, self._zeroed = self._slots[0].main_grads, False
        places = [grads[param].view(-1).view(value.dtype)[: value.numel()] for param, value in zip(params, values)]
        return [place.view(value.shape).copy_(value) for place, value in zip(places, values)]


def use_group(bucket_group: Any, group: dist.ProcessGroup) -> None:
    """Let a bucket group of Megatron communicate over `group`, which has the same ranks as its own."""
    for name in ("data_parallel_group", "intra_distributed_optimizer_instance_group"):
        if hasattr(bucket_group, name):
            setattr(bucket_group, name, group)
