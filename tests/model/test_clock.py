"""The times that the model gives to recorded runs: by hand where they can be, and what a mend costs is in them."""

from __future__ import annotations

import pytest

from tests.model import cases
from tests.model.clock import MS, Clock


@pytest.mark.parametrize("name, microbatches", [("tied", 2), ("more-extra-warmup", 4)])
def test_an_iteration_is_its_forwards_and_backwards(name, microbatches):
    """If nothing else takes time; a message takes some only if the next stage waits for it."""
    alone = dict.fromkeys(MS, 0.0) | {"F": 10.0, "B": 20.0}
    logs = cases.logs_of(name)
    assert Clock(logs, alone).figures()[0] == pytest.approx(30 * microbatches)
    more = 2.0 if name == "tied" else 0.0  # of two messages: two microbatches in flight hide one of each pair
    assert Clock(logs, alone | {"message": 1.0}).figures()[0] == pytest.approx(30 * microbatches + more)


def test_a_step_that_is_late_delays_the_iteration_and_its_waits_too():
    long = MS | {"step": 40.0, "wake": 1.0}
    iteration, step = Clock(cases.logs_of("tied"), long).figures()
    without, shorter = Clock(cases.logs_of("tied", cases.without_waits), long).figures()
    assert iteration - without == pytest.approx(step - shorter) and step - shorter > 2
