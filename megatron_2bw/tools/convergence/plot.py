"""curves.png of megatron-2bw convergence, or that of a recorded runs.json:

    python -m megatron_2bw.tools.convergence.plot docs/convergence/batch8k.json
    docs/convergence/batch8k.png

Invariant: a variant has the same colour in every panel, and what is drawn of two
variants is of the same iterations.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy

from megatron_2bw.base.files import new_figure, write_figure
from megatron_2bw.tools.convergence.report import Points, number, percent

# vanilla first
COLOURS = (
    "#525252",
    "#d94801",
    "#2171b5",
    "#238b45",
    "#6a51a3",
    "#c51b8a",
    "#a6761d",
    "#17becf",
)
TICKS = (
    0,
    *(
        sign * tick
        for tick in (0.25, 0.5, 0.75, 1, 2, 5, 10, 20, 50, 100)
        for sign in (1, -1)
    ),
)


def draw(content: Mapping[str, Any], path: Path) -> None:
    """A column for each learning rate: the training losses, and below them what each
    variant has more than vanilla.

    Means over the seeds of the curves smoothed over a fiftieth (above) and a twentieth
    (below) of the iterations, in a band from the smallest to the largest. Markers are
    validations; a diverged run is left out.

    content  what runs.json holds, of one run at least
    """
    results = {
        (run["lr"], run["variant"], run["seed"]): run
        for run in content["runs"]
        if "training" in run
    }
    good = {key: run for key, run in results.items() if not run["diverged"]}
    variants, seeds, iterations = (
        content[key] for key in ("variants", "seeds", "iterations")
    )
    rates = [
        lr for lr in content["learning_rates"] if any(key[0] == lr for key in results)
    ]
    figure = new_figure(
        max(6.4, 3 + 2.7 * len(rates)), 6.6 + 0.2 * len(variants) / len(rates)
    )
    grid = figure.subplots(
        2, len(rates), squeeze=False, sharex=True, height_ratios=(1.1, 1)
    )
    for place, lr in enumerate(rates):
        upper, lower = grid[:, place]
        title = f"learning rate {lr}"
        for variant, colour in zip(variants, itertools.cycle(COLOURS)):
            runs, base = (
                {seed: good.get((lr, each, seed)) for seed in seeds}
                for each in (variant, "vanilla")
            )
            if gone := sum(
                (lr, variant, seed) in results and not runs[seed] for seed in seeds
            ):
                title += f"\n{variant}: {gone} of {len(seeds)} diverged"
            own = [(run,) for run in runs.values() if run]
            _curves(upper, own, iterations / 50, lambda loss: loss, colour, variant)
            if variant != "vanilla":
                pairs = [
                    (runs[seed], base[seed])
                    for seed in seeds
                    if runs[seed] and base[seed]
                ]
                _curves(lower, pairs, iterations / 20, percent, colour)
        lower.axhline(0, color=COLOURS[0], linewidth=1.5)
        # linear to 1 %: the beginning is far off, the end is what matters
        lower.set_yscale("symlog", linthresh=1)
        least, most = lower.get_ylim()
        lower.set_yticks([tick for tick in TICKS if least <= tick <= most])
        lower.set_ylim(least, most)
        lower.yaxis.set_major_formatter(
            lambda tick, _: f"{tick:+g}".replace("-", "−") if tick else "0"
        )
        lower.set(xlabel="iteration", xlim=(0, iterations))
        for axes in (upper, lower):
            axes.grid(linewidth=0.4, alpha=0.5)
            axes.spines[["top", "right"]].set_visible(False)
        upper.set_title(title, fontsize=11)
    names = grid[0, 0].get_legend_handles_labels()
    figure.legend(
        *names, loc="outside upper left", ncols=len(rates), frameon=False, fontsize=9
    )
    grid[0, 0].set_ylabel("loss (nats per token)\nline: training, points: validation")
    grid[1, 0].set_ylabel("loss above vanilla's (%)\nlinear to 1 %, then logarithmic")
    write_figure(path, figure)


def _curves(
    axes: Any,
    groups: Sequence[tuple[dict, ...]],
    window: float,
    value: Callable,
    colour: str,
    label: str | None = None,
) -> None:
    """`value` of the losses of the runs of each group: of smoothed training losses, and
    points of validations."""
    if not groups:
        axes.plot([], [], color=colour, label=label)
        return
    window = max(1.0, window)
    at = places(min(run["training"][-1][0] for runs in groups for run in runs), window)
    curves = [
        value(*(smooth(run["training"], at, window) for run in runs)) for runs in groups
    ]
    axes.plot(at, numpy.mean(curves, axis=0), color=colour, linewidth=1.5, label=label)
    if len(curves) > 1:
        low, high = numpy.min(curves, axis=0), numpy.max(curves, axis=0)
        axes.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
    points = []
    for runs in groups:
        losses = [dict(run["validation"]) for run in runs]
        ends = [end for end in losses[0] if all(end in each for each in losses)]
        points.append([[end, value(*(each[end] for each in losses))] for end in ends])
    # at the iterations that all of them have
    ends, means = zip(*mean(points) or [(math.nan, math.nan)])
    axes.plot(ends, means, "o", color=colour, markersize=3.5, clip_on=False, zorder=3)


def smooth(points: Points, at: numpy.ndarray, window: float) -> numpy.ndarray:
    """The mean training loss of the `window` iterations before each of `at`."""
    ends = numpy.array([0.0, *(end for end, _ in points)])
    losses = numpy.array([number(loss) for _, loss in points])
    total = numpy.concatenate([[0.0], numpy.cumsum(numpy.diff(ends) * losses)])
    return (
        numpy.interp(at, ends, total) - numpy.interp(at - window, ends, total)
    ) / window


def mean(curves: Sequence[Points]) -> Points:
    """At the iterations that all curves have."""
    losses = [dict(points) for points in curves]
    ends = [end for end, _ in curves[0] if all(end in curve for curve in losses)]
    return [
        [end, statistics.fmean(number(curve[end]) for curve in losses)] for end in ends
    ]


def places(end: float, window: float) -> numpy.ndarray:
    """Iterations at which to evaluate a smoothed curve, at most a thousand."""
    return numpy.linspace(window, end, int(min(1000, max(2, end - window + 1))))


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
