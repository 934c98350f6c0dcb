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
import operator
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy

from megatron_2bw.base.files import new_figure, write_figure
from megatron_2bw.tools.convergence.report import Points, percent

# vanilla first
COLOURS = "#525252 #d94801 #2171b5 #238b45 #6a51a3 #c51b8a #a6761d #17becf".split()
TICKS = (0, 0.25, 0.5, 0.75, 1, 2, 5, 10, 20, 50, 100)  # and their negatives

Loss = float | numpy.ndarray


def draw(content: Mapping[str, Any], path: Path) -> None:
    """A column for each learning rate: the training losses, and below them what each
    variant has more than vanilla.

    Means over the seeds of the curves smoothed over a fiftieth (above) and a twentieth
    (below) of the iterations, in a band from the smallest to the largest. Markers are
    validations; a diverged run is left out.

    content  what runs.json holds, of one run at least
    """
    results: dict[tuple[str, str], list[dict[str, Any]]] = collections.defaultdict(list)
    for run in content["runs"]:
        if "training" in run:
            results[run["lr"], run["variant"]].append(run)
    trained = {lr for lr, _ in results}
    rates = [lr for lr in content["learning_rates"] if lr in trained]
    variants = content["variants"]
    width = max(6.4, 3 + 2.7 * len(rates))
    height = 6.6 + 0.2 * len(variants) / len(rates)
    figure = new_figure(width, height)
    grid = figure.subplots(
        2, len(rates), squeeze=False, sharex=True, height_ratios=(1.1, 1)
    )
    for lr, (upper, lower) in zip(rates, grid.T):
        title = f"learning rate {lr}"
        vanilla = _good(results[lr, "vanilla"])
        for variant, colour in zip(variants, itertools.cycle(COLOURS)):
            good = _good(results[lr, variant])
            gone = len(results[lr, variant]) - len(good)
            if gone:
                title += f"\n{variant}: {gone} of {len(content['seeds'])} diverged"
            runs = [(run,) for run in good.values()]
            window = content["iterations"] / 50
            _curves(upper, runs, window, _loss, colour, variant)
            if variant != "vanilla":
                pairs = [
                    (good[seed], vanilla[seed]) for seed in good if seed in vanilla
                ]
                _curves(lower, pairs, content["iterations"] / 20, percent, colour)
        upper.set_title(title, fontsize=11)
        _gap_axis(lower)
        lower.set(xlabel="iteration", xlim=(0, content["iterations"]))
        for axes in (upper, lower):
            axes.grid(linewidth=0.4, alpha=0.5)
            axes.spines[["top", "right"]].set_visible(False)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside upper left",
        ncols=len(rates),
        frameon=False,
        fontsize=9,
    )
    grid[0, 0].set_ylabel("loss (nats per token)\nline: training, points: validation")
    grid[1, 0].set_ylabel("loss above vanilla's (%)\nlinear to 1 %, then logarithmic")
    write_figure(path, figure)


def _good(runs: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The runs that have not diverged, by seed."""
    return {run["seed"]: run for run in runs if not run["diverged"]}


def _gap_axis(axes: Any) -> None:
    """A vertical axis that is linear to 1 %: the beginning is far off, the end is what
    matters."""
    axes.axhline(0, color=COLOURS[0], linewidth=1.5)
    axes.set_yscale("symlog", linthresh=1)
    least, most = axes.get_ylim()
    ticks = sorted({*TICKS, *map(operator.neg, TICKS)})
    axes.set_yticks([tick for tick in ticks if least <= tick <= most])
    axes.set_ylim(least, most)
    axes.yaxis.set_major_formatter(
        lambda tick, _: f"{tick:+g}".replace("-", "−") if tick else "0"
    )


def _loss(loss: Loss) -> Loss:
    return loss


def _curves(
    axes: Any,
    groups: Sequence[tuple[dict[str, Any], ...]],
    window: float,
    value: Callable[..., Loss],
    colour: str,
    label: str | None = None,
) -> None:
    """`value` of the losses of the runs of each group: of smoothed training losses, and
    points of validations at the iterations that all runs have."""
    if not groups:
        axes.plot([], [], color=colour, label=label)
        return
    window = max(1.0, window)
    runs = list(itertools.chain(*groups))
    at = places(min(run["training"][-1][0] for run in runs), window)
    curves = []
    for group in groups:
        smoothed = [smooth(run["training"], at, window) for run in group]
        curves.append(value(*smoothed))
    axes.plot(at, numpy.mean(curves, axis=0), color=colour, linewidth=1.5, label=label)
    if len(curves) > 1:
        low = numpy.min(curves, axis=0)
        high = numpy.max(curves, axis=0)
        axes.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
    validations = [[dict(run["validation"]) for run in group] for group in groups]
    common = set.intersection(*map(set, itertools.chain(*validations)))
    ends = sorted(common)
    means = []
    for end in ends:
        values = [value(*(each[end] for each in group)) for group in validations]
        means.append(statistics.fmean(values))
    axes.plot(ends, means, "o", color=colour, markersize=3.5, clip_on=False, zorder=3)


def smooth(points: Points, at: numpy.ndarray, window: float) -> numpy.ndarray:
    """The mean training loss of the `window` iterations before each of `at`."""
    ends, losses = numpy.array(points, dtype=float).T
    ends = numpy.concatenate([[0.0], ends])
    total = numpy.concatenate([[0.0], numpy.cumsum(numpy.diff(ends) * losses)])
    before = numpy.interp(at - window, ends, total)
    return (numpy.interp(at, ends, total) - before) / window


def places(end: float, window: float) -> numpy.ndarray:
    """Iterations at which to evaluate a smoothed curve, at most a thousand."""
    return numpy.linspace(window, end, int(min(1000, max(2, end - window + 1))))


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
