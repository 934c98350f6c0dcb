"""Which calls wait for the whole GPU, or hold a lock that another thread's launches need. Needs CUDA.

A kernel that sleeps on one stream stands in for a posted receive of NCCL. A call that lasts as long as this kernel
waits for the whole GPU; two stages that do so at once would wait for each other's messages.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch

from megatron_2bw.gpu_check.observe import seconds_of

SPIN = 1.0  # seconds

CALLS: dict[str, Callable[[SimpleNamespace], object]] = {
    "launch": lambda t: t.small.mul_(2),
    "item": lambda t: t.small.sum().item(),
    "copy from pageable memory": lambda t: torch.ones(1 << 20).to("cuda", non_blocking=True),
    "cudaMalloc": lambda t: torch.empty(1 << 30, dtype=torch.uint8, device="cuda"),
    "empty_cache": lambda t: torch.cuda.empty_cache(),
    "pinned memory": lambda t: torch.empty(1 << 27, pin_memory=True),
    "timing event": lambda t: torch.cuda.Event(enable_timing=True).record(),
    "new stream": lambda t: torch.cuda.Stream(priority=-1),
    "first use of kernels": lambda t: (torch.erfinv(t.small), torch.sort(t.small)),
    "first cuBLAS call of a thread": lambda t: _in_thread(lambda: torch.ones(64, 64, device="cuda").mm(t.square)),
    "first attention": lambda t: torch.nn.functional.scaled_dot_product_attention(t.heads, t.heads, t.heads),
    "max_memory_allocated": lambda t: torch.cuda.max_memory_allocated(),
    "synchronize": lambda t: torch.cuda.synchronize(),
}


def call(rank: int, name: str, environment: dict[str, str]) -> tuple[float, float]:
    """Seconds of the call, and of a plain launch in another thread meanwhile, as a share of the sleeping kernel's."""
    os.environ.update(environment)
    torch.cuda.set_device(0)
    side, own = torch.cuda.Stream(), torch.cuda.Stream()
    tensors = SimpleNamespace(small=torch.ones(1024, device="cuda"), square=torch.ones(64, 64, device="cuda"))
    tensors.heads = torch.randn(1, 8, 256, 64, device="cuda", dtype=torch.half)
    other = torch.ones(1024, device="cuda")
    other.add_(1), tensors.small.mul_(2).sum().cpu()
    torch.empty(1 << 28, device="cuda")  # freed to the allocator's cache: what `empty_cache` gives back
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(side):
        begin.record(), torch.cuda._sleep(10**8), end.record()
    torch.cuda.synchronize()
    cycles = int(10**8 / begin.elapsed_time(end) * 1e3 * SPIN)
    took: list[float] = []

    def launch() -> None:
        time.sleep(SPIN / 5)
        with torch.cuda.stream(own):
            took.append(seconds_of(lambda: other.add_(1)))

    thread = threading.Thread(target=launch)
    with torch.cuda.stream(side):
        torch.cuda._sleep(cycles)
    thread.start()
    with torch.cuda.stream(own):
        seconds = seconds_of(lambda: CALLS[name](tensors))
    thread.join()
    return seconds / SPIN, took[0] / SPIN


def _in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def machine(rank: int) -> dict[str, str | float]:
    """The GPU of this rank; also whether a forked rank can use CUDA at all."""
    torch.ones(1, device="cuda")
    properties = torch.cuda.get_device_properties(0)
    driver = torch._C._cuda_getDriverVersion()
    return {
        "gpu": properties.name,
        "gib": round(properties.total_memory / 2**30, 1),
        "capability": f"{properties.major}.{properties.minor}",
        "driver's CUDA": f"{driver // 1000}.{driver % 1000 // 10}",
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
    }
