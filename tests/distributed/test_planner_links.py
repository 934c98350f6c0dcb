"""The planner's measurement of links, between two real ranks that say that they are on one server, or on two."""

from __future__ import annotations

import torch.distributed as dist

from megatron_2bw.local_ranks import run_world
from megatron_2bw.planner.measure.links import measure_links

MESSAGES = (1 << 18, 1 << 20)


def links(rank: int) -> list[tuple]:
    dist.init_process_group("gloo")
    return [measure_links(server, "cpu", MESSAGES) for server in (0, rank)]


def test_links_of_two_ranks():
    first, second = run_world(2, links, timeout=60)
    assert first == second  # every rank knows what any has measured
    (inside, no_between), (no_inside, between) = first
    assert no_between is None and no_inside is None
    for link in (inside, between):
        assert link.measured and link.gb_s > 0 and link.latency_us > 0
