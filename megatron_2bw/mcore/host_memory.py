"""The optimizer in host memory (--two-bw-optimizer host): main parameters, moments, and a complete batch's gradients.

On the device stay the weight versions and one gradient slot. The step's thread copies a batch's gradients to the host
portion by portion, in the order in which a backward writes them. Megatron's functions then see host tensors only. The
new weights are copied to the free weight store.

Invariants: a portion of the slot is the step's thread's from `hand_over` until it is copied and zeroed, and the
training thread's otherwise; with the distributed optimizer only the pages of the own shards are written.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from megatron_2bw import cpu
from megatron_2bw.core.weights import WeightStores
from megatron_2bw.guard import around
from megatron_2bw.mcore.grad_buffers import GradientSlots, Slot
from megatron_2bw.mcore.stage import Call
from megatron_2bw.portions import portions

PORTION = 1 << 24  # elements of the gradients that are copied and released together


def empty_pages(like: torch.Tensor) -> torch.Tensor:
    """A host tensor of the shape and dtype of `like`, of zeros. A page takes memory from its first use on."""
    memory = mmap.mmap(-1, max(like.nbytes, 1))  # shared with forks: a page-locked page must not be copied on write
    return torch.frombuffer(memory, dtype=like.dtype, count=like.numel()).view(like.shape)


def pin(tensors: Sequence[torch.Tensor]) -> None:
    """Page-lock tensors of `empty_pages`: their copies overlap computations. (torch's pins powers of two only.)"""
    ranges: list[list[int]] = []  # of whole pages, apart
    for tensor in sorted(tensors, key=torch.Tensor.data_ptr) if torch.cuda.is_available() else ():
        start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        if not ranges or start > ranges[-1][1]:
            ranges.append([start, start])
        ranges[-1][1] = max(ranges[-1][1], -(-(tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE)
    for start, end in ranges:
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(start, end - start, 0)))


@around
def make_on_host(make: Callable, *args: Any, **kwargs: Any) -> Any:
    """Megatron's function that makes one optimizer: main parameters, and what a checkpoint loads, in host memory."""
    with cpu.host_only(detach=True):
        optimizer = make(*args, **kwargs)
    load = optimizer.load_state_dict

    def load_on_host(state: Any) -> None:
        saved = state.get("optimizer", state)
        for group in saved.get("param_groups", ()):  # Apex's and Transformer Engine's Adam counts in the group
            for number in group.get("params", ()) if "step" in group else ():
                saved["state"].get(number, {}).setdefault("step", torch.tensor(float(group["step"]), device="cpu"))
        with cpu.host_only():
            load(state)

    optimizer.load_state_dict = load_on_host
    return optimizer


def settle(parts: Sequence[Any]) -> None:
    """When a checkpoint is loaded: step with torch's fused kernels; keep no other copy of the model's parameters."""
    for part in parts:
        for shard in chain(*getattr(part, "shard_float16_groups", ())):
            shard.data = shard.data.new_empty(0)
        for state in part.optimizer.state.values() if part.optimizer is not None else ():
            state |= {key: value.cpu() for key, value in state.items() if isinstance(value, torch.Tensor)}
        for group in part.optimizer.param_groups if part.optimizer is not None else ():
            if "fused" in group:
                group["fused"], group["foreach"] = True, False


class Portion:
    """A part of the device's gradient slot: `whole`. Of it this rank steps `mine`, which is copied to `host`."""

    def __init__(self, whole: torch.Tensor, mine: torch.Tensor, host: torch.Tensor):
        self._whole, self._mine, self._host = whole, mine, host
        self._released = threading.Event()
        self._copied: torch.cuda.Event | None = None
        self._released.set()

    def hand_over(self) -> None:
        """In the training thread, after the last write of a batch."""
        self._released.clear()

    def take(self) -> None:
        """In the step's thread: copy it to the host, zero it, and release it."""
        self._host.copy_(self._mine, non_blocking=True)
        self._whole.zero_()
        self._copied = torch.cuda.current_stream().record_event()
        self.release()

    def release(self) -> None:
        self._released.set()

    def wait(self) -> None:
        """In the training thread, before the first write of a batch. The device waits too."""
        self._released.wait()
        if self._copied is not None:
            self._copied.wait()


class HostMemory:
    """What one stage keeps on the host, and its copies.

    gradients  of the batch that is stepped, in the layout of the device's slot
    views      the parameters' new values, in the order of the stores; none with the distributed optimizer
    flats      its parameter buffers; none without it

    call    of Megatron's schedule function, for its model
    mains   the fp32 parameters that are stepped themselves (see `working_copy.own_mains`)
    inside  whether their values after a step are the new values
    """

    def __init__(self, call: Call, stores: WeightStores, slots: GradientSlots, mains: dict, inside: bool):
        slot = slots.gradients_of(0)
        self.gradients = slot.twin(empty_pages)
        self.flats = [empty_pages(data) for data in stores.buffer_data[0]] if stores.buffer_data else []
        stepped = mains if inside else {}
        values = [] if self.flats else zip(stores.params, stores.values(stores.newest))
        self.views = [stepped[param] if param in stepped else empty_pages(value) for param, value in values]
        self._shards: dict[int, list[slice]] = defaultdict(list)  # of this rank, by buffer
        self._portions: dict[torch.nn.Parameter, list[Portion]] = {}  # by a bucket's first parameter
        self._of: dict[torch.nn.Parameter, Portion] = {}
        self._waiting: set[torch.nn.Parameter] = set()  # those without a gradient of this batch
        for index, buffer in enumerate(slot.buffers):
            for bucket in buffer.buckets:
                self._split(index, buffer, bucket, slot.group_of[bucket.params_list[0]])
        own = [buffer.grad_data[part] for i, buffer in enumerate(self.gradients.buffers) for part in self._shards[i]]
        self.gradients.scale_gradients = lambda factor: torch._foreach_mul_(own, factor)
        for tensors in (own, [flat[part] for i, flat in enumerate(self.flats) for part in self._shards[i]], self.views):
            pin(tensors)
        self._nodes = [param.expand_as(param).grad_fn.next_functions[0][0] for param in self._of]
        for node, param in zip(self._nodes, list(self._of)):
            node.register_prehook(partial(self._before_write, param))
        for module in call.model.modules() if call.config.gradient_accumulation_fusion else ():
            module.register_forward_hook(self._watch, with_kwargs=True)

    def _split(self, index: int, buffer: Any, bucket: Any, group: Any) -> None:
        """Cut a bucket into portions of whole parameters."""
        size, first = bucket.grad_data.numel(), bucket.offset
        if group.ddp_config.use_distributed_optimizer:
            size //= group.intra_distributed_optimizer_instance_size
            first += size * group.intra_distributed_optimizer_instance_rank
        self._shards[index].append(slice(first, first + size))
        places = sorted((*buffer.param_index_map[param][:2], number) for number, param in enumerate(bucket.params_list))
        found = self._portions[bucket.params_list[0]] = []
        for some in portions(places, lambda place: place[1] - place[0], PORTION):
            (start, _, _), (_, end, _) = some[0], some[-1]
            mine = slice(max(start, first), max(start, first, min(end, first + size)))
            host = self.gradients.buffers[index].grad_data[mine]
            found.append(Portion(buffer.grad_data[start:end], buffer.grad_data[mine], host))
            self._of |= {bucket.params_list[number]: found[-1] for *_, number in some}

    # The training thread calls the following.

    def begin_batch(self) -> None:
        """Before the first backward of a batch."""
        self._waiting = set(self._of)

    def hand_over(self) -> None:
        """After the last backward of a batch: the gradients are the step's."""
        for portion in chain(*self._portions.values()):
            portion.hand_over()

    def _before_write(self, param: torch.nn.Parameter, gradients: Any) -> None:
        if param in self._waiting:
            self._waiting.remove(param)
            self._of[param].wait()

    def _watch(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """A fused kernel writes a weight's gradient before autograd reaches the weight: the module's or a given one."""
        given = (value for value in kwargs.values() if isinstance(value, torch.nn.Parameter))
        result = output[0] if isinstance(output, tuple) else output
        for param in (*module.parameters(recurse=False), *given):
            if param in self._of and getattr(result, "grad_fn", None) is not None:
                result.grad_fn.register_prehook(partial(self._before_write, param))

    # The step's thread calls the following.

    def take(self, slot: Slot) -> None:
        """Reduce a batch's gradients, as Megatron's wrapper does, and copy them to the host."""
        try:
            for group in slot.bucket_groups:
                group.finish_grad_sync()
                for bucket in group.buckets:
                    for portion in self._portions[bucket.params_list[0]]:
                        portion.take()
            torch.cuda.current_stream().synchronize()
        finally:  # after an error the training thread must reach the place where it is raised
            for portion in chain(*self._portions.values()):
                portion.release()

    def give(self, views: Sequence[torch.Tensor]) -> None:
        """Copy the new values to the `views` of a weight store, without the distributed optimizer."""
        for view, mine in zip(views, self.views):
            view.copy_(mine, non_blocking=True)

    def give_shards(self, data: Sequence[torch.Tensor]) -> None:
        """Copy this rank's shards of the new values to a weight store, with the distributed optimizer."""
        for index, (there, mine) in enumerate(zip(data, self.flats)):
            for part in self._shards[index]:
                there[part].copy_(mine[part], non_blocking=True)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Inside, Megatron's functions compute on the host, whose ranks share its cores."""
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))  # of this thread
        with cpu.host_only():
            yield
