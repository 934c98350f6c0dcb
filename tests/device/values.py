"""What kernels would compute, computed by the host: each operation of torch on the
stand-in runs twice.

First as CUDA's, whose launches, allocations and waits are real calls and whose kernels
compute nothing; then as the CPU's on the same memory. So the device's tensors have the
CPU's bits, in every thread and stream.
"""

import contextlib
import ctypes

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

# They only look at memory or move it, and move it here too.
SAME = set(
    """
    as_strided view _local_scalar_dense empty empty_strided set_ resize_ record_stream is_pinned _pin_memory
    unfold view_as_real view_as_complex _reshape_alias is_set_to
    """.split()
)
# Computed by the host alone: the sizes of their results depend on the values; torch
# takes no boxed call of the last.
BY_VALUE = set(
    """
    nonzero masked_select _unique2 unique_dim unique_consecutive repeat_interleave pow.Scalar
    """.split()
)


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
    _host.device_host.argtypes = [ctypes.c_void_p]
    _host.device_host.restype = ctypes.c_void_p
    for full_name in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full_name.partition("::")
        if namespace != "aten":
            continue
        short, _, overload = name.partition(".")
        own = torch._C._dispatch_has_kernel_for_dispatch_key(full_name, "CUDA")
        if short in SAME or not (own or short == "copy_"):
            continue
        operation = getattr(getattr(torch.ops.aten, short), overload or "default")
        if any(_is_alias(each, written=False) for each in operation._schema.returns):
            continue  # a view
        kernel = _twice(operation, short, overload)
        library.impl(name, kernel, "CUDA", with_keyset=True, allow_override=own)


def _is_alias(argument, written: bool) -> bool:
    return bool(argument.alias_info) and argument.alias_info.is_write == written


def _twice(operation, short: str, overload: str):
    real = torch.library.get_kernel(operation, "CUDA")
    arguments = operation._schema.arguments
    writes = any(_is_alias(each, written=True) for each in arguments)
    packet = getattr(torch.ops.aten, short)
    compute = operation if overload else MIXED.get(short, operation)
    by_value = short in BY_VALUE or f"{short}.{overload}" in BY_VALUE

    def kernel(keys, *args, **kwargs):
        def on_cpu(function):
            return function(*tree_map(on_host, args), **tree_map(on_host, kwargs))

        if by_value:
            return tree_map(_to_device, on_cpu(operation))
        typed = list(args)
        function = compute
        for place, value in enumerate(args):
            takes_tensor = str(arguments[place].type) == "Tensor"
            if takes_tensor and isinstance(value, int | float):
                typed[place] = _tensor(value, args)
                function = packet
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        state = generator.initial_seed(), generator.get_offset()
        result = real.call_boxed(keys, *typed, **kwargs)
        drawn = generator.get_offset() != state[1]
        with _drawing_from(state) if drawn else contextlib.nullcontext():
            values = on_cpu(function)
        if not writes:
            pairs = zip(tree_leaves(result), tree_leaves(values), strict=True)
            for device, host in pairs:
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
    shape = value.shape
    if not storage.nbytes():
        empty = torch.empty(shape, dtype=value.dtype)
        return empty.as_strided(shape, value.stride())
    start = _host.device_host(storage.data_ptr())
    memory = (ctypes.c_char * storage.nbytes()).from_address(start)
    flat = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    tensor = torch.empty((), dtype=value.dtype)
    return tensor.set_(flat, value.storage_offset(), shape, value.stride())


def _tensor(number: float, args) -> Tensor:
    """A number as a tensor, of the type that it would have beside the tensors of
    `args`."""
    beside = next(each for each in args if isinstance(each, Tensor))
    return torch.tensor(number, dtype=torch.result_type(beside, number))


def _to_device(value):
    return value.cuda() if isinstance(value, Tensor) else value
