"""The gradient slots of a stage, where one batch accumulates while the one before is
reduced, clipped and applied; and the loss scale of each batch.

Invariants:
- slot 0 is Megatron's own gradient buffer, the others have its layout;
- a batch's backwards accumulate into its slot only, and the training thread does not
  touch that slot between `end_batch` and its next `begin_batch`;
- a batch's gradients are unscaled with the scale of its losses (docs/design.md, rule 7).
"""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron_2bw.engine.updates import PerBatch
from megatron_2bw.mcore.rebinding import constant, replaced


class Slot:
    """Gradient buffers with their buckets, and where each parameter's gradient lies in
    them.

    dense: how many of both come before those of experts that are split over ranks
    """

    def __init__(
        self, buffers: list[Any], bucket_groups: list[Any], dense: tuple[int, int]
    ):
        self.buffers = buffers
        self.bucket_groups = bucket_groups
        self._dense = dense
        self.group_of = {}
        for group in bucket_groups:
            for param in group.params:
                self.group_of[param] = group
        self.main_grads = {}
        for buffer in buffers:
            for param, (start, end, _) in buffer.param_index_map.items():
                self.main_grads[param] = buffer.grad_data[start:end].view(param.shape)

    def twin(self, new: Callable[[Tensor], Tensor]) -> "Slot":
        """A second slot with the same layout, whose buffers `new` makes. Bytes: those
        of the gradients."""
        twin_of = {}  # by a bucket's id
        buffers = []
        for buffer in self.buffers:
            other = copy.copy(buffer)
            other.grad_data = new(buffer.grad_data)
            other.buckets = []
            for bucket in buffer.buckets:
                end = bucket.offset + bucket.grad_data.numel()
                other_bucket = copy.copy(bucket)
                other_bucket.grad_data = other.grad_data[bucket.offset : end]
                other.buckets.append(other_bucket)
                twin_of[id(bucket)] = other_bucket
            buffers.append(other)
        groups = []
        for group in self.bucket_groups:
            other = copy.copy(group)
            other.buckets = [twin_of[id(bucket)] for bucket in group.buckets]
            other.param_to_bucket = {}
            for param, bucket in group.param_to_bucket.items():
                other.param_to_bucket[param] = twin_of[id(bucket)]
            other.golden_per_param_grad_ready_counts = {}
            other.per_param_grad_ready_counts = {}
            other.cached_grad_buffer_shard_list = [None] * len(other.buckets)
            groups.append(other)
        for group, other in zip(self.bucket_groups, groups):
            previous = group.previous_grad_reduce_bucket_group
            if previous is not None:
                number = self.bucket_groups.index(previous)
                other.previous_grad_reduce_bucket_group = groups[number]
        return Slot(buffers, groups, self._dense)

    def install(self, ddp: Any) -> None:
        """Let Megatron's wrapper reduce and zero this slot."""
        buffers, groups = self._dense
        ddp.buffers = self.buffers[:buffers]
        ddp.expert_parallel_buffers = self.buffers[buffers:]
        ddp.bucket_groups = self.bucket_groups[:groups]
        ddp.expert_parallel_bucket_groups = self.bucket_groups[groups:]
        ddp.param_to_bucket_group = self.group_of

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Wait for the reduction over the data-parallel group, or run it, as Megatron's
        wrapper of this name does."""
        for group in self.bucket_groups:
            group.finish_grad_sync(force_all_reduce=force_all_reduce)

    def reduce(self) -> None:
        """Run the reduction from its start, without Megatron's checks, which wait for
        the GPU."""
        for group in self.bucket_groups:
            group.ddp_config = dataclasses.replace(
                group.ddp_config,
                check_for_nan_in_grad=False,
                check_for_large_grads=False,
            )
            if group.ddp_config.overlap_grad_reduce:
                group.start_grad_sync()
            group.finish_grad_sync()

    def scale_gradients(self, scaling_factor: Tensor) -> None:
        for buffer in self.buffers:
            buffer.scale_gradients(scaling_factor)


class GradientSlots(PerBatch):
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
        first: int,
        shared: bool,
    ):
        bucket_groups = all_bucket_groups(ddp)
        use_groups(bucket_groups, groups)
        self._ddp = ddp
        self._first = first
        own = Slot(
            all_buffers(ddp),
            [*chain(*bucket_groups)],
            dense=(len(ddp.buffers), len(ddp.bucket_groups)),
        )
        # a detached tensor has the memory of the other one
        new = Tensor.detach if shared else torch.zeros_like
        self._slots = [own] + [own.twin(new) for _ in range(1, count)]
        self._bound = own
        self._zero = ddp.zero_grad_buffer
        self._zeroed = False
        self._shared = shared
        # Megatron's training step zeroes the buffer before an iteration; with one slot
        # that is too early.
        ddp.zero_grad_buffer = constant(None)

    def gradients_of(self, batch: int) -> Slot:
        """The slot of a batch."""
        return self._slots[(batch - self._first) % len(self._slots)]

    def bind(self, version: int, batch: int | None) -> None:
        """Point the parameters' main_grad to the slot of `batch`, before a forward or a
        backward of it.

        The forward too: kernels that accumulate the weight's gradient themselves note
        its main_grad there.
        """
        if batch is None:
            return
        slot = self.gradients_of(batch)
        if slot is not self._bound:
            for param, gradient in slot.main_grads.items():
                param.main_grad = gradient
            self._bound = slot

    def begin_batch(self, batch: int, version: int) -> None:
        """Megatron's wrapper reduces the slot of `batch`, which starts from zero."""
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

    def end_batch(self, batch: int) -> Slot:
        return self.gradients_of(batch)

    def stash(
        self, params: Sequence[Parameter], values: Sequence[Tensor]
    ) -> list[Tensor]:
        """Copies of tensors as large as the parameters, in the memory of a slot; until
        the next `begin_batch`.

        Only when every batch that has begun is stepped. A gradient has at least as many
        bytes as its parameter.
        """
        self._zeroed = False
        copies = []
        for param, value in zip(params, values):
            memory = self._slots[0].main_grads[param].view(-1).view(value.dtype)
            copies.append(memory[: value.numel()].view(value.shape).copy_(value))
        return copies


