"""The limits of bench/delay_stability.py against closed forms, and against the recurrence itself."""

from __future__ import annotations

import numpy
import pytest

from bench.delay_stability import limit, variance


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
def test_closed_forms(beta):
    assert limit(beta, None) == pytest.approx(2 * (1 + beta) / (1 - beta)), "heavy ball"
    assert limit(beta, (0.0, 0.0)) == pytest.approx(1), "the product of the roots, beta + (1 - beta) rate, is 1"


def run(beta: float, rate: float, factor: float, gradient: float, noise: numpy.ndarray) -> numpy.ndarray:
    """The weights of the recurrence as the update rule has it, from 1."""
    weights, mean, gradients = [1.0, 1.0, 1.0], 0.0, [0.0, 0.0]
    for each in noise:
        late = weights[-2] + factor * (weights[-2] - weights[-3]) - gradient * (1 - beta) * gradients[-2]
        gradients.append(rate * late + each)
        mean = beta * mean + (1 - beta) * gradients[-1]
        weights.append(weights[-1] - mean)
    return numpy.array(weights)


@pytest.mark.parametrize("factor, gradient", [(0.0, 0.0), (0.5, 0.0), (1.0, 0.0), (1.0, 2.0), (1.5, 2.0)])
def test_the_recurrence_falls_below_the_limit_and_grows_above(factor, gradient):
    for share, falls in ((0.95, True), (1.05, False)):
        weights = run(0.9, share * limit(0.9, (factor, gradient)), factor, gradient, numpy.zeros(4000))
        assert bool(abs(weights[-20:]).max() < 1) == falls


@pytest.mark.parametrize(
    "beta, factor, expected",
    [(0.9, 0, 2.53), (0.9, 0.5, 3.86), (0.95, 0, 3.75), (0.95, 0.5, 7.32), (0.98, 0, 6.26), (0.98, 0.5, 17.6)],
)
def test_a_nesterov_step_is_one_of_the_settings(beta, factor, expected):
    """Nesterov's step, beta1 m + (1 - beta1) g, with a correction of `factor`.

    Its gradients are taken where those of Adam with a factor of beta1 (1 + factor) and a gradient term of `factor` are.
    """
    weights, look, momentum = [1.0] * 3, [], 0.0
    for _ in range(50):
        look.append(weights[-2] + factor * (weights[-2] - weights[-3]))
        momentum = beta * momentum + (1 - beta) * 0.7 * look[-1]
        weights.append(weights[-1] - beta * momentum - (1 - beta) * 0.7 * look[-1])
    adam, mean, gradients, found = [1.0] * 3, 0.0, [0.0, 0.0], []
    ahead = beta * (1 + factor)
    for _ in range(50):
        found.append(adam[-2] + ahead * (adam[-2] - adam[-3]) - factor * (1 - beta) * gradients[-2])
        gradients.append(0.7 * found[-1])
        mean = beta * mean + (1 - beta) * gradients[-1]
        adam.append(adam[-1] - mean)
    assert found == pytest.approx(look)
    assert limit(beta, (ahead, factor)) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("factor, gradient", [(0.0, 0.0), (1.5, 2.0)])
def test_the_variance_is_what_drawn_numbers_give(factor, gradient):
    weights = run(0.9, 0.5, factor, gradient, numpy.random.default_rng(1).normal(size=400_000))
    assert weights[1000:].var() == pytest.approx(variance(0.5, 0.9, (factor, gradient)), rel=0.02)
    assert variance(2 * limit(0.9, (factor, gradient)), 0.9, (factor, gradient)) == numpy.inf
