"""The largest stable curvature: without delay, with 2BW's delay, and with extrapolated weights.

    python bench/delay_stability.py --json out/bench/delay_stability.json

On the quadratic L = curvature x² / 2, momentum as in Adam (a mean of gradients, with decay beta1) at a fixed learning
rate is a linear recurrence, which converges while learning rate x curvature stays below a limit. Prints that limit for
each beta1 and factor of --two-bw-correction extrapolate; Adam's second moment only rescales the curvature. Then, for
gradients of pure noise, the distance between the weights of the gradient and the weights that it changes.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import new_parser, write_result

BETAS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98)
FACTORS = (0.0, 0.25, 0.5, 0.75, 1.0)
MOST = 1000.0  # where the search for a limit begins


def polynomial(rate: float, beta: float, factor: float | None) -> list[float]:
    """The polynomial whose roots are the growth of x from step to step; `rate` is learning rate x curvature.

    x(t+1) = x(t) + beta (x(t) - x(t-1)) - (1 - beta) rate y, with y = x(t) without delay (factor None), else the
    extrapolation x(t-1) + factor (x(t-1) - x(t-2)).
    """
    pull = (1 - beta) * rate
    if factor is None:
        return [1, -(1 + beta) + pull, beta]
    return [1, -(1 + beta), beta + pull * (1 + factor), -pull * factor]


def limit(beta: float, factor: float | None) -> float:
    """The largest stable learning rate x curvature, to 1e-9 of it, by bisection."""
    low, high = 0.0, MOST
    for _ in range(60):
        middle = (low + high) / 2
        stable = max(abs(numpy.roots(polynomial(middle, beta, factor)))) <= 1 + 1e-12
        low, high = (middle, high) if stable else (low, middle)
    return low


def distance(beta: float, factor: float) -> float:
    """|W(j+1) - W'(j)| over |W(j+1) - W(j)|, root mean squares, for gradients that are independent noise.

    The update m' = beta m + (1 - beta) g is guessed as factor x m. With a variance of g of 1 that of m is
    (1 - beta) / (1 + beta), so that of the error is (beta - factor)^2 (1 - beta) / (1 + beta) + (1 - beta)^2.
    """
    return math.sqrt(1 - 2 * beta * factor + factor**2)


def table(rows: list[dict[str, float]]) -> None:
    print(" | ".join(f"{name:>11}" for name in rows[0]))
    for row in rows:
        print(" | ".join(f"{value:11.2f}" for value in row.values()))


def main() -> int:
    path = new_parser(__doc__, "delay_stability").parse_args().json
    rows = [
        {"beta1": beta, "no delay": limit(beta, None)} | {f"factor {f:g}": limit(beta, f) for f in FACTORS}
        for beta in BETAS
    ]
    noise = [{"beta1": beta} | {f"factor {f:g}": distance(beta, f) for f in FACTORS} for beta in BETAS]
    print("largest stable learning rate x curvature")
    table(rows)
    print("distance to the weights that the gradient changes, in updates, if gradients are noise")
    table(noise)
    write_result(path, {"rows": rows, "noise": noise})
    return 0


if __name__ == "__main__":
    sys.exit(main())
