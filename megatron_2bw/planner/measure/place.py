"""Where plans can run, and the command that starts their ranks: this machine, or a Slurm allocation of servers.

Invariant: what cannot run here is refused before anything is started, by one line that names the flag.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from megatron_2bw.planner.describe.cluster import Cluster
from megatron_2bw.planner.describe.plan import Plan

CROWD = 4  # ranks a core: more would measure the system's scheduler


class ValidateError(ValueError):
    """Nothing can be run, said in one line."""


@dataclass(frozen=True)
class Place:
    """Where the plans run.

    device   cpu or cuda
    servers  of a Slurm allocation, else 1
    ranks    that each server takes at most
    host     the first server, if there are several
    """

    device: str
    servers: int
    ranks: int
    host: str = ""


def find_place(device: str, cluster: Cluster) -> Place:
    """The present machine, or the Slurm allocation of several servers that this process is in."""
    import torch

    servers = int(os.environ.get("SLURM_NNODES", "1")) if "SLURM_JOB_ID" in os.environ else 1
    # Where an allocation is asked for by hand, this process may be on a host that is not part of it.
    gpus = int(os.environ.get("SLURM_GPUS_ON_NODE", "0")) if servers > 1 else 0
    if device == "auto":
        device = "cpu" if cluster.device.name == "cpu" else "cuda"
    ranks = CROWD * (os.cpu_count() or 1) if device == "cpu" else gpus or torch.cuda.device_count()
    return Place(device, servers, ranks, _first_host() if servers > 1 else "")


def _first_host() -> str:
    names = ["scontrol", "show", "hostnames", os.environ.get("SLURM_JOB_NODELIST", "")]
    try:
        return subprocess.run(names, capture_output=True, text=True, check=True, timeout=60).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        raise ValidateError("SLURM_JOB_NODELIST: `scontrol show hostnames` does not name the servers") from None


def split(plan: Plan, per_server: int, place: Place) -> tuple[int, int]:
    """(servers, ranks on each). On one machine all ranks are on it, whatever the cluster."""
    if place.servers == 1 or plan.gpus <= per_server:
        return 1, plan.gpus
    return -(-plan.gpus // per_server), per_server


def refusal(plan: Plan, per_server: int, place: Place) -> str | None:
    """One line that names the flag if the plan cannot run here, or None."""
    if place.device == "cpu" and plan.sequence_parallel:
        return (
            "--sequence-parallel does not work on the CPU, where tensor parallelism works without it only: "
            "plan with --no-sequence-parallel"
        )
    servers, ranks = split(plan, per_server, place)
    if servers <= place.servers and ranks <= place.ranks and servers * ranks == plan.gpus:
        return None
    sizes = (
        f"--tensor-model-parallel-size {plan.tensor} x --pipeline-model-parallel-size {plan.depth} x "
        f"{plan.width} pipelines"
    )
    if place.device == "cpu":
        return (
            f"{sizes} are {plan.gpus} processes, more than {place.servers * place.ranks} ({CROWD} a core): plan "
            "for a smaller --cluster"
        )
    there = f"{place.ranks}" if place.servers == 1 else f"{place.servers} servers with {place.ranks}"
    return f"{sizes} need {plan.gpus} GPUs, but there are {there}: plan for a --cluster like that, or give --device cpu"


def command(words: list[str], plan: Plan, per_server: int, place: Place, script: Path, number: int) -> list[str]:
    """torchrun with the script, started by srun on each server where there are several."""
    servers, ranks = split(plan, per_server, place)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    if servers == 1 and place.servers == 1:
        return [*torchrun, "--standalone", "--local-addr", "127.0.0.1", str(script), *words]
    job = int(os.environ["SLURM_JOB_ID"])
    hosts = [] if servers > 1 else ["--nodelist", place.host]
    return [
        "srun",
        "--nodes",
        str(servers),
        "--ntasks",
        str(servers),
        "--ntasks-per-node",
        "1",
        *hosts,
        "--kill-on-bad-exit=1",
        *torchrun,
        "--nnodes",
        str(servers),
        "--rdzv-backend",
        "c10d",
        "--rdzv-id",
        f"{job}-{number}",
        # Of its own for each plan, for the one before may still hold its; below those that Linux gives out.
        "--rdzv-endpoint",
        f"{place.host}:{20000 + (job + number) % 10000}",
        str(script),
        *words,
    ]


def environment(plan: Plan, device: str) -> dict[str, str]:
    """That of the ranks."""
    variables = dict(os.environ)
    variables.setdefault("PYTHONWARNINGS", "ignore")  # each rank would list what is not installed
    if device == "cpu":
        variables["OMP_NUM_THREADS"] = "1"
    elif plan.tensor > 1:
        variables.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron asks for it before Blackwell
    return variables
