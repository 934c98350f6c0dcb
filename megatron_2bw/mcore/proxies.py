"""What Megatron's optimizer and finalize function see in the step's thread instead of the parameters of the stage.

The parameters' own pointers belong to the training thread. Invariant: outside of the context managers here Megatron's
objects are as they were.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.utils import get_model_config, unwrap_model


@contextlib.contextmanager
def own_matmul_precision() -> Iterator[None]:
    """Inside, torch's precision of fp32 products is this thread's own: what it sets, it alone reads.

    Muon and SOAP lower it around their products, for the whole process: those of the next batch would be rounded as
    the threads' timing has it. Muon's "medium" only asks its own code to compute in bf16, and still does. What torch
    itself would do at a lower precision (TF32 on a GPU) it does not do here.
    """
    owner, get, put = threading.get_ident(), torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    own = get()

    def get_own() -> str:
        return own if threading.get_ident() == owner else get()

    def put_own(precision: str) -> None:
        nonlocal own
        if threading.get_ident() == owner:
            own = precision
        else:
            put(precision)

    torch.get_float32_matmul_precision, torch.set_float32_matmul_precision = get_own, put_own
    try:
        yield
    finally:
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision = get, put


class BatchScaler:
    """A gradient scaler of Megatron that unscales by one batch's scale; `update` is the scaler's own."""

    def __init__(self, scaler: Any, scale: torch.Tensor):
        self.scale, self.update = scale, scaler.update

    @property
    def inv_scale(self) -> torch.Tensor:
        return self.scale.double().reciprocal().float()


class StandInModel:
    """What Megatron's finalize function asks of a model chunk, answered with stand-ins for the parameters."""

    pre_process = True  # by this attribute Megatron finds the innermost model

    def __init__(self, ddp: Any, stand_ins: dict[torch.nn.Parameter, torch.Tensor]):
        self.ddp_config = ddp.ddp_config
        self.config = copy.copy(get_model_config(ddp))
        self.config.timers = None
        self._inner, self._stand_ins = unwrap_model(ddp), stand_ins
        self.share_embeddings_and_output_weights = getattr(self._inner, "share_embeddings_and_output_weights", False)

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """It is over already."""

    def modules(self) -> Iterator[torch.nn.Module]:
        return self._inner.modules()

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, param in self._inner.named_parameters():
            yield name, self._stand_ins.get(param, param)

    def parameters(self) -> Iterator[torch.Tensor]:
        return (param for _, param in self.named_parameters())

    def shared_embedding_or_output_weight(self) -> torch.Tensor | None:
        weight = self._inner.shared_embedding_or_output_weight()
        return self._stand_ins.get(weight, weight)

    @property
    def position_embeddings(self) -> SimpleNamespace:
        weight = self._inner.position_embeddings.weight
        return SimpleNamespace(weight=self._stand_ins.get(weight, weight))


def stand_in_of(param: torch.nn.Parameter) -> torch.Tensor:
    """A tensor with the parameter's attributes, which Megatron reads (tensor_model_parallel, shared, ...)."""
    stand_in = torch.empty(0, dtype=param.dtype, device=param.device)
    stand_in.__dict__.update(param.__dict__)
    stand_in.requires_grad_()
    return stand_in


def lists_of_parameters(part: Any) -> Iterator[list]:
    """The lists in which one of Megatron's optimizers holds model parameters."""
    for name in ("float16_groups", "fp32_from_fp32_groups", "model_float16_groups", "model_fp32_groups"):
        yield from getattr(part, name, ())
    if part.optimizer is not None:
        for group in part.optimizer.param_groups:
            yield group["params"]


def rename_keys(states: list[dict], names: dict[torch.Tensor, torch.Tensor]) -> None:
    """Optimizer state is found by the parameter object."""
    for state in states:
        for key in [key for key in state if key in names]:
            state[names[key]] = state.pop(key)


@contextlib.contextmanager
def shards_of_stand_ins(part: Any, stand_ins: dict[torch.nn.Parameter, torch.Tensor]) -> Iterator[None]:
    """Let a DistributedOptimizer find the shard of a stand-in where that of its parameter is."""
    owners = {stand_in: param for param, stand_in in stand_ins.items()}
    original, ranges = part.model_param_gbuf_map, part._get_model_param_range_map
    part.model_param_gbuf_map = {
        **original,
        **{stand_in: original[param] for stand_in, param in owners.items() if param in original},
    }

    def of_the_owner(param: torch.Tensor) -> dict:
        part.model_param_gbuf_map, full = original, part.model_param_gbuf_map
        try:
            return ranges(owners.get(param, param))
        finally:
            part.model_param_gbuf_map = full

    part._get_model_param_range_map = of_the_owner
    try:
        yield
    finally:
        part.model_param_gbuf_map = original
        del part._get_model_param_range_map


def own_shards(part: Any) -> None:
    """Give the fp32 shards of a DistributedOptimizer memory of their own.

    Megatron steps those of fp32 parameters inside the parameters' buffer, which is a weight version here.
    """
    shards = {
        shard: torch.nn.Parameter(shard.detach().clone(), requires_grad=False)
        for group in getattr(part, "shard_fp32_groups", ())
        for shard in group
    }
    for shard, own in shards.items():
        own.__dict__.update(shard.__dict__)
    for places in (*getattr(part, "shard_fp32_groups", ()), *(g["params"] for g in part.param_groups)):
        places[:] = [shards.get(tensor, tensor) for tensor in places]
    if shards:
        rename_keys([part.optimizer.state], shards)
