"""The gradient slots of a stage: one batch accumulates while the one before is reduced,
clipped and applied.

Invariants: slot 0 is Megatron's own gradient buffer, the others have its layout; a
batch's backwards accumulate into its slot only, and the training thread does not touch
that slot between `gradients_of` and its next `begin_batch`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


class Slot:
    """Gradient buffers with their buckets, and where each parameter's gradient lies in
    them.

    dense: how many of both come before those of experts that are split over ranks
    """

    def __init__(
        self, buffers: list[Any], bucket_groups: list[Any], dense: tuple[int, int]
    ):
        self.buffers, self.bucket_groups, self._dense = buffers, bucket_groups, dense
        self.group_of = {
            param: group for group in bucket_groups for param in group.params
        }
        self.main_grads: dict[torch.nn.Parameter, torch.Tensor] = {}
        for buffer in buffers:
            for param, (start, end, _) in buffer.param_index_map.items():
                self.main_grads[param] = buffer.grad_data[start:end].view(param.shape)

    def twin(
        self, new: Callable[[torch.Tensor], torch.Tensor] = torch.zeros_like
    ) -> Slot:
        """A second slot with the same layout, whose buffers `new` makes. Bytes: those
        of the gradients."""
        buckets: dict[int, Any] = {}
        buffers = []
        for buffer in self.buffers:
            other = copy.copy(buffer)
            other.grad_data = new(buffer.grad_data)
            other.buckets = []
            for bucket in buffer.buckets:
                buckets[id(bucket)] = part = copy.copy(bucket)
                part.grad_data = other.grad_data[
                    bucket.offset : bucket.offset + bucket.grad_data.numel()
                ]
                other.buckets.append(part)
            buffers.append(other)
        groups = []
        for group in self.bucket_groups:
            other = copy.copy(group)
            other.buckets = [buckets[id(bucket)] for bucket in group.buckets]
            other.param_to_bucket = {
                param: buckets[id(bucket)]
                for param, bucket in group.param_to_bucket.items()
            }
            (
                other.golden_per_param_grad_ready_counts,
                other.per_param_grad_ready_counts,
            ) = {}, {}
            other.cached_grad_buffer_shard_list = [None] * len(other.buckets)
            groups.append(other)
        for group, other in zip(self.bucket_groups, groups):
            previous = group.previous_grad_reduce_bucket_group
            if previous is not None:
                other.previous_grad_reduce_bucket_group = groups[
                    self.bucket_groups.index(previous)
                ]
        return Slot(buffers, groups, self._dense)

    def install(self, ddp: Any) -> None:
        """Let Megatron's wrapper reduce and zero this slot."""
        buffers, groups = self._dense
        ddp.buffers, ddp.expert_parallel_buffers = (
            self.buffers[:buffers],
            self.buffers[buffers:],
        )
        ddp.bucket_groups, ddp.expert_parallel_bucket_groups = (
            self.bucket_groups[:groups],
            self.bucket_groups[groups:],
        )
        ddp.param_to_bucket_group = self.group_of

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Wait for the reduction over the data-parallel group, or run it, as Megatron's
        wrapper of this name does."""
        for group in self.bucket_groups:
            group.finish_grad_sync(force_all_reduce=force_all_reduce)

    def scale_gradients(self, scaling_factor: torch.Tensor) -> None:
        for buffer in self.buffers:
            buffer.scale_gradients(scaling_factor)


class GradientSlots:
    """`count` slots for the gradients of `ddp`, Megatron's DistributedDataParallel.

    groups the process groups to reduce over; nothing else may use them in the training
    thread (`use_groups`)
    first  the first batch, whose slot is Megatron's own buffer
    shared the slots are one memory: each batch has buckets of its own there, and finds
           it zeroed (`complete_gradients`)
    """

    def __init__(
        self,
        ddp: Any,
        count: int,
        groups: tuple[dist.ProcessGroup, ...],
        first: int = 0,
        shared: bool = False,
    ):
        bucket_groups = use_groups(ddp, groups, lambda bucket_group: bucket_group)
        self._ddp, self._first = ddp, first
        self._slots = [
            Slot(
                all_buffers(ddp),
                bucket_groups,
                (len(ddp.buffers), len(ddp.bucket_groups)),
            )
        ]
        new = (lambda data: data) if shared else torch.zeros_like
        self._slots += [self._slots[0].twin(new) for _ in range(1, count)]
        self._bound = self._slots[0]
        self._zero, self._zeroed, self._shared = ddp.zero_grad_buffer, False, shared
        # Megatron's training step zeroes the buffer before an iteration; with one slot
        # that is too early.
        ddp.zero_grad_buffer = lambda: None

    def gradients_of(self, batch: int) -> Slot:
        """The slot of a batch."""
        return self._slots[(batch - self._first) % len(self._slots)]

    def bind(self, batch: int) -> None:
        """Point the parameters' main_grad to the slot of `batch`, before a forward or a
        backward of it.

        The forward too: kernels that accumulate the weight's gradient themselves note
        its main_grad there.
        """
        slot = self.gradients_of(batch)
        if slot is not self._bound:
            for param, gradient in slot.main_grads.items():
                param.main_grad = gradient
            self._bound = slot

    def begin_batch(self, batch: int) -> None:
        """Before the first backward of `batch`: Megatron's wrapper reduces its slot,
        which starts from zero."""
        slot = self.gradients_of(batch)
        slot.install(self._ddp)
        if not self._zeroed:
            self._zero()
            self._zeroed = self._shared
            return
        for param in self._ddp.params_with_grad:
            param.grad_added_to_main_grad = False
        for bucket_group in slot.bucket_groups:
            bucket_group.reset()

    def stash(
        self, params: Sequence[torch.nn.Parameter], values: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Copies of tensors as large as the parameters, in the memory of a slot; until
        the next `begin_batch`.

        Only when every batch that has begun is stepped. A gradient has at least as many
        bytes as its parameter.
        """
        grads, self._zeroed = self._slots[0].main_grads, False
        places = [
            grads[param].view(-1).view(value.dtype)[: value.numel()]
            for param, value in zip(params, values)
        ]
        return [
            place.view(value.shape).copy_(value) for place, value in zip(places, values)
        ]


def all_buffers(ddp: Any) -> list[Any]:
    """The buffers of Megatron's wrapper: those of dense parameters, then those of
    experts that are split over ranks."""
    return [*ddp.buffers, *ddp.expert_parallel_buffers]


def use_groups(
    ddp: Any,
    groups: tuple[dist.ProcessGroup, ...],
    of: Callable[[Any], Any] = copy.copy,
) -> list[Any]:
    """All bucket groups of Megatron's wrapper, made by `of`, which communicate over
    `groups`.

    groups: for dense parameters, and for experts that are split over ranks; each has
    the same ranks as Megatron's.
    """
    found = []
    for bucket_groups, group in zip(
        (ddp.bucket_groups, ddp.expert_parallel_bucket_groups), groups
    ):
        for bucket_group in map(of, bucket_groups):
            found.append(bucket_group)
            for name in (
                "data_parallel_group",
                "intra_distributed_optimizer_instance_group",
            ):
                if hasattr(bucket_group, name):
                    setattr(bucket_group, name, group)
    return found
