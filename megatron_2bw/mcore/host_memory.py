"""The optimizer in host memory (--two-bw-memory host): main parameters, moments, and
a complete batch's gradients.

On the device stay the weight versions and one gradient slot. Megatron's functions see
host tensors only. The new weights are copied to the free weight store.

Invariant: with the distributed optimizer only the pages of the own shards are written.
"""

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_2bw.engine.weights import WeightStores
from megatron_2bw.mcore import cpu
from megatron_2bw.mcore.complete_gradients import CompleteGradients
from megatron_2bw.mcore.grad_buffers import Slot
from megatron_2bw.mcore.rebinding import around
from megatron_2bw.mcore.stage import Call


def empty_pages(like: Tensor) -> Tensor:
    """A host tensor of the shape and dtype of `like`, of zeros. A page takes memory
    from its first use on."""
    # shared with forks: a page-locked page must not be copied on write
    memory = mmap.mmap(-1, max(like.nbytes, 1))
    flat = torch.frombuffer(memory, dtype=like.dtype, count=like.numel())
    return flat.view(like.shape)


def pin(tensors: Sequence[Tensor]) -> None:
    """Page-lock tensors of `empty_pages`: their copies overlap computations. (torch's
    pins powers of two only.)"""
    if not torch.cuda.is_available():
        return
    ranges = []  # of whole pages, apart
    for tensor in sorted(tensors, key=Tensor.data_ptr):
        start = tensor.data_ptr()
        end = start + tensor.nbytes
        start -= start % mmap.PAGESIZE
        end += -end % mmap.PAGESIZE
        if not ranges or start > ranges[-1][1]:
            ranges.append([start, end])
        ranges[-1][1] = max(ranges[-1][1], end)
    for start, end in ranges:
        status = torch.cuda.cudart().cudaHostRegister(start, end - start, 0)
        torch.cuda.check_error(int(status))


@around
def make_on_host(make: Callable, *args, **kwargs) -> Any:
    """Megatron's function that makes one optimizer: main parameters, and what a
    checkpoint loads, in host memory."""
    with cpu.host_only(detach=True):
        optimizer = make(*args, **kwargs)
    load = optimizer.load_state_dict

    def load_on_host(state: Any) -> None:
        _count_by_parameter(state.get("optimizer", state))
        with cpu.host_only():
            load(state)

    optimizer.load_state_dict = load_on_host
    return optimizer


def _count_by_parameter(saved: Any) -> None:
    """Apex's and Transformer Engine's Adam counts its steps in the group."""
    for group in saved.get("param_groups", ()):
        if "step" in group:
            for number in group.get("params", ()):
                step = torch.tensor(float(group["step"]), device="cpu")
                state = saved["state"].get(number, {})
                state.setdefault("step", step)


def use_host_kernels(parts: Sequence[Any]) -> None:
    """When a checkpoint is loaded: step with torch's fused kernels; keep no other copy
    of the model's parameters."""
    for part in parts:
        for shard in chain(*getattr(part, "shard_float16_groups", ())):
            shard.data = shard.data.new_empty(0)
        if part.optimizer is None:
            continue
        for state in part.optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    state[key] = value.cpu()
        for group in part.optimizer.param_groups:
            if "fused" in group:
                group["fused"] = True
                group["foreach"] = False


class HostMemory(CompleteGradients):
    """What one stage keeps on the host, and its copies.

    views   the parameters' new values, in the order of the stores; none with the
            distributed optimizer
    flats   its parameter buffers; none without it

    call    of Megatron's schedule function, for its model
    mains   the fp32 parameters that are stepped themselves (see
            `working_copy.own_mains`)
    inside  whether their values after a step are the new values
    """

    def __init__(
        self, call: Call, stores: WeightStores, slot: Slot, mains: dict, inside: bool
    ):
        super().__init__(call, slot, empty_pages)
        self.flats = []
        self.views = []
        if stores.buffer_data:
            self.flats = [empty_pages(data) for data in stores.buffer_data[0]]
        else:
            for param, value in zip(stores.params, stores.values(stores.newest)):
                stepped = inside and param in mains
                self.views.append(mains[param] if stepped else empty_pages(value))
        pin(self._own)
        pin(self.views)
        for flat, shards in zip(self.flats, self._shards):
            pin([flat[shard] for shard in shards])

    # The step's thread calls the following.

    def take(self, slot: Slot) -> None:
        super().take(slot)
        torch.cuda.current_stream().synchronize()

    def give(self, views: Sequence[Tensor]) -> None:
        """Copy the new values to the `views` of a weight store, without the distributed
        optimizer."""
        for view, mine in zip(views, self.views):
            view.copy_(mine, non_blocking=True)

    def give_shards(self, data: Sequence[Tensor]) -> None:
        """Copy this rank's shards of the new values to a weight store, with the
        distributed optimizer."""
        for there, mine, shards in zip(data, self.flats, self._shards):
            for shard in shards:
                there[shard].copy_(mine[shard], non_blocking=True)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Inside, Megatron's functions compute on the host, whose ranks share its
        cores."""
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // ranks))  # of this thread
        with cpu.host_only():
            yield
