"""What bench/slow_links.py counts and computes, without servers."""

from __future__ import annotations

import argparse

from bench import slow_links
from bench.slow_links import Link, compare

CHOSEN = argparse.Namespace(layers=8, hidden=512, heads=8, sequence=128, micro_batch=1, microbatches=8)


def test_what_each_method_has_to_send():
    assert slow_links.parameters(CHOSEN) == 13199360 + 13134848  # as Megatron counts them on the two stages
    activations = 128 * 512 * 4
    assert slow_links.message(CHOSEN) == activations
    assert slow_links.theory("data", CHOSEN) == 4 * slow_links.parameters(CHOSEN)
    assert slow_links.theory("tensor", CHOSEN) == 8 * (8 * 4 + 2) * activations
    assert {slow_links.theory(name, CHOSEN) for name in slow_links.PIPELINES} == {8 * activations}


def test_rows_beside_2bw():
    links = [Link("unlimited", 8000, 0.0), Link("50", 50, 40.0)]

    def rows(variant: str, *values: tuple[float, float]) -> list[dict]:
        return [
            {"variant": variant, "rate": link.rate, "iteration_ms": time, "sent_mb": sent, "simulated_ms": ""}
            for link, (time, sent) in zip(links, values)
        ]

    ours, ahead = (rows(name, (1600.0, 1.0), (2000.0, 1.0)) for name in slow_links.AHEAD)
    data = rows("data", (2000.0, 10.0), (9000.0, 5.0))
    compare([*data, *ahead, *ours], 8, links)
    assert [row["sent_by_2bw"] for row in (*data, *ours)] == [10.0, 5.0, 1.0, 1.0]
    assert [row["slowdown"] for row in data] == [1.0, 4.5]
    # Two microbatches in flight on stage 0: a message's time is added to every cycle. With three it is hidden.
    assert [row["simulated_ms"] for row in ours] == [1600.0, 1600.0 + 8 * 40]
    assert [row["simulated_ms"] for row in ahead] == [1600.0, 1600.0]
    assert [row["simulated_ms"] for row in data] == ["", ""]
