"""Times the links of a job: between two neighbouring ranks, and between two servers.

Invariant: all ranks return the same links. A link that the job does not have is None.
"""

from __future__ import annotations

import os
import statistics
import time
from datetime import timedelta
from typing import Any

from megatron_2bw.planner.describe.cluster import Link
from megatron_2bw.planner.describe.profile import MEASURED

WARM_UP = {"cpu": 2, "cuda": 10}  # discarded rounds; a GPU's clocks take a while to rise
MESSAGES = (1 << 20, 8 << 20, 64 << 20)  # bytes, for the bandwidth


def links_of_job(device: str) -> tuple[Link | None, Link | None]:
    """The links between the ranks of torchrun's job; (None, None) for a single rank."""
    rank, world = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if world < 2:
        return None, None
    import torch.distributed as dist

    from megatron_2bw.start import restart_store

    limit = timedelta(minutes=5)
    store = restart_store.store(limit)
    where = {} if store is None else {"store": store, "rank": rank, "world_size": world}
    dist.init_process_group("gloo" if device == "cpu" else "nccl", timeout=limit, **where)
    links = measure_links(int(os.environ.get("GROUP_RANK", "0")), device)
    if rank == 0:
        for name, link in zip(("inside a server", "between servers"), links):
            found = f"{link.gb_s:.2f} GB/s, {link.latency_us:.0f} us {MEASURED}" if link else "the job has none"
            print(f"link {name}: {found}", flush=True)
    dist.destroy_process_group()
    return links


def measure_links(server: int, device: str, messages: tuple[int, ...] = MESSAGES) -> tuple[Link | None, Link | None]:
    """The links (inside, between), the same on all ranks. All ranks of the default process group must call it.

    inside   the rate of one device: two neighbouring ranks of one server, while the others idle
    between  the rate of one server: the sum over all ranks of a server, concurrently with those of another server
    server: the number of this rank's server (torchrun's GROUP_RANK).
    """
    import torch.distributed as dist

    servers: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(servers, server)
    ranks = {each: [rank for rank, its in enumerate(servers) if its == each] for each in sorted(set(servers))}
    neighbours = max(ranks.values(), key=len)[:2]
    inside = _link([tuple(neighbours)], device, messages) if len(neighbours) == 2 else None
    between = None
    if len(ranks) > 1:
        here, there, *_ = ranks.values()
        between = _link(list(zip(here, there)), device, messages)
    return inside, between


def _link(pairs: list[tuple[int, ...]], device: str, messages: tuple[int, ...]) -> Link:
    """The sum of the pairs' rates. Every rank must call it; ranks of no pair wait."""
    import torch.distributed as dist

    rank, mine = dist.get_rank(), None
    dist.barrier()
    for low, high in pairs:
        if rank in (low, high):
            peer = low + high - rank
            latency = _one_way(peer, rank == low, 8, 50, device)
            spent = [_one_way(peer, rank == low, size, 5, device) for size in messages]
            # A short message may by chance take no longer than the latency: count at least half of its time.
            rates = [size / max(each - latency, each / 2) for size, each in zip(messages, spent)]
            mine = (latency, statistics.median(rates)) if rank == low else None
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    latencies, rates = zip(*(each for each in found if each is not None))
    return Link(sum(rates) * 1e-9, statistics.median(latencies) * 1e6, measured=True)


def _one_way(peer: int, leads: bool, size: int, rounds: int, device: str) -> float:
    """Median seconds of one message of `size` bytes: half of a round trip."""
    import torch
    import torch.distributed as dist

    message, spent = torch.zeros(size, dtype=torch.uint8, device=device), []
    for _ in range(WARM_UP[device] + rounds):
        begun = time.perf_counter()
        for act in (dist.send, dist.recv) if leads else (dist.recv, dist.send):
            act(message, peer)
        if device == "cuda":
            torch.cuda.synchronize()
        spent.append((time.perf_counter() - begun) / 2)
    return statistics.median(spent[WARM_UP[device] :])
