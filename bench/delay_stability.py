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

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy
from scipy.optimize import bisect, minimize

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.tables import new_parser, table, write_result

BETAS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98)
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
    rate: float, beta: float, setting: tuple[float, ...] | None
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
        older, newer = (
            (1 + factor) * rows[i]
            - factor * rows[i + 1]
            - gradient * (1 - beta) * rows[i + 4]
            for i in (1, 0)
        )
        ahead = share * older + (1 - share) * newer
    mean = beta * rows[3] + (1 - beta) * rate * ahead
    noise = numpy.array([beta - 1, 0, 0, 1 - beta, 1, 0])
    return numpy.stack(
        [rows[0] - mean, rows[0], rows[1], mean, rate * ahead, rows[4]]
    ), noise


def excess(setting: tuple[float, ...] | None, rate: float, beta: float) -> float:
    """Positive above the limit: the largest eigenvalue's size, less 1."""
    return (
        max(abs(numpy.linalg.eigvals(transition(rate, beta, setting)[0]))) - 1 - 1e-12
    )


def limit(beta: float, setting: tuple[float, ...] | None) -> float:
    """The largest stable learning rate x curvature: before the first unstable one of a
    fine grid."""
    grid = numpy.geomspace(0.05, MOST, 1000)
    first = next(
        place for place, rate in enumerate(grid) if excess(setting, rate, beta) > 0
    )
    return bisect(
        lambda rate: excess(setting, rate, beta), grid[first - 1], grid[first]
    )


def reach(beta: float) -> float:
    """The largest learning rate x curvature that some factor and gradient, chosen for
    it, make stable; all are late."""
    return bisect(
        lambda rate: (
            minimize(excess, (-0.2, 1), (rate, beta), "Nelder-Mead", tol=1e-9).fun
        ),
        1,
        MOST,
    )


def variance(
    rate: float, beta: float, setting: tuple[float, ...] | None, moves: bool = False
) -> float:
    """Of W with gradients of unit noise, once the start is forgotten; infinite above
    the limit. P = A P A' + b b'.

    moves: of the distance to a minimum that takes a random step of unit variance at
    each update, without noise
    """
    if excess(setting, rate, beta) > 0:
        return math.inf
    a, b = transition(rate, beta, setting)
    b = numpy.array([1, 1, 1, 0, 0, 0]) if moves else b
    flat = numpy.linalg.solve(
        numpy.eye(36) - numpy.kron(a, a), numpy.outer(b, b).reshape(-1)
    )
    return float(flat[0])


def ratios(beta: float, rate: float, moves: bool) -> dict[str, float]:
    """A row: the variances of all settings in units of that without delay."""
    found = {
        name: variance(rate, beta, each, moves)
        for name, each in {"": None, **SETTINGS}.items()
    }
    return {"beta1": beta, "rate": rate} | {
        name: round(found[name] / found[""], 2) for name in SETTINGS
    }


def main() -> int:
    path = new_parser(__doc__, "delay_stability").parse_args().json
    settings = {"no delay": None, **SETTINGS}
    limits = {
        beta: {name: round(limit(beta, each), 2) for name, each in settings.items()}
        for beta in BETAS
    }
    rows = [
        {"beta1": beta} | found | {"best for each": round(reach(beta), 1)}
        for beta, found in limits.items()
    ]
    noise, lag = (
        [ratios(beta, rate, moves) for beta in BETAS[-3:] for rate in RATES]
        for moves in (False, True)
    )
    print(
        "largest stable learning rate x curvature; factor, and times the gradient's part\n",
        table(rows),
        sep="\n",
    )
    print(
        "\nvariance of the weights, in units of that without delay\n",
        table(noise),
        sep="\n",
    )
    print(
        "\nits distance to a moving minimum, in the same units\n", table(lag), sep="\n"
    )
    write_result(path, {"rows": rows, "noise": noise, "lag": lag})
    return 0


if __name__ == "__main__":
    sys.exit(main())
