"""What kernels would compute, computed by the host: each operation of torch on the
stand-in runs twice.

First as CUDA's, whose launches, allocations and waits are real calls and whose kernels
compute nothing; then as the CPU's on the same memory. So the device's tensors have the
CPU's bits, in every thread and stream.
"""

from __future__ import annotations

import contextlib
import ctypes

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

# They only look at memory or move it, and move it here too.
SAME = {
    "as_strided",
    "view",
    "_local_scalar_dense",
    "empty",
    "empty_strided",
    "set_",
    "resize_",
    "record_stream",
}
SAME |= {
    "is_pinned",
    "_pin_memory",
    "unfold",
    "view_as_real",
    "view_as_complex",
    "_reshape_alias",
    "is_set_to",
}
# Computed by the host alone: the sizes of their results depend on the values; torch
# takes no boxed call of the last.
BY_VALUE = {
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "repeat_interleave",
}
BY_VALUE |= {"pow.Scalar"}


def _softmax(x: Tensor, dim: int, to_float: bool) -> Tensor:
    return torch.ops.aten._softmax(x.float() if to_float else x, dim, False)


def _softmax_backward(
    gradient: Tensor, output: Tensor, dim: int, dtype: torch.dtype
) -> Tensor:
    return torch.ops.aten._softmax_backward_data(
        gradient, output, dim, gradient.dtype
    ).to(dtype)


def _layer_norm_backward(
    gradient: Tensor, x: Tensor, shape, mean: Tensor, deviation: Tensor, *more
):
    # the CPU's forward has them so
    mean, deviation = mean.to(x.dtype), deviation.to(x.dtype)
    return torch.ops.aten.native_layer_norm_backward(
        gradient, x, shape, mean, deviation, *more
    )


# CUDA's alone take 16-bit floats and 32-bit ones together.
MIXED = {
    "_softmax": _softmax,
    "_softmax_backward_data": _softmax_backward,
    "native_layer_norm_backward": _layer_norm_backward,
    # the CPU has none
    "_fused_rms_norm_backward": torch._decomp.decompositions._fused_rms_norm_backward,
}

_host = ctypes.CDLL(None)
kept: list[torch.library.Library] = []  # without them kernels compute nothing again


def install() -> None:
    """For all operations of this process, and those that are forked from it."""
    library = torch.library.Library("aten", "IMPL")
    kept.append(library)
    _host.device_host.argtypes, _host.device_host.restype = (
        [ctypes.c_void_p],
        ctypes.c_void_p,
    )
    names = torch._C._dispatch_get_all_op_names()
    for name in (name for name in names if name.startswith("aten::")):
        short, _, overload = name.removeprefix("aten::").partition(".")
        own = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
        if short in SAME or not (own or short == "copy_"):
            continue
        operation = getattr(getattr(torch.ops.aten, short), overload or "default")
        if any(
            each.alias_info and not each.alias_info.is_write
            for each in operation._schema.returns
        ):
            continue  # a view
        library.impl(
            name.removeprefix("aten::"),
            _twice(operation, short, overload),
            "CUDA",
            with_keyset=True,
            allow_override=own,
        )


def _twice(operation, short: str, overload: str):
    real = torch.library.get_kernel(operation, "CUDA")
    writes = any(
        each.alias_info and each.alias_info.is_write
        for each in operation._schema.arguments
    )

    tensors = [
        place
        for place, each in enumerate(operation._schema.arguments)
        if str(each.type) == "Tensor"
    ]
    packet = getattr(torch.ops.aten, short)
    compute = operation if overload else MIXED.get(short, operation)

    def kernel(keys, *args, **kwargs):
        if short in BY_VALUE or f"{short}.{overload}" in BY_VALUE:
            return tree_map(
                _to_device,
                operation(*tree_map(on_host, args), **tree_map(on_host, kwargs)),
            )
        numbers = [
            place
            for place in tensors
            if place < len(args) and isinstance(args[place], int | float)
        ]
        typed = [
            _tensor(each, args) if place in numbers else each
            for place, each in enumerate(args)
        ]
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        state = generator.initial_seed(), generator.get_offset()
        result = real.call_boxed(keys, *typed, **kwargs)
        drawn = generator.get_offset() != state[1]
        with _drawing_from(state) if drawn else contextlib.nullcontext():
            found = (packet if numbers else compute)(
                *tree_map(on_host, args), **tree_map(on_host, kwargs)
            )
        if not writes:
            for device, host in zip(
                tree_leaves(result), tree_leaves(found), strict=True
            ):
                if isinstance(device, Tensor) and device.numel():
                    on_host(device).copy_(host)
        return result

    return kernel


@contextlib.contextmanager
def _drawing_from(state: tuple[int, int]):
    """The host draws what depends on the state of the device's generator alone."""
    host = torch.default_generator
    before = host.get_state()
    host.manual_seed(hash(state) % 2**63)
    try:
        yield
    finally:
        host.set_state(before)


def on_host(value):
    """A tensor of the CPU on the memory of a tensor of the device; other values as they
    are."""
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if not isinstance(value, Tensor) or not value.is_cuda:
        return value
    storage = value.untyped_storage()
    if not storage.nbytes():
        return torch.empty(value.shape, dtype=value.dtype).as_strided(
            value.shape, value.stride()
        )
    memory = (ctypes.c_char * storage.nbytes()).from_address(
        _host.device_host(storage.data_ptr())
    )
    flat = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty((), dtype=value.dtype).set_(
        flat, value.storage_offset(), value.shape, value.stride()
    )


def _tensor(number: float, args) -> Tensor:
    """A number as a tensor, of the type that it would have beside the tensors of
    `args`."""
    found = torch.result_type(
        next(each for each in args if isinstance(each, Tensor)), number
    )
    return torch.tensor(number, dtype=found)


def _to_device(value):
    return value.cuda() if isinstance(value, Tensor) else value
