"""The place where plans run (this machine or a Slurm allocation), and the command that starts their ranks.

Invariant: a plan that cannot run here is refused before any start, in one line that names the flag.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from megatron_2bw.errors import UserError
from megatron_2bw.models.cluster import Cluster
from megatron_2bw.models.plan import Plan

MAX_RANKS_PER_CORE = 4  # more would measure the system's scheduler


@dataclass(frozen=True)
class Place:
    """Where the plans run.

    device   cpu or cuda
    servers  of a Slurm allocation, else 1
    ranks    at most, per server
    host     the first of several servers
    """

    device: str
    servers: int
    ranks: int
    host: str = ""


def find_place(device: str, cluster: Cluster) -> Place:
    """This machine, or the Slurm allocation of several servers in which this process runs."""
    import torch

    servers = int(os.environ.get("SLURM_NNODES", "1")) if "SLURM_JOB_ID" in os.environ else 1
    # After salloc this process may run on a host outside the allocation, so its own GPUs do not count.
    gpus = int(os.environ.get("SLURM_GPUS_ON_NODE", "0")) if servers > 1 else 0
    if device == "auto":
        device = "cpu" if cluster.device.name == "cpu" else "cuda"
    ranks = MAX_RANKS_PER_CORE * (os.cpu_count() or 1) if device == "cpu" else gpus or torch.cuda.device_count()
    return Place(device, servers, ranks, _first_host() if servers > 1 else "")


def _first_host() -> str:
    names = ["scontrol", "show", "hostnames", os.environ.get("SLURM_JOB_NODELIST", "")]
    try:
        return subprocess.run(names, capture_output=True, text=True, check=True, timeout=60).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        raise UserError("SLURM_JOB_NODELIST: `scontrol show hostnames` does not name the servers") from None


def split(plan: Plan, per_server: int, place: Place) -> tuple[int, int]:
    """(servers, ranks per server). A single machine runs all ranks, for any cluster."""
    if place.servers == 1 or plan.gpus <= per_server:
        return 1, plan.gpus
    return -(-plan.gpus // per_server), per_server


def refusal(plan: Plan, per_server: int, place: Place) -> str | None:
    """None if the plan can run here, else one line that names the flag."""
    if place.device == "cpu" and plan.sequence_parallel:
        return (
            "--sequence-parallel does not work on the CPU, where tensor parallelism works only without it: "
            "plan with --no-sequence-parallel"
        )
    servers, ranks = split(plan, per_server, place)
    if servers <= place.servers and ranks <= place.ranks and servers * ranks == plan.gpus:
        return None
    sizes = f"--tensor-model-parallel-size {plan.tensor} x --pipeline-model-parallel-size {plan.depth} x {plan.width}"
    if place.device == "cpu":
        limit = f"{place.servers * place.ranks} ({MAX_RANKS_PER_CORE} a core)"
        return f"{sizes} pipelines are {plan.gpus} processes, more than {limit}: plan for a smaller --cluster"
    there = f"{place.ranks}" if place.servers == 1 else f"{place.servers} servers with {place.ranks}"
    remedy = "plan for a --cluster like that, or give --device cpu"
    return f"{sizes} pipelines need {plan.gpus} GPUs, but there are {there}: {remedy}"


def command(words: list[str], plan: Plan, per_server: int, place: Place, script: Path, number: int) -> list[str]:
    """torchrun with the script; on several servers srun starts it on each."""
    servers, ranks = split(plan, per_server, place)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    if servers == 1 and place.servers == 1:
        return [*torchrun, "--standalone", "--local-addr", "127.0.0.1", str(script), *words]
    job = int(os.environ["SLURM_JOB_ID"])
    host = "" if servers > 1 else f" --nodelist {place.host}"
    # Each plan has a port of its own: the plan before it may still hold its port. Linux gives out no ports this low.
    endpoint = f"{place.host}:{20000 + (job + number) % 10000}"
    return [
        *f"srun --nodes {servers} --ntasks {servers} --ntasks-per-node 1{host} --kill-on-bad-exit=1".split(),
        *torchrun,
        *f"--nnodes {servers} --rdzv-backend c10d --rdzv-id {job}-{number} --rdzv-endpoint {endpoint}".split(),
        str(script),
        *words,
    ]


def environment(plan: Plan, device: str) -> dict[str, str]:
    """The environment of the ranks."""
    variables = dict(os.environ)
    variables.setdefault("PYTHONWARNINGS", "ignore")  # each rank would list missing libraries
    if device == "cpu":
        variables["OMP_NUM_THREADS"] = "1"
    elif plan.tensor > 1:
        variables.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron requires it before Blackwell
    return variables
