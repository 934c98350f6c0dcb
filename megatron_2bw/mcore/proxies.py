"""What Megatron's optimizer and finalize function see in the step's thread instead of
the parameters of the stage.

The parameters' own pointers are the training thread's. Invariant: outside of the
contexts here nothing has changed.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor
from torch.nn import Parameter

from megatron_2bw.engine.weights import WeightStores
from megatron_2bw.mcore.grad_buffers import (
    Slot,
    all_bucket_groups,
    all_buffers,
    use_groups,
)
from megatron_2bw.mcore.rebinding import replaced

if TYPE_CHECKING:
    from megatron_2bw.mcore.complete_gradients import CompleteGradients
    from megatron_2bw.mcore.host_memory import HostMemory


class Proxies:
    """Lets Megatron step a weight store other than the one to which the parameters are
    bound.

    A proxy's data lies in the store that is written, its main_grad is the gradient of
    the complete batch.

    of      the proxy of each parameter
    ddp     the model chunk in Megatron's DistributedDataParallel
    parts   Megatron's optimizers of the stage
    groups  the process groups over which the distributed optimizer gathers its shards
    mains   tensors that the optimizer steps instead of the store, by parameter (see
            `working_copy.own_mains`)
    host    what Megatron steps, if that is in host memory
    """

    def __init__(
        self,
        ddp: Any,
        parts: Sequence[Any],
        stores: WeightStores,
        groups: tuple[dist.ProcessGroup, ...],
        mains: Mapping[Parameter, Tensor],
        host: HostMemory | None,
    ):
        self._parts = parts
        self._stores = stores
        self._host = host
        self.mains = mains
        for part in parts:
            detach_shards(part, host is not None)
        self._ddp = ddp
        self._buffers = all_buffers(ddp)
        bucket_groups = tuple(
            [copy.copy(group) for group in own] for own in all_bucket_groups(ddp)
        )
        use_groups(bucket_groups, groups)
        self._groups = [*chain(*bucket_groups)]
        self._target = 0
        self._flat = False
        self.of = {param: proxy_of(param) for param in stores.params}
        # where Megatron's optimizers hold a parameter: a list, and the place in it
        self._places = []
        for part in parts:
            for places in lists_of_parameters(part):
                for index, param in enumerate(places):
                    if isinstance(param, Parameter) and param in self.of:
                        self._places.append((places, index))
        self.model = ProxyModel(ddp, self.of)

    def point_to(self, views: Sequence[Tensor]) -> None:
        """Let the proxies be the parameters in a weight store, or their main parameters
        where there are some."""
        for param, view in zip(self._stores.params, views):
            self.of[param].data = self.mains.get(param, view)

    def use_gradients(self, slot: Slot | CompleteGradients) -> None:
        """Let the proxies' gradients be those of a batch."""
        self._flat = not isinstance(slot, Slot)
        for param, proxy in self.of.items():
            proxy.main_grad = slot.main_grads[param]
        self.model.scale_gradients = slot.scale_gradients

    @contextlib.contextmanager
    def in_optimizer(self, target: int) -> Iterator[None]:
        """Inside, Megatron's optimizers hold the proxies, and write to the weight store
        `target`."""
        states = [
            part.optimizer.state for part in self._parts if part.optimizer is not None
        ]
        originals = [places[index] for places, index in self._places]
        with contextlib.ExitStack() as undo:
            for part in self._parts:
                if hasattr(part, "model_param_gbuf_map"):
                    undo.enter_context(shards_of_proxies(part, self.of, self._flat))
            self._target = target
            if self._host is not None:
                self._write_shards_to(self._host.flats)
            elif self._stores.buffer_data:
                self._write_shards_to(self._stores.buffer_data[target])
            for (places, index), param in zip(self._places, originals):
                places[index] = self.of[param]
            rename_keys(states, self.of)
            try:
                yield
            finally:
                rename_keys(states, {proxy: param for param, proxy in self.of.items()})
                for (places, index), param in zip(self._places, originals):
                    places[index] = param

    def gather(self) -> None:
        """With the distributed optimizer: all-gather the shards of this rank and the
        others, into the weight store."""
        data = self._stores.buffer_data[self._target]
        if self._host is not None:
            self._host.give_shards(data)
            self._write_shards_to(data)
        for bucket_group in self._groups:
            self._ddp._start_bucket_group_param_sync(bucket_group, force_sync=True)
        if self._host is not None:
            self._write_shards_to(self._host.flats)

    def _write_shards_to(self, data: list[Tensor]) -> None:
        """Let the distributed optimizer write its shards to `data`, one flat tensor a
        buffer."""
        for buffer, flat in zip(self._buffers, data):
            for bucket in buffer.buckets:
                end = bucket.offset + bucket.param_data.numel()
                bucket.param_data = flat[bucket.offset : end]
        for bucket_group in self._groups:
            count = len(bucket_group.buckets)
            bucket_group.cached_param_buffer_shard_list = [None] * count


