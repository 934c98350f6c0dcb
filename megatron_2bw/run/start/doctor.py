"""megatron-2bw doctor: what is installed on this host, and what it means for a run."""

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import psutil

from megatron_2bw import __version__
from megatron_2bw.base.errors import Parser
from megatron_2bw.run.flags.rule import installed

OLDEST_TORCH = "2.8"  # pyproject.toml says why
OK = "ok"
NOTE = "note"
WRONG = "WRONG"  # no run starts
LACKING = {  # package: what its absence means
    "transformer_engine": (
        "on GPUs give --transformer-impl local and the flags beside it in "
        "docs/quick_start.md"
    ),
    "apex": "on GPUs give --no-gradient-accumulation-fusion",
    "tensorboard": "no --tensorboard-dir",
}


class Finding(NamedTuple):
    verdict: str
    name: str
    value: str
    meaning: str = ""


def main(argv: Sequence[str], prog: str) -> int:
    """Print a table; the status is 1 if something keeps every run from starting."""
    meaning = "What is installed, and what it means for a run."
    Parser(prog=prog, description=meaning).parse_args(argv)
    status = 0
    for row in findings():
        line = f"{row.verdict:<6}{row.name:<20}{row.value:<24}{row.meaning}"
        print(line.rstrip())
        if row.verdict == WRONG:
            status = 1
    return status


def findings() -> Iterator[Finding]:
    import torch
    from torch.torch_version import TorchVersion

    yield Finding(
        OK, "megatron_2bw", __version__, f"Python {platform.python_version()}"
    )
    version = torch.__version__
    if TorchVersion(version) < OLDEST_TORCH:
        yield Finding(WRONG, "torch", version, f"install {OLDEST_TORCH} or newer")
    else:
        yield Finding(OK, "torch", version)
    version = importlib.metadata.version("megatron-core")
    if version.startswith("0.19."):
        yield Finding(OK, "megatron-core", version)
    else:
        yield Finding(WRONG, "megatron-core", version, "install 0.19")
    for name, meaning in LACKING.items():
        if installed(name):
            yield Finding(OK, name, "yes")
        else:
            yield Finding(NOTE, name, "-", meaning)
    yield Finding(OK, "processor cores", str(len(os.sched_getaffinity(0))))
    available = psutil.virtual_memory().available / 2**30
    yield Finding(OK, "memory available", f"{available:.0f} GiB")
    shared = shutil.disk_usage("/dev/shm").total / 2**30
    verdict = OK
    meaning = ""
    if shared < 1:
        verdict = NOTE
        meaning = "too little for the workers of data loaders: docker run --shm-size 8g"
    yield Finding(verdict, "/dev/shm", f"{shared:.1f} GiB", meaning)
    cuda = torch.version.cuda
    if not torch.cuda.device_count():
        meaning = f"runs compute on the CPU over gloo (torch's CUDA: {cuda or 'none'})"
        yield Finding(NOTE, "GPUs", "-", meaning)
    for number in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(number)
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        meaning = (
            f"{device.total_memory / 2**30:.0f} GiB, compute capability "
            f"{device.major}.{device.minor}, CUDA {cuda}, NCCL {nccl}"
        )
        yield Finding(OK, f"GPU {number}", device.name, meaning)
