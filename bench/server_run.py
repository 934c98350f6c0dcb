"""A training run with a rank on each of two servers (bench/slow_links.py).

Invariant: the rate of the link changes between two iterations of the first rank.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass

from bench.emulated import train
from bench.servers import ADDRESSES, INTERFACE, Servers, sent_bytes
from megatron_2bw import run_log
from megatron_2bw.local_ranks import own_output, run_world

Ends = list[tuple[float, int]]  # (seconds, bytes sent) at the end of each iteration


@dataclass
class Observed:
    """The ends of each rank's iterations, and the stages' bubbles by iteration."""

    ends: list[Ends]
    bubbles: dict[int, tuple[float, ...]]


def run(
    servers: Servers, argv: list[str], sleep: list[float], rates: Mapping[int, float | None], timeout: float
) -> Observed:
    """Train with `argv`; each microbatch's forward and backward also sleep. WorldError if a rank fails.

    rates: Mbit/s of the link, by the number of iterations before the change; None: no limit
    """
    results = run_world(2, _rank, servers, argv, sleep, rates, timeout=timeout)
    return Observed([ends for ends, _ in results], bubbles("\n".join(text for _, text in results)))


def _rank(rank: int, servers: Servers, argv: list[str], sleep: list[float], rates: Mapping) -> tuple[Ends, str]:
    """One rank on its server and its own core: the ends of its iterations, and its output."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR=ADDRESSES[0], GLOO_SOCKET_IFNAME=INTERFACE)
    from megatron.training import training

    step, sent = training.train_step, []

    @functools.wraps(step)
    def counted_step(*args, **kwargs):
        result = step(*args, **kwargs)
        sent.append(sent_bytes())
        if rank == 0 and len(sent) in rates:
            servers.limit(rates[len(sent)])
        return result

    training.train_step = counted_step
    with servers.inside(rank):
        observed = train(rank, argv, *sleep)
    return list(zip(observed.ends, sent)), own_output()


def bubbles(log: str) -> dict[int, tuple[float, ...]]:
    """The shares of the time that the stages waited, by iteration, from the ranks' output."""
    lines = [(line.iteration, line.fields["bubble"]) for line in run_log.training(log) if "bubble" in line.fields]
    return {number: tuple(float(share.rstrip("%")) / 100 for share in shares.split("/")) for number, shares in lines}
