"""Maps Megatron's CUDA calls to the CPU, so that its unmodified training loop runs on a
host without a GPU.

Invariant: nothing of torch changes on a host with CUDA unless the CPU was asked for
(`--device cpu`), and `uninstall` puts every name back. What of Megatron itself must be
rebound for the CPU stands in `patches.py`.
"""

import atexit
import contextlib
import gc
import importlib.util
import os
import resource
import sys
import types
from collections.abc import Callable
from typing import Any

import psutil
import torch
import torch.utils.data
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron_2bw.mcore.rebinding import around, constant, unchanged

CPU = torch.device("cpu")


def wanted(device: str) -> bool:
    """Whether the run computes on the CPU: `device` is the value of --device (auto, cpu
    or cuda)."""
    if device == "auto":
        return not torch.cuda.is_available()
    return device == "cpu"


class _CudaMeansCpu(TorchFunctionMode):
    """Sends every tensor that is asked for on "cuda" to the CPU, and calls CPU tensors
    by their CUDA type names."""

    def __torch_function__(self, func, types_, args=(), kwargs=None):
        kwargs = kwargs or {}
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        result = func(*args, **kwargs)
        if func is Tensor.type and len(args) == 1 and not kwargs:
            # Megatron picks code paths by comparing with "torch.cuda.FloatTensor" and
            # its kin.
            plain = result.replace("torch.cuda.", "torch.")
            return plain.replace("torch.", "torch.cuda.", 1)
        return result


class _DetachedOnHost(_CudaMeansCpu):
    def __torch_function__(self, func, types_, args=(), kwargs=None):
        result = super().__torch_function__(func, types_, args, kwargs)
        return result.to(CPU) if func is Tensor.detach else result


def _is_cuda(device: Any) -> bool:
    if isinstance(device, (str, torch.device)):
        return str(device).startswith("cuda")
    return type(device) is int  # The type of a bool is another one.


class _Stream(torch.cpu.Stream):
    """A stream that has always caught up: CPU work is done when the call returns."""

    def __init__(self, *args, **kwargs):
        self.cuda_stream = id(self)

    def synchronize(self): ...

    def record_event(self, event=None):
        return event or _Event()


class _Event(torch.cpu.Event):
    def __init__(self, *args, **kwargs): ...

    def elapsed_time(self, end) -> float:
        return 0.0


def _resident(device=None) -> int:
    return psutil.Process().memory_info().rss


def _peak_resident(device=None) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _memory_stats(device=None) -> dict[str, int]:
    stats = {"allocation.all.current": 0}
    for kind in ("reserved", "allocated"):
        stats[f"{kind}_bytes.all.current"] = _resident()
        stats[f"{kind}_bytes.all.peak"] = _peak_resident()
    return stats


def _properties(device=None) -> types.SimpleNamespace:
    # Major 8: Megatron enables further features only from 9 and 10 on.
    return types.SimpleNamespace(
        name="cpu",
        major=8,
        minor=0,
        total_memory=psutil.virtual_memory().total,
        multi_processor_count=os.cpu_count(),
    )


def _get_rng_state(device="cuda") -> Tensor:
    return torch.get_rng_state()


def set_rng_state(new_state: Tensor, device="cuda", graph_safe=False) -> None:
    torch.set_rng_state(new_state)


# The part of torch.cuda that Megatron 0.19 calls during training: constants, ...
_CONSTANTS = {
    "set_device": None,
    "set_stream": None,
    "synchronize": None,
    "empty_cache": None,
    # --device cpu on a GPU host: libraries that look for a GPU must not find one
    "is_available": False,
    "is_initialized": True,
    "current_device": 0,
    "device_count": 1,
    "get_device_name": "cpu",
    "get_device_capability": (8, 0),
    "stream": contextlib.nullcontext(),
    "current_stream": _Stream(),
    "is_current_stream_capturing": False,
}
# ... and functions, one for each name, as torch._dynamo wants it. Memory figures are
# those of the process.
_FUNCTIONS = {
    "memory_allocated": _resident,
    "memory_reserved": _resident,
    "device_memory_used": _resident,
    "max_memory_allocated": _peak_resident,
    "max_memory_reserved": _peak_resident,
    "memory_stats": _memory_stats,
    "get_device_properties": _properties,
    "Stream": _Stream,
    "Event": _Event,
    "manual_seed": torch.manual_seed,
    "get_rng_state": _get_rng_state,
    "set_rng_state": set_rng_state,
}