class LossScales(PerBatch):
    """The loss scales by the weight version on which a batch runs.

    A batch is scaled as the step left it that made its weights: the newest that is
    surely complete on every stage.

    parts  Megatron's optimizers of the stage
    first  the first batch
    saved  the loss scale of the first batch, if it is not the scaler's present one
    """

    def __init__(self, parts: Sequence[Any], first: int, saved: float | None):
        self._parts = parts
        scalers = [getattr(part, "grad_scaler", None) for part in parts]
        # Each scaler's first scale is memory of the training stream. The step's thread
        # replaces it, right after it has launched the kernel that reads it: the
        # training thread must not get its memory.
        self._first = [getattr(scaler, "scale", None) for scaler in scalers]
        scale = self.now()
        shadow = scale if saved is None else torch.full_like(scale, saved)
        self._by_version = {first - 1: shadow, first: scale}
        self.current = scale  # of the batch whose backwards run
        self.scales_losses = any(scaler is not None for scaler in scalers)
        self.logged = float(scale)  # after the last completed step

    def now(self) -> Tensor:
        """A copy of the scaler's present scale."""
        part = self._parts[0]
        return type(part).get_loss_scale(part).clone()

    def begin_batch(self, batch: int, version: int) -> None:
        for older in [other for other in self._by_version if other < version]:
            del self._by_version[older]
        self.current = self._by_version[version]

    def end_batch(self, batch: int) -> Tensor:
        return self.current

    def scale_loss(self, loss: Tensor) -> Tensor:
        """A loss of the batch that `begin_batch` was last called for, times its
        scale."""
        # a host's optimizer keeps it on the host
        return self.current.to(loss.device, non_blocking=True) * loss

    def at(self, version: int) -> float:
        """The loss scale of a batch that runs on W(version), the newest or the one
        before. No step may be pending."""
        return float(self._by_version[version])

    def complete(self, batch: int, result: Any) -> None:
        """result: its `scale` is the scaler's after the step, as a tensor."""
        self._by_version[batch + 1] = result.scale
        self.logged = result.loss_scale

    @contextlib.contextmanager
    def unscaling_by(self, scale: Tensor) -> Iterator[None]:
        """Inside, Megatron's optimizers unscale by `scale`, whatever their scaler's
        present one is."""
        with contextlib.ExitStack() as undo:
            for part in self._parts:
                scaler = getattr(part, "grad_scaler", None)
                if scaler is not None:
                    own = _BatchScaler(scaler, scale)
                    undo.enter_context(replaced(part, grad_scaler=own))
            yield


class _BatchScaler:
    """A gradient scaler of Megatron that unscales by one batch's scale; `update` is the
    scaler's own."""

    def __init__(self, scaler: Any, scale: Tensor):
        self.scale = scale
        self.update = scaler.update

    @property
    def inv_scale(self) -> Tensor:
        return self.scale.double().reciprocal().float()


def all_buffers(ddp: Any) -> list[Any]:
    """The buffers of Megatron's wrapper: those of dense parameters, then those of
    experts that are split over ranks."""
    return [*ddp.buffers, *ddp.expert_parallel_buffers]


def all_bucket_groups(ddp: Any) -> tuple[list[Any], list[Any]]:
    """The bucket groups of Megatron's wrapper: those of dense parameters, and those of
    experts that are split over ranks."""
    return ddp.bucket_groups, ddp.expert_parallel_bucket_groups


def use_groups(
    bucket_groups: tuple[list[Any], list[Any]], groups: tuple[dist.ProcessGroup, ...]
) -> None:
    """Let bucket groups communicate over `groups`: of dense parameters, and of experts
    that are split over ranks. Each has the same ranks as Megatron's."""
    for own, group in zip(bucket_groups, groups):
        for bucket_group in own:
            for name in (
                "data_parallel_group",
                "intra_distributed_optimizer_instance_group",
            ):
                if hasattr(bucket_group, name):
                    setattr(bucket_group, name, group)
