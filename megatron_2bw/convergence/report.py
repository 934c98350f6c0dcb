"""The results of megatron-2bw convergence: curves from logs, gaps, lags, the table and the text.

Invariant: pure functions of logs and results. With a loss that is not finite a run has diverged, and has no figures.

final validation loss   after the last iteration
gap                     that loss above vanilla's with the same seed, in percent of vanilla's
lag                     iterations by which a variant is behind vanilla at the same loss: the end less the iteration at
                        which vanilla's loss was what the variant's is at the end; negative if it is ahead

The lag uses the training loss, a trailing mean over a tenth of the iterations; validations are few and small. The
batches' noise is the same for both runs at one iteration, but not at two, where it is as large as the difference. So
the other iteration is looked up in a smooth fit to vanilla's curve, at the fit's own end plus the difference of the two
trailing means at the end. Equal curves lag by exactly 0. With a decaying learning rate, vanilla had that loss while its
rate was still higher: a run that is shorter by the lag would end lower.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from megatron_2bw import run_log
from megatron_2bw.errors import UserError

STARTED = "convergence.py: started"  # begins the line before each attempt's output in train.log
WINDOW = 0.1  # of the iterations, for the trailing mean

Points = list[list[float]]  # [iteration, loss]
Results = Mapping[tuple[str, str, int], dict[str, Any]]  # of (lr, variant, seed): what result.json holds


def parse_log(text: str) -> dict[str, Any]:
    """{"training": Points, "validation": Points} of a run's attempts.

    A training loss is the mean of the iterations since the point before. The next line's mean includes an attempt's
    first line. An attempt's losses replace those of the attempt before. A line without a loss gives nan. Where all
    steps since the line before were skipped, the loss stays what it was, as the weights do.
    """
    training: Points = []
    validation: dict[int, float] = {}
    for attempt in text.split(STARTED):
        lines = list(run_log.training(attempt))
        if lines:
            begin = lines[0].iteration
            training = [point for point in training if point[0] < begin]
            validation = {iteration: loss for iteration, loss in validation.items() if iteration < begin}
            last = begin - 1
        for line in lines[1:]:
            if line.skipped < line.iteration - last:
                training.append([line.iteration, number(line.loss)])
            elif training:
                training.append([line.iteration, training[-1][1]])
            last = line.iteration
        tried = (line for line in run_log.validations(attempt) if line.dataset != "test set")
        validation |= {line.iteration: line.loss for line in tried if line.loss is not None}
    return {"training": training, "validation": [list(pair) for pair in validation.items()]}


def outcome(text: str, code: int, iterations: int) -> dict[str, Any]:
    """The content of result.json for a run that ended with this log and exit code, without its command.

    Raises UserError if the run failed.
    """
    found = parse_log(text)
    attempt = text[text.rindex(STARTED) :].partition("\n")[2]
    losses = [loss for _, loss in found["training"] + found["validation"]]
    ended = code and re.search(r"found (NaN|Inf) in|Unexpected result (nan|inf)", attempt)  # by Megatron's check
    if ended or not all(map(math.isfinite, losses)):
        return found | {"diverged": True}
    if code:
        raise UserError(f"exit code {code}: {run_log.cause(attempt)}")
    if not found["training"] or not found["validation"] or found["validation"][-1][0] != iterations:
        raise UserError(
            "it ended, but its log holds no training loss (is --log-interval above --train-iters?) or no validation "
            "loss after the last iteration (does --split leave data for it?)"
        )
    return found | {"diverged": False}


# --- curves ---------------------------------------------------------------------------------------------------------


def smooth(points: Points, at: numpy.ndarray, window: float) -> numpy.ndarray:
    """The mean training loss of the `window` iterations before each of `at`."""
    ends = numpy.array([0.0, *(end for end, _ in points)])
    losses = numpy.array([number(loss) for _, loss in points])
    total = numpy.concatenate([[0.0], numpy.cumsum(numpy.diff(ends) * losses)])
    return (numpy.interp(at, ends, total) - numpy.interp(at - window, ends, total)) / window


def number(loss: float | None) -> float:
    """A loss from JSON, which has no nan."""
    return math.nan if loss is None else loss


def trend(points: Points) -> Points:
    """The curve without the batches' noise: least squares by a polynomial of degree 6 in the iteration's logarithm.

    Lower with fewer than 21 points, so that it does not pass through all of them.
    """
    ends = numpy.array([0.0, *(end for end, _ in points)])
    middles = numpy.log((ends[1:] + ends[:-1]) / 2)
    losses = [number(loss) for _, loss in points]
    if len(points) > 1:
        losses = numpy.polynomial.Polynomial.fit(middles, losses, min(6, (len(points) - 1) // 3 + 1))(middles)
    return [[end, loss] for end, loss in zip(ends[1:], losses)]


def mean(curves: Sequence[Points]) -> Points:
    """At the iterations that all curves have."""
    losses = [dict(points) for points in curves]
    ends = [end for end, _ in curves[0] if all(end in curve for curve in losses)]
    return [[end, statistics.fmean(number(curve[end]) for curve in losses)] for end in ends]


def places(end: float, window: float) -> numpy.ndarray:
    """Iterations at which to evaluate a smoothed curve, at most a thousand."""
    return numpy.linspace(window, end, int(min(1000, max(2, end - window + 1))))


def lag(variant: Points, vanilla: Points, window: float) -> float:
    """By how many iterations the variant's curve is behind vanilla's at the end; see the module's docstring.

    No more than the curves are long without their first window; nan without a finite loss at the end.
    """
    end = min(variant[-1][0], vanilla[-1][0]) if variant and vanilla else 0
    if end <= window:
        return math.nan
    at = places(end, window)
    difference = float(smooth(variant, at[-1:], window)[0] - smooth(vanilla, at[-1:], window)[0])
    if not math.isfinite(difference):
        return math.nan
    curve = smooth(trend(vanilla if difference >= 0 else variant), at, window)
    target = curve[-1] + abs(difference)
    above = numpy.flatnonzero(curve >= target)  # the last one is vanilla's last iteration at that loss
    place = above[-1] if len(above) else 0
    reached = at[place]
    if curve[place] > target:
        reached += (at[place + 1] - at[place]) * (curve[place] - target) / (curve[place] - curve[place + 1])
    return math.copysign(end - reached, difference) if end > reached else 0.0


# --- figures --------------------------------------------------------------------------------------------------------


def spread(by_seed: dict[int, float]) -> dict[str, Any]:
    """{"by_seed", "mean", "sd"}: the sample standard deviation, nan of fewer than two; a mean of none is nan."""
    values = list(by_seed.values())
    middle = statistics.fmean(values) if values else math.nan
    some = len(values) > 1 and math.isfinite(middle)
    return {"by_seed": by_seed, "mean": middle, "sd": statistics.stdev(values) if some else math.nan}


def percent(loss: float, reference: float) -> float:
    return 100 * (loss - reference) / reference


def summarize(results: Results, lr: str, variant: str, seeds: Sequence[int], iterations: int) -> dict[str, Any]:
    """The figures of a variant at a learning rate, from the seeds that have results.

    A diverged run has an infinite loss. A gap needs both runs of a seed, and a vanilla that has not diverged.
    """
    window = max(1.0, WINDOW * iterations)
    own = {seed: results[lr, variant, seed] for seed in seeds if (lr, variant, seed) in results}
    base = {seed: results[lr, "vanilla", seed] for seed in own if (lr, "vanilla", seed) in results}
    base = {seed: result for seed, result in base.items() if not result["diverged"]}
    final = {seed: validated(result) for seed, result in own.items()}
    gaps = {seed: percent(final[seed], validated(result)) for seed, result in base.items()}
    curves = {s: (own[s]["training"], result["training"]) for s, result in base.items() if not own[s]["diverged"]}
    whole = curves and len(curves) == len(own)  # else only some seeds have curves
    of_means = lag(*map(mean, zip(*curves.values())), window) if whole else math.nan
    ends = [points[-1][0] for pair in curves.values() for points in pair if points]
    return {
        "lr": lr,
        "variant": variant,
        "finished": list(own),
        "diverged": [seed for seed, result in own.items() if result["diverged"]],
        "validation_loss": spread(final),
        "gap_percent": spread(gaps),
        "lag_iterations": spread({s: lag(*pair, window) for s, pair in curves.items()}) | {"of_means": of_means},
        "lag_limit": min(ends, default=iterations) - window,
    }


def validated(result: dict[str, Any]) -> float:
    """The final validation loss; infinite if the run diverged."""
    return math.inf if result["diverged"] else result["validation"][-1][1]


def too_large(rows: Sequence[dict[str, Any]], limits: Mapping[str, float], seeds: int) -> list[str]:
    """A line for each variant and rate whose mean gap is above the rate's limit, or unknown for some seed."""
    lines = []
    for row in rows:
        gaps, begin = row["gap_percent"], f"{row['variant']} at lr {row['lr']}: the gap"
        if row["variant"] != "vanilla" and len(gaps["by_seed"]) < seeds:
            lines.append(f"{begin} is known for {len(gaps['by_seed'])} of {seeds} seeds")
        elif row["variant"] != "vanilla" and gaps["mean"] > limits[row["lr"]]:
            lines.append(f"{begin} {gaps['mean']:+.3g} % is above --max-gap {limits[row['lr']]:g}")
    return lines


