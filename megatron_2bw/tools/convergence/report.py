"""The results of megatron-2bw convergence: curves from logs, gaps, the table and the
text.

Invariant: pure functions of logs and results. With a loss that is not finite a run has
diverged, and has no figures.

final validation loss   after the last iteration
gap                     that loss above vanilla's with the same seed, in percent of
                        vanilla's
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_2bw.base import run_log
from megatron_2bw.base.errors import UserError

# begins the line before each attempt's output in train.log
STARTED = "convergence.py: started"

Points = list[list[float]]  # [iteration, loss]
# of (lr, variant, seed): what result.json holds
Results = Mapping[tuple[str, str, int], dict[str, Any]]


def parse_log(text: str) -> dict[str, Any]:
    """{"training": Points, "validation": Points} of a run's attempts.

    A training loss is the mean of the iterations since the point before. The next
    line's mean includes an attempt's first line. An attempt's losses replace those of
    the attempt before. A line without a loss gives nan. Where all steps since the line
    before were skipped, the loss stays what it was, as the weights do.
    """
    training: Points = []
    validation: dict[int, float] = {}
    for attempt in text.split(STARTED):
        lines = list(run_log.training(attempt))
        if lines:
            begin = lines[0].iteration
            training = [point for point in training if point[0] < begin]
            validation = {
                iteration: loss
                for iteration, loss in validation.items()
                if iteration < begin
            }
            last = begin - 1
        for line in lines[1:]:
            if line.skipped < line.iteration - last:
                training.append([line.iteration, number(line.loss)])
            elif training:
                training.append([line.iteration, training[-1][1]])
            last = line.iteration
        tried = (
            line for line in run_log.validations(attempt) if line.dataset != "test set"
        )
        validation |= {
            line.iteration: line.loss for line in tried if line.loss is not None
        }
    return {
        "training": training,
        "validation": [list(pair) for pair in validation.items()],
    }


def outcome(text: str, code: int, iterations: int) -> dict[str, Any]:
    """The content of result.json for a run that ended with this log and exit code,
    without its command.

    Raises UserError if the run failed.
    """
    found = parse_log(text)
    attempt = text[text.rindex(STARTED) :].partition("\n")[2]
    losses = [loss for _, loss in found["training"] + found["validation"]]
    # by Megatron's check
    ended = code and re.search(
        r"found (NaN|Inf) in|Unexpected result (nan|inf)", attempt
    )
    if ended or not all(map(math.isfinite, losses)):
        return found | {"diverged": True}
    if code:
        raise UserError(f"exit code {code}: {run_log.cause(attempt)}")
    if (
        not found["training"]
        or not found["validation"]
        or found["validation"][-1][0] != iterations
    ):
        raise UserError(
            "it ended, but its log holds no training loss (is --log-interval "
            "above --train-iters?) or no validation "
            "loss after the last iteration (does --split leave data for it?)"
        )
    return found | {"diverged": False}


# --- figures
# --------------------------------------------------------------------------------------


def number(loss: float | None) -> float:
    """A loss from JSON, which has no nan."""
    return math.nan if loss is None else loss


def spread(by_seed: dict[int, float]) -> dict[str, Any]:
    """{"by_seed", "mean", "sd"}: the sample standard deviation, nan of fewer than two;
    a mean of none is nan."""
    values = list(by_seed.values())
    middle = statistics.fmean(values) if values else math.nan
    some = len(values) > 1 and math.isfinite(middle)
    return {
        "by_seed": by_seed,
        "mean": middle,
        "sd": statistics.stdev(values) if some else math.nan,
    }


def percent(loss: float, reference: float) -> float:
    return 100 * (loss - reference) / reference


def summarize(
    results: Results, lr: str, variant: str, seeds: Sequence[int]
) -> dict[str, Any]:
    """The figures of a variant at a learning rate, from the seeds that have results.

    A diverged run has an infinite loss. A gap needs both runs of a seed, and a vanilla
    that has not diverged.
    """
    own = {
        seed: results[lr, variant, seed]
        for seed in seeds
        if (lr, variant, seed) in results
    }
    base = {
        seed: results[lr, "vanilla", seed]
        for seed in own
        if (lr, "vanilla", seed) in results
    }
    base = {seed: result for seed, result in base.items() if not result["diverged"]}
    final = {seed: validated(result) for seed, result in own.items()}
    gaps = {
        seed: percent(final[seed], validated(result)) for seed, result in base.items()
    }
    return {
        "lr": lr,
        "variant": variant,
        "finished": list(own),
        "diverged": [seed for seed, result in own.items() if result["diverged"]],
        "validation_loss": spread(final),
        "gap_percent": spread(gaps),
    }


def validated(result: dict[str, Any]) -> float:
    """The final validation loss; infinite if the run diverged."""
    return math.inf if result["diverged"] else result["validation"][-1][1]


def too_large(
    rows: Sequence[dict[str, Any]], limits: Mapping[str, float], seeds: int
) -> list[str]:
    """A line for each variant and rate whose mean gap is above the rate's limit, or
    unknown for some seed."""
    lines = []
    for row in rows:
        gaps, begin = row["gap_percent"], f"{row['variant']} at lr {row['lr']}: the gap"
        if row["variant"] != "vanilla" and len(gaps["by_seed"]) < seeds:
            lines.append(
                f"{begin} is known for {len(gaps['by_seed'])} of {seeds} seeds"
            )
        elif row["variant"] != "vanilla" and gaps["mean"] > limits[row["lr"]]:
            lines.append(
                f"{begin} {gaps['mean']:+.3g} % is above --max-gap {limits[row['lr']]:g}"
            )
    return lines


# --- for people
# --------------------------------------------------------------------------------------


def markdown(facts: Sequence[str], rows: Sequence[dict[str, Any]]) -> str:
    """report.md: what was run, a table for each learning rate, the picture."""
    lines = [*facts, ""]
    for lr in dict.fromkeys(row["lr"] for row in rows):
        lines += [f"## Learning rate {lr}", "", *HEAD]
        lines += [_row(row) for row in rows if row["lr"] == lr] + [""]
    picture = ["![training and validation losses](curves.png)", ""] if rows else []
    return "\n".join([*lines, *picture, *EXPLANATION]) + "\n"


HEAD = ("| variant | final validation loss | gap, % |", "| --- | ---: | ---: |")
EXPLANATION = """\
Means over the seeds ± sample standard deviation. Gap: validation loss above vanilla's of the same seed, that is with
the same initial weights, batches and validation samples.""".splitlines()


def _row(row: dict[str, Any]) -> str:
    gap = "" if row["variant"] == "vanilla" else shown(row["gap_percent"], "{:+.2f}")
    return f"| {row['variant']} | {shown(row['validation_loss'], '{:.4f}')} | {gap} |"


def shown(figure: dict[str, Any], form: str) -> str:
    """A mean, with the standard deviation if there is one."""
    if not math.isfinite(figure["mean"]):
        return "–" if math.isnan(figure["mean"]) else "diverged"
    deviation = (
        ""
        if math.isnan(figure["sd"])
        else f" ± {form.replace('+', '').format(figure['sd'])}"
    )
    return form.format(figure["mean"]) + deviation