@around
def _own_generator(init: Callable, self, *args, **kwargs) -> None:
    """For DataLoader.__init__: seeds of its workers must not come from the generator
    that dropout draws from here.

    Only the first tensor-parallel rank makes loaders; the others' dropout would no
    longer be the same.
    """
    generator = torch.Generator().manual_seed(torch.initial_seed())
    kwargs.setdefault("generator", generator)
    init(self, *args, **kwargs)


@around
def _in_the_mode(run_backward: Callable, *args, **kwargs) -> Any:
    """For the engine of torch.autograd.backward: a mode is off in what it calls, here
    in all functions of a backward.

    A backward inside another one comes this way, such as that of a full recompute.
    """
    with _CudaMeansCpu():
        return run_backward(*args, **kwargs)


_installed = None  # what `uninstall` undoes


def install() -> None:
    """Map CUDA to the CPU in this process. A second call does nothing."""
    global _installed
    if _installed is not None:
        return
    _installed = contextlib.ExitStack()
    for name, value in _CONSTANTS.items():
        _replace(torch.cuda, name, constant(value))
    for name, function in _FUNCTIONS.items():
        _replace(torch.cuda, name, function)
    _replace(torch.cuda.random, "get_rng_state", _get_rng_state)
    # torch.manual_seed would seed the host's GPUs
    _replace(torch.cuda.random, "device_count", constant(0))
    loader = torch.utils.data.DataLoader
    _replace(loader, "__init__", _own_generator(loader.__init__))
    _replace(torch.nn.Module, "cuda", unchanged)
    run_backward = torch.autograd._engine_run_backward
    _replace(torch.autograd, "_engine_run_backward", _in_the_mode(run_backward))
    # Compiling small fusions with a C++ compiler costs minutes and gains nothing here;
    # its import costs seconds.
    _replace(torch, "compile", _uncompiled)
    # Without AVX-512 oneDNN's products in 16 bits take ten times as long as torch's
    # own.
    fast = torch.backends.cpu.get_cpu_capability() not in ("AVX2", "DEFAULT")
    _replace(torch.backends.mkldnn, "enabled", fast)
    # Below compute capability 10 Megatron wants this of tensor-parallel GPU runs; no
    # kernel queue exists here.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    without_triton()
    _installed.enter_context(_CudaMeansCpu())
    # else Python looks for garbage among all objects at its end, for more than a second
    atexit.register(gc.freeze)


def _replace(owner: Any, name: str, value: Any) -> None:
    _installed.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _uncompiled(model: Callable | None = None, **options) -> Callable:
    """Stands in for torch.compile, as a function and as a decorator."""
    return _uncompiled if model is None else model


def judge_as_gpu() -> None:
    """For a process that only checks flags: Megatron asks for the GPU's architecture,
    and finds none on this host."""
    without_triton()
    if not torch.cuda.is_available():
        torch.cuda.get_device_properties = _properties
        torch.cuda.get_device_capability = constant((8, 0))


def without_triton() -> None:
    """Before an import of Megatron: torch's builds for CPUs have no Triton, which
    kernels that no CPU runs need."""
    if importlib.util.find_spec("triton") is None:
        kernels = types.ModuleType("megatron.core.transformer.moe.ops.paged_stash")
        kernels.GLOBAL_BLOCK_SIZE = 0
        kernels.paged_stash_copy_kernel = kernels.paged_stash_pop_kernel = None
        sys.modules.setdefault(kernels.__name__, kernels)


def uninstall() -> None:
    """Restore torch."""
    global _installed
    if _installed is not None:
        _installed.close()
        _installed = None


def installed() -> bool:
    return _installed is not None


def answering() -> contextlib.AbstractContextManager:
    """For a new thread of a process that maps CUDA to the CPU: torch keeps function
    modes per thread."""
    return _CudaMeansCpu() if installed() else contextlib.nullcontext()


def host_only(detach: bool = False) -> contextlib.AbstractContextManager:
    """Inside, in this thread, what is asked for on "cuda" is made on the host, in a
    process that computes on a GPU too.

    detach: Tensor.detach copies to the host too.
    """
    if installed():
        return contextlib.nullcontext()
    return _DetachedOnHost() if detach else _CudaMeansCpu()
