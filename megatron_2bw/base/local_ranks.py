"""Several ranks on this machine, forked from one server that has imported what they
need: for tests and benchmarks.

With MEGATRON_2BW_WORLD_DEVICE=cuda the ranks compute on the GPUs of this machine, which
they share if there are fewer.

Invariant: a world has a time limit, a port and a folder of its own, and none of its
processes outlives it.
"""

import importlib
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path

import torch

from megatron_2bw.base.processes import free_port

MEGATRON = "megatron_2bw.run.start.preload"

# A rank that calls itself another host passes NCCL's test for two ranks on one GPU: the
# test compares host and GPU (init.cc of NCCL 2.28 and 2.30). Messages then go through
# sockets.
SHARED_GPU = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
}


class WorldError(AssertionError):
    """A rank failed; the message holds the ends of the ranks' logs."""


class WorldTimeout(WorldError):
    """The world ran out of time."""


def run_world(
    size: int,
    function: Callable,
    *args,
    timeout: float = 120.0,
    preload: str = MEGATRON,
) -> list:
    """Run `function(rank, *args)` on `size` ranks (environment set as torchrun does);
    return their results.

    Results travel through torch.save to the CPU. WorldError when a rank raises, exits
    or outlasts `timeout` seconds.

    preload: the module that the server imports. One server serves a process, so the
    first call decides.
    """
    context = multiprocessing.get_context("forkserver")
    # modules of tests import pytest; it may be missing
    context.set_forkserver_preload(["pytest", preload])
    with tempfile.TemporaryDirectory(prefix="world_") as folder:
        port = free_port()
        ranks = []
        for rank in range(size):
            work = (rank, size, port, folder, preload, function, args)
            process = context.Process(target=_rank_main, args=work, daemon=True)
            ranks.append(process)
            process.start()
        try:
            _wait(ranks, time.monotonic() + timeout)
        except WorldError as error:
            logs = [_log_end(folder, rank) for rank in range(size)]
            raise type(error)("\n".join([str(error), *logs])) from None
        finally:
            for process in ranks:
                process.kill()
                process.join()
        results = []
        for rank in range(size):
            file = Path(folder, f"result{rank}.pt")
            results.append(torch.load(file, "cpu", weights_only=False))
        return results


def on_gpu(rank: int, size: int, gpus: int) -> dict[str, str]:
    """The variables of a rank that computes on one of `gpus` GPUs, and may share it."""
    variables = {
        "LOCAL_RANK": str(rank % max(gpus, 1)),
        # Else cuBLAS may add in another order on another stream.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    if size > gpus:
        variables |= SHARED_GPU
        variables["NCCL_HOSTID"] = f"rank{rank}"
    return variables


def own_output() -> str:
    """What the calling rank has printed so far."""
    return Path(os.environ["WORLD_FOLDER"], f"log{os.environ['RANK']}").read_text()


def _wait(ranks: list, deadline: float) -> None:
    """Wait for all ranks. WorldError if one fails."""
    running = {process.sentinel: process for process in ranks}
    while running:
        ended = connection.wait(
            list(running), timeout=max(0.0, deadline - time.monotonic())
        )
        if not ended:
            raise WorldTimeout("the world ran out of time")
        for sentinel in ended:
            running.pop(sentinel).join()
        for rank, process in enumerate(ranks):
            if process.exitcode:
                raise WorldError(f"rank {rank} ended with exit code {process.exitcode}")


def _rank_main(
    rank: int,
    size: int,
    port: int,
    folder: str,
    preload: str,
    function: Callable,
    args: tuple,
) -> None:
    threading.Thread(target=_end_with_program, daemon=True).start()
    log = open(Path(folder, f"log{rank}"), "w", buffering=1)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "WORLD_FOLDER": folder,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if os.environ.get("MEGATRON_2BW_WORLD_DEVICE") == "cuda":
        os.environ.update(on_gpu(rank, size, torch.cuda.device_count()))
    # where a run without a folder of its own writes its output
    tempfile.tempdir = folder
    importlib.import_module(preload)  # done already, if the rank was forked
    torch.set_num_threads(1)
    # An asynchronous save starts processes, which a daemon may not. They end with the
    # rank (processes.end_with_parent).
    multiprocessing.current_process()._config["daemon"] = False
    try:
        torch.save(function(rank, *args), Path(folder, f"result{rank}.pt"))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    # A rank that exits closes its connections, and rank 0 closes the store: exit
    # together.
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not all(
        Path(folder, f"result{other}.pt").exists() for other in range(size)
    ):
        time.sleep(0.01)
    os._exit(0)  # without the teardown of groups whose peers have exited already


def _end_with_program() -> None:
    """The server is a rank's parent for the kernel, and outlives a program that is
    killed as long as a rank runs."""
    connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _log_end(folder: str, rank: int) -> str:
    path = Path(folder, f"log{rank}")
    text = path.read_text().splitlines() if path.exists() else []
    return "\n".join([f"--- rank {rank}", *text[-60:]])
