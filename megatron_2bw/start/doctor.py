"""megatron-2bw doctor: what is installed on this host, and what it means for a run.

Packages are found without importing them, but for torch, which alone knows its GPUs.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterator, Sequence

import psutil

from megatron_2bw import __version__
from megatron_2bw.errors import Parser
from megatron_2bw.flags.checks import OLDEST_TORCH
from megatron_2bw.flags.rule import installed

OK, NOTE, WRONG = "ok", "note", "WRONG"


def main(argv: Sequence[str], prog: str) -> int:
    """Print a table; the status is 1 if something keeps every run from starting."""
    Parser(prog=prog, description="What is installed, and what it means for a run.").parse_args(argv)
    rows = [*_software(), *_machine()]
    for verdict, name, found, meaning in rows:
        print(f"{verdict:<6}{name:<20}{found:<24}{meaning}".rstrip())
    return int(any(row[0] == WRONG for row in rows))


Row = tuple[str, str, str, str]


def version(package: str) -> str | None:
    """Of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _software() -> Iterator[Row]:
    yield OK, "megatron_2bw", __version__, ""
    yield OK, "Python", platform.python_version(), ""
    found, oldest = version("torch"), tuple(map(int, OLDEST_TORCH.split(".")))
    fits = found is not None and tuple(map(int, found.split(".")[:2])) >= oldest
    yield (OK if fits else WRONG), "torch", found or "-", "" if fits else f"install {OLDEST_TORCH} or newer"
    found = version("megatron-core")
    fits = found is not None and found.startswith("0.19.")
    yield (OK if fits else WRONG), "megatron-core", found or "-", "" if fits else "install megatron-core>=0.19,<0.20"
    te = "on GPUs give --transformer-impl local and the flags beside it in docs/quick_start.md"
    yield _optional("Transformer Engine", "transformer_engine", te)
    yield _optional("Apex", "apex", "on GPUs give --no-gradient-accumulation-fusion")
    yield _optional("wandb", "wandb", "no --wandb-project")
    yield _optional("tensorboard", "tensorboard", "no --tensorboard-dir")


def _optional(name: str, package: str, without: str) -> Row:
    return (OK, name, version(package) or "yes", "") if installed(package) else (NOTE, name, "-", without)


def _machine() -> Iterator[Row]:
    memory = psutil.virtual_memory()
    yield OK, "processor cores", str(len(os.sched_getaffinity(0))), ""
    yield OK, "memory", f"{memory.total / 2**30:.0f} GiB", f"{memory.available / 2**30:.0f} GiB available"
    shared = shutil.disk_usage("/dev/shm").total / 2**30 if os.path.isdir("/dev/shm") else 0
    few = "too little for the workers of data loaders: docker run --shm-size 8g" if shared < 1 else ""
    yield (NOTE if few else OK), "/dev/shm", f"{shared:.1f} GiB", few
    if not installed("torch"):
        return
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for number in range(count):
        device = torch.cuda.get_device_properties(number)
        free = f"{device.total_memory / 2**30:.0f} GiB, compute capability {device.major}.{device.minor}"
        yield OK, f"GPU {number}", device.name, free
    if not count:
        built = torch.version.cuda or "none"
        yield NOTE, "GPUs", "-", f"runs compute on the CPU over gloo (torch's CUDA: {built})"
