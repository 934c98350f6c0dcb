"""Runs of the entry scripts on this machine: the command and the environment that start them, flags for plain torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]  # of the clone, with the entry scripts; of a wheel too

# What runs on any host: without Transformer Engine and Apex.
PLAIN_TORCH = """
    --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion
    --no-rope-fusion
""".split()


def torchrun(ranks: int, task: str = "gpt") -> list[str]:
    """The command line up to the entry script's flags; other runs on the machine do not disturb it."""
    script = str(ROOT / f"pretrain_{task}_2bw.py")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    return [sys.executable, *launcher, "--nproc-per-node", str(ranks), script]


def environment(**more: str) -> dict[str, str]:
    """A core for each rank, and no list of missing libraries from each; what the user has set stays."""
    return {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | os.environ | more


def start(command: Sequence[str], stdout: Any = subprocess.PIPE, **options: Any) -> subprocess.Popen[str]:
    """Start a command in a session of its own, without input; its errors also go to `stdout`, as text."""
    options = {"env": environment(), "text": True, "errors": "replace", "start_new_session": True} | options
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.STDOUT, **options)


def log_interval(iterations: int) -> int:
    """At most 10, and a divisor: Megatron logs no line after the last whole interval."""
    return max(interval for interval in range(1, 11) if iterations % interval == 0)
