"""The planner's measurements on two real ranks: of links, on one server or on two, and
of a profile."""

import argparse
import contextlib
import io

import pytest
import torch.distributed as dist

from megatron_2bw.base.local_ranks import run_world
from megatron_2bw.tools.planner.descriptions.model import Model
from megatron_2bw.tools.planner.descriptions.profile import Profile
from megatron_2bw.tools.planner.measure import blocks
from megatron_2bw.tools.planner.measure.link_rates import measure_links

pytestmark = pytest.mark.cpu

MESSAGES = (1 << 18, 1 << 20)


def links(rank: int) -> list[tuple]:
    dist.init_process_group("gloo")
    return [measure_links(server, "cpu", MESSAGES) for server in (0, rank)]


def test_links_of_two_ranks():
    first, second = run_world(2, links, timeout=60)
    assert first == second  # every rank knows what any has measured
    (inside, no_between), (no_inside, between) = first
    assert no_between is None
    assert no_inside is None
    for link in (inside, between):
        assert link.measured
        assert link.gb_s > 0
        assert link.latency_us > 0
    # all ranks of the server are a pair
    assert inside.message_gb_s > 0
    assert not inside.pair_gb_s


def profile(rank: int, path: str) -> tuple[int, str]:
    """The number of blocks that the rank measured, and what it printed."""
    measured = []
    measure_block = blocks.measure_block
    blocks.measure_block = lambda *values: (
        measured.append(measure_block(*values)) or measured[-1]
    )
    parser = argparse.ArgumentParser()
    blocks.add_flags(parser)
    options = parser.parse_args(
        ["--json", path, "--device", "cpu", "--microbatches", "1", "--repeats", "1"]
    )
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        blocks.measure_blocks(options, Model("tiny", 1, 32, 2, vocab=100, sequence=16))
    return len(measured), printed.getvalue()


def test_all_ranks_of_a_job_measure_and_the_first_writes(tmp_path):
    path = tmp_path / "profile.json"
    (first, printed), (second, nothing) = run_world(2, profile, str(path), timeout=120)
    assert (first, second, nothing) == (1, 1, "")
    assert printed.endswith(f"wrote {path}\n")
    found = Profile.load(path)
    assert found.inside.measured
    assert [(point.tensor, point.microbatch) for point in found.blocks] == [
        (1, 1),
        (2, 1),
    ]
    assert [point.tensor for point in found.output] == [1, 2]
