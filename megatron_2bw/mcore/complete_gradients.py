"""The gradients of a complete batch, copied out of the one gradient slot, where the
next batch adds its own.

With the distributed optimizer these are the own shards. They lie on the device
(--two-bw-gradient-slots shard) or on the host (`host_memory`). The step's thread copies
portion by portion, in the order in which a backward writes.

Invariant: a portion of the slot is the step's thread's from `end_batch` until it is
copied and zeroed, and the training thread's otherwise.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import torch

from megatron_2bw.base.portions import portions
from megatron_2bw.engine.updates import PerBatch
from megatron_2bw.mcore.grad_buffers import Slot
from megatron_2bw.mcore.stage import Call

PORTION = 1 << 24  # elements of the gradients that are copied and released together


class Portion:
    """A part of the device's gradient slot: `whole`. Of it this rank steps `mine`,
    which is copied to `copy`."""

    def __init__(self, whole: torch.Tensor, mine: torch.Tensor, copy: torch.Tensor):
        self._whole, self._mine, self._copy = whole, mine, copy
        self._released = threading.Event()
        self._copied: torch.cuda.Event | None = None
        self._released.set()

    def hand_over(self) -> None:
        """In the training thread, after the last write of a batch."""
        self._released.clear()

    def take(self) -> None:
        """In the step's thread: copy it, zero it, and release it."""
        self._copy.copy_(self._mine, non_blocking=True)
        self._whole.zero_()
        self._copied = torch.cuda.current_stream().record_event()
        self.release()

    def release(self) -> None:
        self._released.set()

    def wait(self) -> None:
        """In the training thread, before the first write of a batch. The device waits
        too."""
        self._released.wait()
        if self._copied is not None:
            self._copied.wait()


class CompleteGradients(PerBatch):
    """The gradients that a step reads, as a slot has them.

    call  of Megatron's schedule function, for its model
    slot  the one gradient slot
    new   makes the memory of a shard, from the shard in the slot

    main_grads  by parameter; with the distributed optimizer flat, and of the own shard
    """

    def __init__(
        self, call: Call, slot: Slot, new: Callable[[torch.Tensor], torch.Tensor]
    ):
        self.main_grads: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._new, self._own = new, []
        # of this rank, by buffer
        self._shards: dict[int, list[slice]] = defaultdict(list)
        # by a bucket's first parameter
        self._portions: dict[torch.nn.Parameter, list[Portion]] = {}
        self._of: dict[torch.nn.Parameter, Portion] = {}
        # those without a gradient of this batch
        self._waiting: set[torch.nn.Parameter] = set()
        for index, buffer in enumerate(slot.buffers):
            for bucket in buffer.buckets:
                self._split(index, buffer, bucket, slot.group_of[bucket.params_list[0]])
        self._nodes = [
            param.expand_as(param).grad_fn.next_functions[0][0] for param in self._of
        ]
        for node, param in zip(self._nodes, list(self._of)):
            node.register_prehook(partial(self._before_write, param))
        for module in (
            call.model.modules() if call.config.gradient_accumulation_fusion else ()
        ):
            module.register_forward_hook(self._watch, with_kwargs=True)

    def _split(self, index: int, buffer: Any, bucket: Any, group: Any) -> None:
        """Cut a bucket into portions of whole parameters."""
        size, first = bucket.grad_data.numel(), bucket.offset
        sharded = group.ddp_config.use_distributed_optimizer
        if sharded:
            size //= group.intra_distributed_optimizer_instance_size
            first += size * group.intra_distributed_optimizer_instance_rank
        self._shards[index].append(slice(first, first + size))
        self._own.append(own := self._new(buffer.grad_data[first : first + size]))

        # what is kept of it, and where
        def mine(start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
            start, end = max(start, first), max(start, first, min(end, first + size))
            return buffer.grad_data[start:end], own[start - first : end - first]

        places = sorted(
            (*buffer.param_index_map[param][:2], number)
            for number, param in enumerate(bucket.params_list)
        )
        for start, end, number in places:
            param = bucket.params_list[number]
            self.main_grads[param] = mine(start, end)[1].view(
                -1 if sharded else param.shape
            )
        found = self._portions[bucket.params_list[0]] = []
        for some in portions(places, lambda place: place[1] - place[0], PORTION):
            start, end = some[0][0], some[-1][1]
            found.append(Portion(buffer.grad_data[start:end], *mine(start, end)))
            self._of |= {bucket.params_list[number]: found[-1] for *_, number in some}

    def scale_gradients(self, scaling_factor: torch.Tensor) -> None:
        torch._foreach_mul_(self._own, scaling_factor)

    # The training thread calls the following.

    def begin_batch(self, batch: int, version: int) -> None:
        self._waiting = set(self._of)

    def end_batch(self, batch: int) -> None:
        """The gradients are the step's."""
        for portion in chain(*self._portions.values()):
            portion.hand_over()

    def _before_write(self, param: torch.nn.Parameter, gradients: Any) -> None:
        if param in self._waiting:
            self._waiting.remove(param)
            self._of[param].wait()

    def _watch(
        self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any
    ) -> None:
        """A fused kernel writes a weight's gradient before autograd reaches the weight:
        the module's or a given one."""
        given = (
            value for value in kwargs.values() if isinstance(value, torch.nn.Parameter)
        )
        result = output[0] if isinstance(output, tuple) else output
        for param in (*module.parameters(recurse=False), *given):
            if param in self._of and getattr(result, "grad_fn", None) is not None:
                result.grad_fn.register_prehook(partial(self._before_write, param))

    # The step's thread calls the following.

    def take(self, slot: Slot) -> None:
        """Reduce a batch's gradients, as Megatron's wrapper does, and copy them."""
        try:
            for group in slot.bucket_groups:
                group.finish_grad_sync()
                for bucket in group.buckets:
                    for portion in self._portions[bucket.params_list[0]]:
                        portion.take()
        # after an error the training thread must reach the place where it is raised
        finally:
            for portion in chain(*self._portions.values()):
                portion.release()
