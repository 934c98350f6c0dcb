"""Times the links of a job: messages between two neighbouring ranks, all-reduces in a
server, and between two servers.

Invariant: all ranks return the same links. A link that the job does not have is None.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any

from megatron_2bw.tools.planner.descriptions.cluster import Link
from megatron_2bw.tools.planner.descriptions.profile import MEASURED

# discarded rounds; a GPU's clocks take a while to rise
WARM_UP = {"cpu": 2, "cuda": 10}
MESSAGES = (1 << 20, 8 << 20, 64 << 20)  # bytes, for the bandwidth
LIMIT = timedelta(minutes=5)


@contextlib.contextmanager
def process_group(device: str) -> Iterator[int]:
    """torch's default process group of torchrun's job, or of this process alone. Yields
    the number of its ranks."""
    import torch.distributed as dist

    world = int(os.environ.get("WORLD_SIZE", "1"))
    where = {} if world > 1 else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl", timeout=LIMIT, **where
    )
    try:
        yield world
    finally:
        dist.destroy_process_group()


def links_of_job(device: str) -> tuple[Link | None, Link | None]:
    """The links between the ranks of the default process group; (None, None) for a
    single rank."""
    import torch.distributed as dist

    if dist.get_world_size() < 2:
        return None, None
    links = measure_links(int(os.environ.get("GROUP_RANK", "0")), device)
    if dist.get_rank() == 0:
        for name, link in zip(("inside a server", "between servers"), links):
            print(
                f"link {name}: {f'{link} {MEASURED}' if link else 'the job has none'}",
                flush=True,
            )
    return links


def measure_links(
    server: int, device: str, messages: tuple[int, ...] = MESSAGES
) -> tuple[Link | None, Link | None]:
    """The links (inside, between), the same on all ranks. All ranks of the default
    process group must call it.

    inside   rates of one device: of all-reduces among all, four and two ranks of one
             server, and of messages between two neighbouring ones, while the others
             idle
    between  the rate of one server: the sum over all ranks of a server, concurrently
             with those of another server server: the number of this rank's server
             (torchrun's GROUP_RANK).
    """
    ranks: dict[int, list[int]] = {}
    for rank, each in enumerate(on_all(server)):
        ranks.setdefault(each, []).append(rank)
    by_server = [ranks[each] for each in sorted(ranks)]
    largest = max(by_server, key=len)
    inside = None
    if len(largest) > 1:
        latency, message = _messages([(largest[0], largest[1])], device, messages)
        rates = dict.fromkeys((2, 4), 0.0)
        for size in rates:
            if size < len(largest):
                rates[size] = _ring(largest[:size], latency, device, messages)
        ring = _ring(largest, latency, device, messages)
        inside = Link(ring, latency, 1, True, rates[2], rates[4], message)
    between = None
    if len(by_server) > 1:
        here, there, *_ = by_server
        latency, rate = _messages(list(zip(here, there)), device, messages)
        between = Link(rate, latency, measured=True)
    return inside, between


def _messages(
    pairs: list[tuple[int, int]], device: str, messages: tuple[int, ...]
) -> tuple[float, float]:
    """(us, GB/s): the latency of a message, and the sum of the pairs' rates. All ranks
    must call it."""
    import torch.distributed as dist

    rank = dist.get_rank()
    measured = None
    dist.barrier()
    for low, high in pairs:
        if rank in (low, high):
            peer = low + high - rank
            leads = rank == low
            latency = _one_way(peer, leads, 8, 50, device)
            spent = [_one_way(peer, leads, size, 5, device) for size in messages]
            if leads:
                measured = (latency, _rate(messages, spent, latency))
    latencies, rates = zip(*on_all(measured))
    return statistics.median(latencies) * 1e6, sum(rates) * 1e-9


def _ring(
    ranks: list[int], latency_us: float, device: str, sizes: tuple[int, ...]
) -> float:
    """GB/s of each rank in all-reduces among `ranks`, while the others idle. All ranks
    must call it.

    It is what the planner divides by (cost/communication.py): each rank sends 2 (n -
    1)/n of the bytes.
    """
    import torch
    import torch.distributed as dist

    group = dist.new_group(ranks)
    rate = None
    dist.barrier()
    if dist.get_rank() in ranks:
        steps = 2 * (len(ranks) - 1)
        spent = []
        sent = []
        for size in sizes:
            values = torch.zeros(size // 4, device=device)
            reduce = partial(dist.all_reduce, values, group=group)
            spent.append(seconds(reduce, 5, device))
            sent.append(steps / len(ranks) * size)
        if dist.get_rank() == ranks[0]:
            rate = _rate(sent, spent, steps * latency_us * 1e-6)
    (rate,) = on_all(rate)
    dist.destroy_process_group(group)
    return rate * 1e-9


def on_all[T](mine: T | None) -> list[T]:
    """What the ranks measured, on all ranks."""
    import torch.distributed as dist

    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return [each for each in gathered if each is not None]


def _rate(sent: Sequence[float], spent: list[float], latency: float) -> float:
    """Bytes per second: the median over the sizes, apart from the latency in
    seconds."""
    rates = []
    for size, taken in zip(sent, spent):
        # A short message may by chance take no longer than the latency: count at least
        # half of its time.
        rates.append(size / max(taken - latency, taken / 2))
    return statistics.median(rates)


def _one_way(peer: int, leads: bool, size: int, rounds: int, device: str) -> float:
    """Median seconds of one message of `size` bytes: half of a round trip."""
    import torch
    import torch.distributed as dist

    message = torch.zeros(size, dtype=torch.uint8, device=device)

    def trip() -> None:
        for act in (dist.send, dist.recv) if leads else (dist.recv, dist.send):
            act(message, peer)

    return seconds(trip, rounds, device) / 2


def seconds(work: Callable[[], object], rounds: int, device: str) -> float:
    """Median seconds of `work`."""

    def marked(mark: Callable[[], None]) -> None:
        mark()
        work()
        mark()

    (median,) = medians(marked, rounds, device)
    return median


def medians(
    work: Callable[[Callable[[], None]], object], rounds: int, device: str
) -> list[float]:
    """Median seconds between the marks of `work`: events on the GPU, otherwise the
    clock."""
    times: list[list[float]] = []
    for _ in range(WARM_UP[device] + rounds):
        marks: list[Any] = []
        work(partial(_mark, marks, device))
        times.append(_between(marks, device))
    parts = zip(*times[WARM_UP[device] :], strict=True)
    return [statistics.median(part) for part in parts]


def _mark(marks: list[Any], device: str) -> None:
    if device == "cuda":
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        marks.append(event)
    else:
        marks.append(time.perf_counter())


def _between(marks: list[Any], device: str) -> list[float]:
    """Seconds between the marks."""
    if device != "cuda":
        return [after - before for before, after in pairwise(marks)]
    import torch

    torch.cuda.synchronize()
    return [1e-3 * before.elapsed_time(after) for before, after in pairwise(marks)]
