"""Maps Megatron's CUDA calls to the CPU, so that its unmodified training loop runs on a
host without a GPU.

Invariant: nothing of torch changes on a host with CUDA unless the CPU was asked for
(`--device cpu`), and `uninstall` puts every name back. What of Megatron itself must be
rebound for the CPU stands in `patches.py`.
"""

from __future__ import annotations

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
from torch.overrides import TorchFunctionMode

from megatron_2bw.mcore.rebinding import around

CPU = torch.device("cpu")


def wanted(device: str) -> bool:
    """Whether the run computes on the CPU: `device` is the value of --device (auto, cpu
    or cuda)."""
    return device == "cpu" or (device == "auto" and not torch.cuda.is_available())


class _CudaMeansCpu(TorchFunctionMode):
    """Sends every tensor that is asked for on "cuda" to the CPU, and calls CPU tensors
    by their CUDA type names."""

    def __torch_function__(self, func, types_, args=(), kwargs=None):
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and _is_cuda(device):
            kwargs["device"] = CPU
        if func is torch.Tensor.cuda:
            return args[0]
        if (
            func is torch.Tensor.to
            and len(args) > 1
            and not isinstance(args[1], bool)
            and _is_cuda(args[1])
        ):
            args = (args[0], CPU, *args[2:])
        elif func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron picks code paths by comparing with "torch.cuda.FloatTensor" and
            # its kin.
            return (
                func(args[0])
                .replace("torch.cuda.", "torch.")
                .replace("torch.", "torch.cuda.", 1)
            )
        return func(*args, **kwargs)


class _DetachedOnHost(_CudaMeansCpu):
    def __torch_function__(self, func, types_, args=(), kwargs=None):
        result = super().__torch_function__(func, types_, args, kwargs)
        return result.to(CPU) if func is torch.Tensor.detach else result


def _is_cuda(device: Any) -> bool:
    return type(device) is int or (
        isinstance(device, (str, torch.device)) and str(device).startswith("cuda")
    )


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
    sizes = {"current": _resident(), "peak": _peak_resident()}
    stats = {
        f"{kind}_bytes.all.{when}": size
        for kind in ("reserved", "allocated")
        for when, size in sizes.items()
    }
    return stats | {"allocation.all.current": 0}


def _properties(device=None) -> types.SimpleNamespace:
    # Major 8: Megatron enables further features only from 9 and 10 on.
    return types.SimpleNamespace(
        name="cpu",
        major=8,
        minor=0,
        total_memory=psutil.virtual_memory().total,
        multi_processor_count=os.cpu_count(),
    )


_STREAM = _Stream()

# The part of torch.cuda that Megatron 0.19 calls during training. Memory figures are
# those of the process.
_NOTHING = (
    "set_device set_stream synchronize empty_cache reset_peak_memory_stats".split()
)
_TORCH_CUDA: dict[str, Any] = {
    # torch._dynamo wants a function for each
    **{name: lambda device=None: None for name in _NOTHING},
    **dict.fromkeys(
        ("memory_allocated", "memory_reserved", "device_memory_used"), _resident
    ),
    **dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), _peak_resident),
    "current_stream": lambda device=None: _STREAM,
    "default_stream": lambda device=None: _STREAM,
    # --device cpu on a GPU host: libraries that look for a GPU must not find one
    "is_available": lambda: False,
    "current_device": lambda: 0,
    "device_count": lambda: 1,
    "is_initialized": lambda: True,
    "Stream": _Stream,
    "Event": _Event,
    "stream": lambda stream: contextlib.nullcontext(),
    "is_current_stream_capturing": lambda: False,
    "memory_stats": _memory_stats,
    "get_device_properties": _properties,
    "get_device_name": lambda device=None: "cpu",
    "get_device_capability": lambda device=None: (8, 0),
    "manual_seed": torch.manual_seed,
    "get_rng_state": lambda device="cuda": torch.get_rng_state(),
    "set_rng_state": lambda new_state, device="cuda": torch.set_rng_state(new_state),
}


@around
def _own_generator(init: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """For DataLoader.__init__: seeds of its workers must not come from the generator
    that dropout draws from here.

    Only the first tensor-parallel rank makes loaders; the others' dropout would no
    longer be the same.
    """
    kwargs.setdefault("generator", torch.Generator().manual_seed(torch.initial_seed()))
    init(self, *args, **kwargs)


@around
def _in_the_mode(run_backward: Callable, *args: Any, **kwargs: Any) -> Any:
    """For the engine of torch.autograd.backward: a mode is off in what it calls, here
    in all functions of a backward.

    A backward inside another one comes this way, such as that of a full recompute.
    """
    with _CudaMeansCpu():
        return run_backward(*args, **kwargs)


_installed: contextlib.ExitStack | None = None


def install() -> None:
    """Map CUDA to the CPU in this process. A second call does nothing."""
    global _installed
    if _installed is not None:
        return
    undo = contextlib.ExitStack()
    for name, answer in _TORCH_CUDA.items():
        _replace(undo, torch.cuda, name, answer)
    _replace(undo, torch.cuda.random, "get_rng_state", torch.cuda.get_rng_state)
    # torch.manual_seed would seed the host's GPUs
    _replace(undo, torch.cuda.random, "device_count", lambda: 0)
    _replace(
        undo,
        torch.utils.data.DataLoader,
        "__init__",
        _own_generator(torch.utils.data.DataLoader.__init__),
    )
    _replace(undo, torch.nn.Module, "cuda", lambda self, device=None: self)
    _replace(
        undo,
        torch.autograd,
        "_engine_run_backward",
        _in_the_mode(torch.autograd._engine_run_backward),
    )
    # Compiling small fusions with a C++ compiler costs minutes and gains nothing here;
    # its import costs seconds.
    _replace(undo, torch, "compile", _uncompiled)
    # Without AVX-512 oneDNN's products in 16 bits take ten times as long as torch's
    # own.
    _replace(
        undo,
        torch.backends.mkldnn,
        "enabled",
        torch.backends.cpu.get_cpu_capability() not in ("AVX2", "DEFAULT"),
    )
    # Below compute capability 10 Megatron wants this of tensor-parallel GPU runs; no
    # kernel queue exists here.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    without_triton()
    undo.enter_context(_CudaMeansCpu())
    # else Python looks for garbage among all objects at its end, for more than a second
    atexit.register(gc.freeze)
    _installed = undo


def judge_as_gpu() -> None:
    """For a process that only checks flags: Megatron asks for the GPU's architecture,
    and finds none on this host."""
    without_triton()
    if not torch.cuda.is_available():
        torch.cuda.get_device_properties, torch.cuda.get_device_capability = (
            _properties,
            lambda device=None: (8, 0),
        )


def without_triton() -> None:
    """Before an import of Megatron: torch's builds for CPUs have no Triton, which
    kernels that no CPU runs need."""
    if importlib.util.find_spec("triton") is None:
        kernels = types.ModuleType("megatron.core.transformer.moe.ops.paged_stash")
        vars(kernels).update(
            GLOBAL_BLOCK_SIZE=0,
            paged_stash_copy_kernel=None,
            paged_stash_pop_kernel=None,
        )
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
    return (
        contextlib.nullcontext()
        if installed()
        else (_DetachedOnHost if detach else _CudaMeansCpu)()
    )


def _uncompiled(model: Callable | None = None, **options) -> Callable:
    """Stands in for torch.compile, as a function and as a decorator."""
    return model if model is not None else lambda function: function


def _replace(undo: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)
