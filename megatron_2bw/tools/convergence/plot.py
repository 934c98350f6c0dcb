"""curves.png of megatron-2bw convergence, or that of a recorded runs.json:

    python -m megatron_2bw.tools.convergence.plot docs/convergence/batch8k.json
    docs/convergence/batch8k.png

Invariant: a variant has the same colour in every panel, and what is drawn of two
variants is of the same iterations.
"""

from __future__ import annotations

import collections
import itertools
import json
import statistics
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from megatron_2bw.base.files import new_figure, write_figure
from megatron_2bw.tools.convergence.report import Points, Result, percent

# vanilla first
COLOURS = "#525252 #d94801 #2171b5 #238b45 #6a51a3 #c51b8a #a6761d #17becf".split()
TICKS = (-10, -5, -2, -1, -0.5, 0, 0.5, 1, 2, 5, 10, 20, 50, 100)  # percent
PLACES = 500  # at which a smoothed curve is drawn


class Curve(NamedTuple):
    """The losses of a run, or how many percent they are above those of another run."""

    training: numpy.ndarray  # smoothed, at PLACES iterations
    validation: dict[int, float]  # by iteration

    def above(self, other: Curve) -> Curve:
        validation = {}
        for end in self.validation.keys() & other.validation.keys():
            validation[end] = percent(self.validation[end], other.validation[end])
        return Curve(percent(self.training, other.training), validation)


def draw(content: Mapping[str, Any], path: Path) -> None:
    """A column for each learning rate: the training losses, and below them what each
    variant has more than vanilla.

    Means over the seeds of the curves smoothed over a thirtieth of the iterations, in a
    band from the smallest to the largest. Markers are validations; a diverged run is
    left out.

    content  what runs.json holds, of one run at least
    """
    iterations = content["iterations"]
    variants = content["variants"]
    rates = content["learning_rates"]
    trained = [run for run in content["runs"] if "training" in run]
    good = [run for run in trained if not run["diverged"]]
    gone = [run["lr"] for run in trained if run["diverged"]]
    at, curves = _curves(good, iterations)
    width = max(6.4, 3 + 2.7 * len(rates))
    figure = new_figure(width, 6.6 + 0.2 * len(variants) / len(rates))
    grid = figure.subplots(2, len(rates), squeeze=False, sharex=True)
    for lr, (upper, lower) in zip(rates, grid.T):
        vanilla = curves[lr, "vanilla"]
        for variant, colour in zip(variants, itertools.cycle(COLOURS)):
            own = curves[lr, variant]
            upper.plot([], [], color=colour, label=variant)  # for the legend
            _draw_means(upper, at, own.values(), colour)
            if variant != "vanilla":
                seeds = own.keys() & vanilla.keys()
                gaps = [own[seed].above(vanilla[seed]) for seed in seeds]
                _draw_means(lower, at, gaps, colour)
        title = f"learning rate {lr}"
        diverged = gone.count(lr)
        if diverged:
            title += f", {diverged} runs diverged"
        upper.set_title(title, fontsize=11)
        _gap_axis(lower)
        lower.set(xlabel="iteration", xlim=(0, iterations))
        for axes in (upper, lower):
            axes.grid(linewidth=0.4, alpha=0.5)
            axes.spines[["top", "right"]].set_visible(False)
    first = grid[0, 0]
    legend = first.get_legend_handles_labels()
    place = "outside upper left"
    figure.legend(*legend, loc=place, ncols=len(rates), frameon=False, fontsize=9)
    first.set_ylabel("loss (nats per token)\nline: training, points: validation")
    grid[1, 0].set_ylabel("loss above vanilla's (%)\nlinear to 1 %, then logarithmic")
    write_figure(path, figure)


def _curves(runs: list[Result], iterations: int) -> tuple[numpy.ndarray, Any]:
    """The iterations at which the curves are drawn, and for each (lr, variant) the
    curves by seed."""
    window = max(1.0, iterations / 30)
    ends = [run["training"][-1][0] for run in runs]
    at = numpy.linspace(window, min(ends, default=iterations), PLACES)
    curves = collections.defaultdict(dict)
    for run in runs:
        training = smooth(run["training"], at, window)
        curve = Curve(training, dict(run["validation"]))
        curves[run["lr"], run["variant"]][run["seed"]] = curve
    return at, curves


def _gap_axis(axes: Any) -> None:
    """A vertical axis that is linear to 1 %: the beginning is far off, the end is what
    matters."""
    axes.axhline(0, color=COLOURS[0], linewidth=1.5)
    axes.set_yscale("symlog", linthresh=1)
    limits = axes.get_ylim()
    axes.set_yticks(TICKS)
    axes.set_ylim(limits)
    axes.yaxis.set_major_formatter("{x:+g}")


def _draw_means(
    axes: Any, at: numpy.ndarray, curves: Collection[Curve], colour: str
) -> None:
    if not curves:
        return
    training = numpy.array([curve.training for curve in curves])
    axes.plot(at, training.mean(axis=0), color=colour, linewidth=1.5)
    low = training.min(axis=0)
    high = training.max(axis=0)
    axes.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
    losses = collections.defaultdict(list)
    for curve in curves:
        for end, loss in curve.validation.items():
            losses[end].append(loss)
    means = list(map(statistics.fmean, losses.values()))
    axes.plot(list(losses), means, "o", color=colour, markersize=3.5, clip_on=False)


def smooth(points: Points, at: numpy.ndarray, window: float) -> numpy.ndarray:
    """The mean training loss of the `window` iterations before each of `at`."""
    ends, losses = numpy.array(points, dtype=float).T
    ends = numpy.concatenate([[0.0], ends])
    parts = numpy.diff(ends) * losses
    total = numpy.concatenate([[0.0], numpy.cumsum(parts)])
    before = numpy.interp(at - window, ends, total)
    return (numpy.interp(at, ends, total) - before) / window


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    draw(json.loads(source.read_text()), target)
