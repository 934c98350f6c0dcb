"""The core on plain torch, one thread a stage: the reference's bits under random timings of everything that waits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_2bw import SCHEDULES, Shape
from tests.plain import assert_same, reference, run_threads, schedule


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_references_bits(name, stages):
    shape = Shape(stages, 4, 0, 6)
    assert_same(run_threads(schedule(name), shape), reference(name, shape))


def test_the_rules_differ():
    """What the comparison can tell apart: the losses of different rules are different."""
    shape = Shape(4, 4, 0, 6)
    losses = [torch.stack(reference(name, shape)[0]) for name in ("2bw", "pipedream", "gpipe")]
    assert not any(torch.equal(one, other) for k, one in enumerate(losses) for other in losses[:k])


@st.composite
def runs(draw):
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    stages = draw(st.sampled_from([1, 2, 3, 4]))
    options = {}
    if name == "2bw":
        options = {
            "gradient_slots": draw(st.sampled_from([1, 2])),
            "extra_warmup": draw(st.sampled_from([(), (1,), (2,)])) if stages > 1 else (),
            "sync_iterations": draw(st.integers(0, 3)),
        }
    least = schedule(name, **options).min_microbatches(stages)
    shape = Shape(stages, draw(st.integers(least, least + 2)), 0, draw(st.integers(1, 5)))
    return name, options, shape, draw(st.integers(0, 1 << 30))


@given(runs())
@settings(deadline=None)
def test_no_timing_changes_a_bit(run):
    """Actions, messages, all-gathers of the step: each starts after a random delay."""
    name, options, shape, seed = run
    found = run_threads(schedule(name, **options), shape, seed, seconds=0.0005)
    assert_same(found, reference(name, shape, options.get("sync_iterations", 0)))
