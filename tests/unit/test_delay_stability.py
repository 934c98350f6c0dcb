"""The limits of bench/delay_stability.py against closed forms, and against the recurrence itself."""

from __future__ import annotations

import numpy
import pytest

from bench.delay_stability import limit, variance


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
def test_closed_forms(beta):
    assert limit(beta, None) == pytest.approx(2 * (1 + beta) / (1 - beta)), "heavy ball"
    assert limit(beta, (0.0, 0.0)) == pytest.approx(1), "the product of the roots, beta + (1 - beta) rate, is 1"


def run(beta: float, rate: float, factor: float, gradient: float, noise: numpy.ndarray, part: float = 1.0):
    """The weights of the recurrence as the update rule has it, from 1."""
    weights, mean, gradients = [1.0, 1.0, 1.0], 0.0, [0.0, 0.0]
    for each in noise:
        late = weights[-2] + factor * (weights[-2] - weights[-3]) - gradient * (1 - beta) * gradients[-2]
        fresh = weights[-1] + factor * (weights[-1] - weights[-2]) - gradient * (1 - beta) * gradients[-1]
        gradients.append(rate * (part * late + (1 - part) * fresh) + each)
        mean = beta * mean + (1 - beta) * gradients[-1]
        weights.append(weights[-1] - mean)
    return numpy.array(weights)


@pytest.mark.parametrize("factor, gradient, part", [(0.0, 0.0, 1), (1.0, 0.0, 1), (1.5, 2.0, 1), (0.5, 0.5, 0.25)])
def test_the_recurrence_falls_below_the_limit_and_grows_above(factor, gradient, part):
    for share, falls in ((0.95, True), (1.05, False)):
        rate = share * limit(0.9, (factor, gradient, part))
        weights = run(0.9, rate, factor, gradient, numpy.zeros(4000), part)
        assert bool(abs(weights[-20:]).max() < 1) == falls


@pytest.mark.parametrize("factor, gradient", [(0.0, 0.0), (1.5, 2.0)])
def test_the_variance_is_what_drawn_numbers_give(factor, gradient):
    weights = run(0.9, 0.5, factor, gradient, numpy.random.default_rng(1).normal(size=400_000))
    assert weights[1000:].var() == pytest.approx(variance(0.5, 0.9, (factor, gradient)), rel=0.02)
    assert variance(2 * limit(0.9, (factor, gradient)), 0.9, (factor, gradient)) == numpy.inf
