"""torch's norms in the place of Transformer Engine's and Apex's, on a host without
them."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from megatron_2bw.mcore.rebinding import around


@around
def torch_norm(
    make: Callable, cls: type, config: Any, hidden_size: int, *args, **kwargs
) -> torch.nn.Module:
    """WrappedTorchNorm.__new__: torch's norms with sequence parallelism, for which
    Megatron sums the gradients of marked parameters, and with weights around 0
    (--apply-layernorm-1p)."""
    plain = copy.copy(config)
    plain.sequence_parallel = False
    plain.layernorm_zero_centered_gamma = False
    plain.memory_efficient_layer_norm = False
    norm = make(cls, plain, hidden_size, *args, **kwargs)
    for param in norm.parameters():
        param.sequence_parallel = config.sequence_parallel
    if config.layernorm_zero_centered_gamma:
        torch.nn.init.zeros_(norm.weight)
        norm.forward = partial(_norm_around_0, norm)
    return norm


def _norm_around_0(norm: Any, x: torch.Tensor) -> torch.Tensor:
    shape = norm.normalized_shape
    weight = 1 + norm.weight
    if isinstance(norm, torch.nn.LayerNorm):
        return functional.layer_norm(x, shape, weight, norm.bias, norm.eps)
    return functional.rms_norm(x, shape, weight, norm.eps)