# --- for people -----------------------------------------------------------------------------------------------------


def markdown(facts: Sequence[str], rows: Sequence[dict[str, Any]]) -> str:
    """report.md: what was run, a table for each learning rate, the picture."""
    lines = [*facts, ""]
    for lr in dict.fromkeys(row["lr"] for row in rows):
        lines += [f"## Learning rate {lr}", "", f"| {' | '.join(COLUMNS)} |", "| --- |" + " ---: |" * len(COLUMNS[1:])]
        lines += [_row(row) for row in rows if row["lr"] == lr] + [""]
    picture = ["![training and validation losses](curves.png)", ""] if rows else []
    return "\n".join([*lines, *picture, *EXPLANATION]) + "\n"


COLUMNS = ("variant", "final validation loss", "gap, %", "lag, iterations")
EXPLANATION = """\
Means over the seeds ± sample standard deviation. Gap: validation loss above vanilla's of the same seed, that is with
the same initial weights, batches and validation samples. Lag: the end less the iteration at which vanilla's training
loss was what the variant's is at the end, from the mean curves, ± over curves of single seeds; negative where the
variant is ahead.""".splitlines()


def _row(row: dict[str, Any]) -> str:
    gap, behind = "", ""
    if row["variant"] != "vanilla":
        gap = shown(row["gap_percent"], "{:+.2f}")
        lags = row["lag_iterations"] | {"mean": row["lag_iterations"]["of_means"]}
        behind = ("≥ " if lags["mean"] >= row["lag_limit"] - 0.5 else "") + shown(lags, "{:.0f}")
    return f"| {' | '.join((row['variant'], shown(row['validation_loss'], '{:.4f}'), gap, behind))} |"


def shown(figure: dict[str, Any], form: str) -> str:
    """A mean, with the standard deviation if there is one."""
    if not math.isfinite(figure["mean"]):
        return "–" if math.isnan(figure["mean"]) else "diverged"
    deviation = "" if math.isnan(figure["sd"]) else f" ± {form.replace('+', '').format(figure['sd'])}"
    return form.format(figure["mean"]) + deviation
