"""What a correction of 2BW's delay does in one direction of curvature: its stability,
and its noise.

    python bench/delay_stability.py --json out/bench/delay_stability.json

On the quadratic L = curvature x^2 / 2, momentum as in Adam (a mean of gradients, with
decay beta1) at a fixed learning rate is a linear recurrence. It converges while
learning rate x curvature stays below a limit; Adam's second moment only rescales the
curvature. Prints, for each beta1 and setting of --two-bw-correction, that limit, and
the highest of settings that know the curvature; and, in units of those without delay,
the variance of x under noise in the gradients, and that of its distance to a minimum
that moves at random.
"""

import itertools
import math
import sys
from pathlib import Path

import numpy
from scipy.optimize import bisect, minimize

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.tables import new_parser, table, write_result

BETAS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98)
Setting = tuple[float, ...] | None
# of --two-bw-correction: factor, gradient; and the share of late microbatches, if not
# all are
SETTINGS = {
    "none": (0.0, 0.0),
    "1 + 1g": (1.0, 1.0),
    "1.5 + 2g": (1.5, 2.0),
    "half late: 0.75 + 0.75g": (0.75, 0.75, 0.5),
    "quarter late: 0.5 + 0.5g": (0.5, 0.5, 0.25),
}
RATES = (0.3, 0.9, 1.9, 3.0)  # learning rate x curvature
MOST = 1000.0  # where the search for a limit ends


def transition(
    rate: float, beta: float, setting: Setting
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """(A, b) of state(t+1) = A state(t) + b noise, with state = W(t), W(t-1), W(t-2),
    m(t-1), g(t-1), g(t-2).

    g(t) = rate x + noise at x = W(t) (setting None), or x = share W'(t-1) + (1 - share)
    W'(t) with the working copy W'(t) = W(t) + factor (W(t) - W(t-1)) - gradient (1 -
    beta) g(t-1); m(t) = beta m(t-1) + (1 - beta) g(t); W(t+1) = W(t) - m(t). `rate` is
    learning rate x curvature.
    """
    rows = numpy.eye(6)
    ahead = rows[0]
    if setting is not None:
        factor, gradient, share = (*setting, 1.0)[:3]
        copies = (
            (1 + factor) * rows[:2]
            - factor * rows[1:3]
            - gradient * (1 - beta) * rows[4:]
        )
        ahead = share * copies[1] + (1 - share) * copies[0]
    mean = beta * rows[3] + (1 - beta) * rate * ahead
    noise = numpy.array([beta - 1, 0, 0, 1 - beta, 1, 0])
    newest = rows[0] - mean
    states = [newest, rows[0], rows[1], mean, rate * ahead, rows[4]]
    return numpy.stack(states), noise


def excess(setting: Setting, rate: float, beta: float) -> float:
    """Positive above the limit: the largest eigenvalue's size, less 1."""
    states, _ = transition(rate, beta, setting)
    return max(abs(numpy.linalg.eigvals(states))) - 1 - 1e-12


def limit(beta: float, setting: Setting) -> float:
    """The largest stable learning rate x curvature: before the first unstable one of a
    fine grid."""

    def excess_at(rate: float) -> float:
        return excess(setting, rate, beta)

    below = 0.0
    for rate in numpy.geomspace(0.05, MOST, 1000):
        if excess_at(rate) > 0:
            return bisect(excess_at, below, rate)
        below = rate
    raise ValueError(f"stable up to {MOST}")


def reach(beta: float) -> float:
    """The largest learning rate x curvature that some factor and gradient, chosen for
    it, make stable; all are late."""

    def least_excess(rate: float) -> float:
        start = (-0.2, 1)
        return minimize(excess, start, (rate, beta), "Nelder-Mead", tol=1e-9).fun

    return bisect(least_excess, 1, MOST)


def variance(rate: float, beta: float, setting: Setting, moves: bool) -> float:
    """The variance of W with gradients of unit noise, once the start is forgotten;
    infinite above the limit. P = A P A' + b b'.

    moves: that of the distance to a minimum that takes a random step of unit variance
    at each update, without noise
    """
    if excess(setting, rate, beta) > 0:
        return math.inf
    a, b = transition(rate, beta, setting)
    if moves:
        b = numpy.array([1, 1, 1, 0, 0, 0])
    system = numpy.eye(36) - numpy.kron(a, a)
    flat = numpy.linalg.solve(system, numpy.outer(b, b).reshape(-1))
    return float(flat[0])


def ratios(moves: bool) -> list[dict[str, float]]:
    """Rows with the variances of all settings in units of that without delay."""
    rows = []
    for beta, rate in itertools.product(BETAS[-3:], RATES):
        row = {"beta1": beta, "rate": rate}
        unit = variance(rate, beta, None, moves)
        for name, setting in SETTINGS.items():
            row[name] = round(variance(rate, beta, setting, moves) / unit, 2)
        rows.append(row)
    return rows


def main() -> int:
    path = new_parser(__doc__, "delay_stability").parse_args().json
    rows = []
    for beta in BETAS:
        row = {"beta1": beta, "no delay": round(limit(beta, None), 2)}
        for name, setting in SETTINGS.items():
            row[name] = round(limit(beta, setting), 2)
        row["best for each"] = round(reach(beta), 1)
        rows.append(row)
    noise = ratios(moves=False)
    lag = ratios(moves=True)
    meaning = "factor, and times the gradient's part"
    print(f"largest stable learning rate x curvature; {meaning}\n\n{table(rows)}")
    unit = "in units of that without delay"
    print(f"\nvariance of the weights, {unit}\n\n{table(noise)}")
    print(f"\nits distance to a moving minimum, in the same units\n\n{table(lag)}")
    write_result(path, {"rows": rows, "noise": noise, "lag": lag})
    return 0


if __name__ == "__main__":
    sys.exit(main())
