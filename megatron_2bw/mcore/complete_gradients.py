"""The gradients of a complete batch, copied out of the one gradient slot, where the
next batch adds its own.

With the distributed optimizer these are the own shards. They lie on the device
(--two-bw-memory shard) or on the host (`host_memory`). The step's thread copies
portion by portion, in the order in which a backward writes.

Invariant: a portion of the slot is the step's thread's from `end_batch` until it is
copied and zeroed, and the training thread's otherwise.
"""

import threading
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_2bw.base.portions import portions
from megatron_2bw.engine.updates import PerBatch
from megatron_2bw.mcore.grad_buffers import Slot
from megatron_2bw.mcore.stage import Call

PORTION = 1 << 24  # elements of the gradients that are copied and released together


class Portion:
    """A part of the device's gradient slot: `whole`. Of it this rank steps `mine`,
    which is copied to `copy`."""

    def __init__(self, whole: Tensor, mine: Tensor, copy: Tensor):
        self._whole = whole
        self._mine = mine
        self._copy = copy
        self._released = threading.Event()
        self._copied = None
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

    def __init__(self, call: Call, slot: Slot, new: Callable[[Tensor], Tensor]):
        self.main_grads = {}
        self._new = new
        self._own = []  # copies of this rank's shards
        self._shards = []  # their places, by buffer
        # by a bucket's first parameter
        self._portions = {}
        self._portion_of = {}
        # those without a gradient of this batch
        self._waiting = set()
        for buffer in slot.buffers:
            self._shards.append([])
            for bucket in buffer.buckets:
                self._split(buffer, bucket, slot.group_of[bucket.params_list[0]])
        self._nodes = []
        for param in self._portion_of:
            node = param.expand_as(param).grad_fn.next_functions[0][0]
            node.register_prehook(partial(self._before_write, param))
            self._nodes.append(node)  # It lives as long as something holds it.
        if call.config.gradient_accumulation_fusion:
            for module in call.model.modules():
                module.register_forward_hook(self._watch, with_kwargs=True)

    def _split(self, buffer: Any, bucket: Any, group: Any) -> None:
        """Cut a bucket into portions of whole parameters."""
        first = bucket.offset
        size = bucket.grad_data.numel()
        sharded = group.ddp_config.use_distributed_optimizer
        if sharded:
            size //= group.intra_distributed_optimizer_instance_size
            first += size * group.intra_distributed_optimizer_instance_rank
        shard = slice(first, first + size)
        own = self._new(buffer.grad_data[shard])
        self._shards[-1].append(shard)
        self._own.append(own)

        def stepped(start: int, end: int) -> tuple[Tensor, Tensor]:
            """What this rank steps of a part of the buffer, there and in the copy."""
            start = max(start, first)
            end = max(start, min(end, first + size))
            return buffer.grad_data[start:end], own[start - first : end - first]

        places = buffer.param_index_map
        for param in bucket.params_list:
            start, end, _ = places[param]
            _, copy = stepped(start, end)
            self.main_grads[param] = copy if sharded else copy.view(param.shape)
        params = sorted(bucket.params_list, key=places.get)
        cut = self._portions[bucket.params_list[0]] = []
        for some in portions(params, Tensor.numel, PORTION):
            start = places[some[0]][0]
            end = places[some[-1]][1]
            mine, copy = stepped(start, end)
            cut.append(Portion(buffer.grad_data[start:end], mine, copy))
            self._portion_of |= dict.fromkeys(some, cut[-1])

    def scale_gradients(self, scaling_factor: Tensor) -> None:
        torch._foreach_mul_(self._own, scaling_factor)

    # The training thread calls the following.

    def begin_batch(self, batch: int, version: int) -> None:
        self._waiting = set(self._portion_of)

    def end_batch(self, batch: int) -> None:
        """The gradients are the step's."""
        for portion in chain(*self._portions.values()):
            portion.hand_over()

    def _before_write(self, param: Parameter, gradients: Any) -> None:
        if param in self._waiting:
            self._waiting.remove(param)
            self._portion_of[param].wait()

    def _watch(
        self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any
    ) -> None:
        """A fused kernel writes a weight's gradient before autograd reaches the weight:
        the module's or a given one."""
        result = output[0] if isinstance(output, tuple) else output
        node = getattr(result, "grad_fn", None)
        if node is None:
            return
        for param in (*module.parameters(recurse=False), *kwargs.values()):
            if isinstance(param, Parameter) and param in self._portion_of:
                node.register_prehook(partial(self._before_write, param))

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
