"""Where the checks of `megatron-2bw gpu-check` run, and how: worlds of ranks, trainings, commands.

Invariant: nothing outlasts the deadline of the row that runs.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_2bw.gpu_check import observe
from megatron_2bw.local_ranks import WorldTimeout, run_world
from megatron_2bw.processes import stop_tree
from megatron_2bw.start.torchrun import environment, start
from megatron_2bw.words import merged

UNTIED = "--untie-embeddings-and-output-weights"
# A rank that calls itself another host passes NCCL's test for two ranks on one GPU: the test compares host and GPU
# (init.cc of NCCL 2.28 and 2.30). Traffic then goes through sockets.
SHARED_GPU = {
    "NCCL_HOSTID": "rank{rank}",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
}
REPEATABLE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # else cuBLAS may add in another order on another stream


class Failed(Exception):
    """What a row claims does not hold; the message says by how much."""


@dataclass
class Check:
    """Where the rows run. deadline: of the row that runs, on the clock of time.monotonic()."""

    device: str
    gpus: int = 0
    gib: float = 0.0
    deadline: float = 0.0
    baselines: dict[str, list[observe.Observed]] = field(default_factory=dict)
    profile: dict[str, Any] = field(default_factory=dict)  # the planner's, for this machine

    def world(self, size: int, function: Callable, *args: Any) -> list:
        return run_world(size, function, *args, timeout=self.deadline - time.monotonic())

    def train(self, argv: list[str], size: int, transport: str = "gloo", observers: Sequence = (), **variables: str):
        """`observe.train` on `size` ranks, spread over the GPUs. On the CPU always over gloo."""
        if self.device == "cpu":
            argv = merged(argv, ["--device", "cpu"])
        else:
            argv = [*argv, "--distributed-backend", transport]
            variables = REPEATABLE | (SHARED_GPU if size > self.gpus and transport == "nccl" else {}) | variables
        return self.world(size, observe.train, argv, self.gpus, variables, self.deadline, observers)


def command(check: Check, *words: str, **variables: str) -> str:
    """The output of a command, which may take as long as the row. Failed if it fails."""
    process = start(words, env=environment(**variables))
    try:
        output, _ = process.communicate(timeout=check.deadline - time.monotonic())
    except subprocess.TimeoutExpired:
        raise WorldTimeout(f"{words[0]} ran out of time") from None
    finally:
        stop_tree(process)
    if process.returncode:
        raise Failed(f"exit status {process.returncode}\n{output[-3000:]}")
    return output


SMALL_GPT = """
    --mock-data --split 98,1,1 --tokenizer-type NullTokenizer --make-vocab-size-divisible-by 32 --num-workers 0
    --micro-batch-size 1 --lr 1e-4 --lr-decay-style constant --clip-grad 1.0 --attention-dropout 0 --hidden-dropout 0
    --eval-iters 0 --eval-interval 1000 --device cpu
""".split()


def gpt_flags(layers: int, hidden: int, heads: int, sequence: int, text: str, *words: object) -> list[str]:
    """Flags of a GPT on mock data with a fixed learning rate. `text`, and `words` such as paths, replace defaults."""
    shape = f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --seq-length {sequence}"
    defaults = [*SMALL_GPT, *shape.split(), "--max-position-embeddings", str(sequence)]
    return merged(defaults, [*text.split(), *map(str, words)])