@contextlib.contextmanager
def thread_local_matmul_precision() -> Iterator[None]:
    """Inside, torch's precision of fp32 products belongs to this thread: other threads
    neither see nor change it.

    Muon and SOAP lower it around their products, for the whole process: those of the
    next batch would be rounded as the threads' timing has it. Muon's "medium" only asks
    its own code to compute in bf16, and still does. What torch itself would do at a
    lower precision (TF32 on a GPU) it does not do here.
    """
    owner = threading.get_ident()
    get = torch.get_float32_matmul_precision
    put = torch.set_float32_matmul_precision
    own = get()

    def get_own() -> str:
        return own if threading.get_ident() == owner else get()

    def put_own(precision: str) -> None:
        nonlocal own
        if threading.get_ident() == owner:
            own = precision
        else:
            put(precision)

    with replaced(
        torch,
        get_float32_matmul_precision=get_own,
        set_float32_matmul_precision=put_own,
    ):
        yield


class ProxyModel:
    """The attributes of a model chunk that Megatron's finalize function reads, with
    proxies for the parameters."""

    pre_process = True  # by this attribute Megatron finds the innermost model
    routers: Sequence[Any] = ()  # of the batch

    def __init__(self, ddp: Any, proxies: dict[Parameter, Tensor]):
        self.ddp_config = ddp.ddp_config
        self.config = copy.copy(get_model_config(ddp))
        self.config.timers = None
        self._inner = unwrap_model(ddp)
        self._proxies = proxies
        self.share_embeddings_and_output_weights = getattr(
            self._inner, "share_embeddings_and_output_weights", False
        )

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """The slot's own `finish_grad_sync` has run already."""

    def modules(self) -> Iterator[Any]:
        return iter(self.routers)  # Megatron looks for these alone

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, param in self._inner.named_parameters():
            yield name, self._proxies.get(param, param)

    def parameters(self) -> Iterator[Tensor]:
        return (param for _, param in self.named_parameters())

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        weight = self._inner.shared_embedding_or_output_weight()
        return self._proxies.get(weight, weight)

    @property
    def position_embeddings(self) -> SimpleNamespace:
        weight = self._inner.position_embeddings.weight
        return SimpleNamespace(weight=self._proxies.get(weight, weight))


def proxy_of(param: Parameter) -> Tensor:
    """A tensor with the parameter's attributes, which Megatron reads
    (tensor_model_parallel, shared, ...)."""
    proxy = torch.empty(0, dtype=param.dtype, device=param.device)
    proxy.__dict__.update(param.__dict__)
    proxy.requires_grad_()
    return proxy


def lists_of_parameters(part: Any) -> Iterator[list]:
    """The lists in which one of Megatron's optimizers holds model parameters."""
    for name in (
        "float16_groups",
        "fp32_from_fp32_groups",
        "model_float16_groups",
        "model_fp32_groups",
    ):
        yield from getattr(part, name, ())
    if part.optimizer is not None:
        for group in part.optimizer.param_groups:
            yield group["params"]


def rename_keys(states: list[dict], names: Mapping[Any, Tensor]) -> None:
    """Move optimizer state to other keys; an optimizer finds it by the parameter
    object."""
    for state in states:
        for key in [key for key in state if key in names]:
            state[names[key]] = state.pop(key)


@contextlib.contextmanager
def shards_of_proxies(
    part: Any, proxies: dict[Parameter, Tensor], flat: bool
) -> Iterator[None]:
    """Let a DistributedOptimizer find the shard of a proxy where that of its parameter
    is.

    flat: the gradients are shards themselves.
    """
    owners = {proxy: param for param, proxy in proxies.items()}
    original = part.model_param_gbuf_map
    range_map = part._get_model_param_range_map
    extended = dict(original)
    for proxy, param in owners.items():
        if param in original:
            extended[proxy] = original[param]

    def range_map_of_owner(param: Tensor) -> dict:
        with replaced(part, model_param_gbuf_map=original):
            ranges = range_map(owners.get(param, param))
        if flat:
            ranges = ranges | {"param": ranges["param"].normalize()}
        return ranges

    part._get_model_param_range_map = range_map_of_owner
    try:
        with replaced(part, model_param_gbuf_map=extended):
            yield
    finally:
        del part._get_model_param_range_map


def detach_shards(part: Any, host: bool) -> None:
    """Give the fp32 shards of a DistributedOptimizer memory of their own, which may be
    that of the host.

    Megatron steps those of fp32 parameters inside the parameters' buffer, which is a
    weight version here.
    """
    groups = getattr(part, "shard_fp32_groups", ())
    own = {}  # by Megatron's shard
    for shard in chain(*groups):
        device = "cpu" if host else shard.device
        copied = shard.detach().to(device, copy=True)
        own[shard] = Parameter(copied, requires_grad=False)
        own[shard].__dict__.update(shard.__dict__)
    if not own:
        return
    for places in (*groups, *(group["params"] for group in part.param_groups)):
        places[:] = [own.get(tensor, tensor) for tensor in places]
    rename_keys([part.optimizer.state], own)
