"""The limits of bench/delay_stability.py against closed forms, and against the recurrence itself."""

from __future__ import annotations

import numpy
import pytest

from bench.delay_stability import distance, limit


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
def test_closed_forms(beta):
    assert limit(beta, None) == pytest.approx(2 * (1 + beta) / (1 - beta)), "heavy ball"
    assert limit(beta, 0.0) == pytest.approx(1), "the product of the roots, beta + (1 - beta) rate, is 1"


@pytest.mark.parametrize("factor", [0.0, 0.5, 1.0])
def test_the_recurrence_falls_below_the_limit_and_grows_above(factor):
    beta = 0.9
    for share, falls in ((0.95, True), (1.05, False)):
        rate = share * limit(beta, factor)
        x = [1.0, 1.0, 1.0]
        for _ in range(4000):
            late = x[-2] + factor * (x[-2] - x[-3])
            x.append(x[-1] + beta * (x[-1] - x[-2]) - (1 - beta) * rate * late)
        assert (max(map(abs, x[-20:])) < 1) is falls


@pytest.mark.parametrize("beta, factor", [(0.9, 0.0), (0.9, 0.8), (0.9, 1.0), (0.95, 1.0), (0.5, 0.5)])
def test_the_distance_in_noise_is_what_drawn_numbers_give(beta, factor):
    noise, momentum, updates = numpy.random.default_rng(1).normal(size=200_000), 0.0, []
    for gradient in noise:
        momentum = beta * momentum + (1 - beta) * gradient
        updates.append(momentum)
    updates = numpy.array(updates[1000:])
    error = updates[1:] - factor * updates[:-1]
    assert numpy.sqrt((error**2).mean() / (updates**2).mean()) == pytest.approx(distance(beta, factor), rel=0.01)
