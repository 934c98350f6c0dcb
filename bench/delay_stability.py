"""What a correction of 2BW's delay does in one direction of curvature: its stability, and its noise.

    python bench/delay_stability.py --json out/bench/delay_stability.json

On the quadratic L = curvature x^2 / 2, momentum as in Adam (a mean of gradients, with decay beta1) at a fixed learning
rate is a linear recurrence. It converges while learning rate x curvature stays below a limit; Adam's second moment only
rescales the curvature. With noise in the gradients x fluctuates. Prints, for each beta1 and setting of
--two-bw-correction, that limit; and the variance of x in units of the variance without delay.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy
from scipy.optimize import bisect

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.tables import new_parser, table, write_result

BETAS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98)
SETTINGS = {  # of --two-bw-correction: factor, gradient
    "none": (0.0, 0.0),
    "0.5": (0.5, 0.0),
    "1": (1.0, 0.0),
    "1.5": (1.5, 0.0),
    "2": (2.0, 0.0),
    "1 + 1g": (1.0, 1.0),
    "1 + 2g": (1.0, 2.0),
    "1.5 + 2g": (1.5, 2.0),
    "1.5 + 3g": (1.5, 3.0),
}
RATES = (0.3, 0.9, 2.0, 3.0)  # learning rate x curvature
MOST = 1000.0  # where the search for a limit ends


def transition(rate: float, beta: float, setting: tuple[float, float] | None) -> tuple[numpy.ndarray, numpy.ndarray]:
    """(A, b) of state(t+1) = A state(t) + b noise, with state = W(t), W(t-1), W(t-2), m(t-1), g(t-1), g(t-2).

    g(t) = rate x + noise at x = W(t) (setting None) or W(t-1) + factor (W(t-1) - W(t-2)) - gradient (1 - beta) g(t-2);
    m(t) = beta m(t-1) + (1 - beta) g(t); W(t+1) = W(t) - m(t). `rate` is learning rate x curvature.
    """
    rows = numpy.eye(6)
    ahead = rows[0]
    if setting is not None:
        factor, gradient = setting
        ahead = (1 + factor) * rows[1] - factor * rows[2] - gradient * (1 - beta) * rows[5]
    mean = beta * rows[3] + (1 - beta) * rate * ahead
    noise = numpy.array([beta - 1, 0, 0, 1 - beta, 1, 0])
    return numpy.stack([rows[0] - mean, rows[0], rows[1], mean, rate * ahead, rows[4]]), noise


def limit(beta: float, setting: tuple[float, float] | None) -> float:
    """The largest stable learning rate x curvature: before the first unstable one of a fine grid."""
    grid = numpy.geomspace(0.05, MOST, 1000)
    first = next(place for place, rate in enumerate(grid) if not _is_stable(rate, beta, setting))
    return bisect(lambda rate: _is_stable(rate, beta, setting) - 0.5, grid[first - 1], grid[first])


def _is_stable(rate: float, beta: float, setting: tuple[float, float] | None) -> bool:
    return max(abs(numpy.linalg.eigvals(transition(rate, beta, setting)[0]))) <= 1 + 1e-12


def variance(rate: float, beta: float, setting: tuple[float, float] | None) -> float:
    """Of W with gradients of unit noise, once the start is forgotten; infinite above the limit.

    The solution of P = A P A' + b b'. Without momentum and delay it is 1 / (2 rate) for small rates.
    """
    if not _is_stable(rate, beta, setting):
        return math.inf
    a, b = transition(rate, beta, setting)
    flat = numpy.linalg.solve(numpy.eye(36) - numpy.kron(a, a), numpy.outer(b, b).reshape(-1))
    return float(flat[0])


def main() -> int:
    path = new_parser(__doc__, "delay_stability").parse_args().json
    rows = [
        {"beta1": beta, "no delay": round(limit(beta, None), 2)}
        | {name: round(limit(beta, each), 2) for name, each in SETTINGS.items()}
        for beta in BETAS
    ]
    noise = [
        {"beta1": beta, "rate": rate}
        | {name: round(variance(rate, beta, each) / variance(rate, beta, None), 2) for name, each in SETTINGS.items()}
        for beta in BETAS[-3:]
        for rate in RATES
    ]
    print("largest stable learning rate x curvature; factor, and times the gradient's part\n", table(rows), sep="\n")
    print("\nvariance of the weights, in units of that without delay\n", table(noise), sep="\n")
    write_result(path, {"rows": rows, "noise": noise})
    return 0


if __name__ == "__main__":
    sys.exit(main())
