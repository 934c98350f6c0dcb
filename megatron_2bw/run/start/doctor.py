"""megatron-2bw doctor: what is installed on this host, and what it means for a run."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterator, Sequence

import psutil

from megatron_2bw import __version__
from megatron_2bw.base.errors import Parser
from megatron_2bw.run.flags.rule import installed

OLDEST_TORCH = "2.8"  # pyproject.toml says why
OK, NOTE, WRONG = "ok", "note", "WRONG"
LACKING = {  # package: what its absence means
    "transformer_engine": (
        "on GPUs give --transformer-impl local and the flags beside it in "
        "docs/quick_start.md"
    ),
    "apex": "on GPUs give --no-gradient-accumulation-fusion",
    "tensorboard": "no --tensorboard-dir",
}


def main(argv: Sequence[str], prog: str) -> int:
    """Print a table; the status is 1 if something keeps every run from starting."""
    Parser(
        prog=prog, description="What is installed, and what it means for a run."
    ).parse_args(argv)
    found_rows = list(rows())
    for verdict, name, found, meaning in found_rows:
        print(f"{verdict:<6}{name:<20}{found:<24}{meaning}".rstrip())
    return int(any(row[0] == WRONG for row in found_rows))


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Verdict, name, what was found, and what it means."""
    import torch
    from torch.torch_version import TorchVersion

    yield OK, "megatron_2bw", __version__, f"Python {platform.python_version()}"
    old = TorchVersion(torch.__version__) < OLDEST_TORCH
    yield (
        WRONG if old else OK,
        "torch",
        torch.__version__,
        f"install {OLDEST_TORCH} or newer" if old else "",
    )
    megatron = importlib.metadata.version("megatron-core")
    other = not megatron.startswith("0.19.")
    yield (
        WRONG if other else OK,
        "megatron-core",
        megatron,
        "install 0.19" if other else "",
    )
    for name, meaning in LACKING.items():
        yield (OK, name, "yes", "") if installed(name) else (NOTE, name, "-", meaning)
    yield OK, "processor cores", str(len(os.sched_getaffinity(0))), ""
    yield (
        OK,
        "memory available",
        f"{psutil.virtual_memory().available / 2**30:.0f} GiB",
        "",
    )
    shared = shutil.disk_usage("/dev/shm").total / 2**30
    few = (
        "too little for the workers of data loaders: docker run --shm-size 8g"
        if shared < 1
        else ""
    )
    yield NOTE if few else OK, "/dev/shm", f"{shared:.1f} GiB", few
    for number in range(torch.cuda.device_count()):
        device, nccl = (
            torch.cuda.get_device_properties(number),
            ".".join(map(str, torch.cuda.nccl.version())),
        )
        more = (
            f"compute capability {device.major}.{device.minor}, CUDA "
            f"{torch.version.cuda}, NCCL {nccl}"
        )
        yield (
            OK,
            f"GPU {number}",
            device.name,
            f"{device.total_memory / 2**30:.0f} GiB, {more}",
        )
    if not torch.cuda.device_count():
        yield (
            NOTE,
            "GPUs",
            "-",
            f"runs compute on the CPU over gloo (torch's CUDA: {torch.version.cuda or 'none'})",
        )
