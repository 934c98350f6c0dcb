"""torch's norms in the place of Transformer Engine's and Apex's, on a host without
them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional


def torch_norm(original: Callable) -> Callable:
    """For WrappedTorchNorm.__new__: torch's norms with sequence parallelism, for which
    Megatron sums the gradients of marked parameters, and with weights around 0
    (--apply-layernorm-1p)."""

    def new(
        cls: type, config: Any, hidden_size: int, *args: Any, **kwargs: Any
    ) -> torch.nn.Module:
        plain = copy.copy(config)
        plain.sequence_parallel = plain.layernorm_zero_centered_gamma = (
            plain.memory_efficient_layer_norm
        ) = False
        norm = original(cls, plain, hidden_size, *args, **kwargs)
        for param in norm.parameters():
            param.sequence_parallel = config.sequence_parallel
        if config.layernorm_zero_centered_gamma:
            torch.nn.init.zeros_(norm.weight)
            layer = isinstance(norm, torch.nn.LayerNorm)
            apply, bias = (
                (functional.layer_norm, [norm.bias])
                if layer
                else (functional.rms_norm, [])
            )
            norm.forward = lambda x: apply(
                x, norm.normalized_shape, 1 + norm.weight, *bias, norm.eps
            )
        return norm

    return functools.wraps(original)(new)
