"""What bench/slow_links.py counts and computes, without servers."""

from __future__ import annotations

import sys

import pytest

from bench import servers, slow_links
from bench.slow_links import Link, Model, Observed, bubbles, compare, first_of, rows_of

MODEL = Model(layers=8, hidden=512, heads=8, sequence=128, microbatch=1, microbatches=8, vocabulary=1024)
LINKS = [Link("unlimited", 8000, 0.25, 70), Link("50", 50, 40.25, 70)]
LINE = (
    " [2026-01-01 00:00:00.1] iteration        {}/       9 | consumed samples: 8 | elapsed time per iteration (ms): 9.9"
    " | bubble: {}%/{}% | peak memory by stage (GiB): 1.09 1.09 |"
)


def test_what_each_method_has_to_send():
    assert MODEL.parameters == 13199360 + 13134848  # as Megatron counts them on the two stages
    activations = 128 * 512 * 4
    assert MODEL.message == activations
    assert MODEL.theory("data") == 4 * MODEL.parameters
    assert MODEL.theory("tensor") == 8 * (8 * 4 + 2) * activations
    assert {MODEL.theory(name) for name in slow_links.PIPELINES} == {8 * activations}


def observed(settle: int, seconds: list[list[float]], sent: list[list[int]]) -> Observed:
    """Two loading iterations, then for each rate `settle` long ones and those given; the last empties the pipeline."""
    found, now, bytes_sent = Observed([[], []], {}), 0.0, [0, 0]
    for took, count in (
        [(50.0, 9999), (50.0, 9999)]
        + [step for times, counts in zip(seconds, sent) for step in [(30.0, 7777)] * settle + list(zip(times, counts))]
        + [(40.0, 8888)]
    ):
        now += took
        bytes_sent = [bytes_sent[0] + count, bytes_sent[1] + 2 * count]
        for rank in (0, 1):
            found.ends[rank].append((now + rank, bytes_sent[rank]))
    return found


@pytest.mark.parametrize("settle", [1, 3])
def test_rows_hold_the_measured_iterations_only(settle: int):
    found = observed(settle, [[1.0, 1.2, 1.1], [2.0, 2.2, 2.4]], [[10**6] * 3, [1, 10**6, 3 * 10**6]])
    # The iterations before those measured at the second rate, those, and one behind.
    measured = first_of(1, settle, 3) + 1
    for iteration, share in zip(range(measured - 1, measured + 4), (90.0, 10.0, 20.0, 30.0, 90.0)):
        found.bubbles[iteration] = share / 100, 2 * share / 100
    first, second = rows_of("2bw", found, MODEL, LINKS, settle, 3)
    names = ("iteration_ms", "spread_ms", "slowdown", "sent_mb", "bubble")
    assert [first[name] for name in names] == [1100.0, 200.0, 1.0, 2.0, ""]
    assert [second[name] for name in names] == [2200.0, 400.0, 2.0, 2.0, "0.200 / 0.400"]


def test_rows_beside_2bw():
    links = [Link("unlimited", 8000, 0.0, 70), Link("50", 50, 40.0, 70)]
    seconds, sent = [[1.6], [2.0]], [[10**6], [10**6]]
    ours, ahead = (rows_of(name, observed(1, seconds, sent), MODEL, links, 1, 1) for name in slow_links.AHEAD)
    data = rows_of("data", observed(1, [[2.0], [9.0]], [[10**7], [5 * 10**6]]), MODEL, links, 1, 1)
    compare([*data, *ahead, *ours], MODEL, links)
    assert [row["sent_by_2bw"] for row in (*data, *ours)] == [10.0, 5.0, 1.0, 1.0]
    # Two microbatches in flight on stage 0: a message's time is added to every cycle. With three it is hidden.
    assert [row["simulated_ms"] for row in ours] == [1600.0, 1600.0 + 8 * 40]
    assert [row["simulated_ms"] for row in ahead] == [1600.0, 1600.0]
    assert [row["simulated_ms"] for row in data] == ["", ""]


def test_lines_of_the_ranks():
    plain = LINE.replace(" bubble: {}%/{}% |", "").format(2)
    assert bubbles(f"{plain}\n{LINE.format(3, 6.25, 12.5)}\n") == {3: (0.0625, 0.125)}


@pytest.mark.parametrize(
    "user, found, said",
    [
        (1000, "/usr/sbin/ip", "network namespaces need root: run this with sudo"),
        (0, None, "the command ip is not there: install iproute2"),
    ],
)
def test_without_root_or_commands_one_line_says_so(user: int, found: str | None, said: str, monkeypatch, capsys):
    monkeypatch.setattr(servers.os, "geteuid", lambda: user)
    monkeypatch.setattr(servers.shutil, "which", lambda name: found)
    monkeypatch.setattr(sys, "argv", ["slow_links.py"])
    assert slow_links.main() == 1
    assert capsys.readouterr().err == f"slow_links.py: error: {said}\n"
