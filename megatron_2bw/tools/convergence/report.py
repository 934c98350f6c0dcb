"""The results of megatron-2bw convergence: curves from logs, gaps, the table and the
text.

Invariant: pure functions of logs and results. With a loss that is not finite a run has
diverged, and has no figures.

final validation loss   after the last iteration
gap                     that loss above vanilla's with the same seed, in percent of
                        vanilla's
"""

import itertools
import math
import operator
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_2bw.base import run_log
from megatron_2bw.base.errors import UserError

# begins the line before each attempt's output in train.log
STARTED = "convergence.py: started"

Points = list[list[float]]  # [iteration, loss]
Result = dict[str, Any]  # what result.json holds
Figures = dict[str, Any]  # of several results
# of (lr, variant, seed)
Results = Mapping[tuple[str, str, int], Result]


def parse_log(text: str) -> Result:
    """{"training": Points, "validation": Points} of a run's attempts.

    A training loss is the mean of the iterations since the point before. The next
    line's mean includes an attempt's first line. An attempt's losses replace those of
    the attempt before. A line without a loss gives nan. Where all steps since the line
    before were skipped, the loss stays what it was, as the weights do.
    """
    training = []
    validation = {}
    for attempt in text.split(STARTED):
        lines = list(run_log.training(attempt))
        if lines:
            begin = lines[0].iteration
            last = begin - 1
            training = [point for point in training if point[0] < begin]
            earlier = validation.items()
            validation = {end: loss for end, loss in earlier if end < begin}
        for line in lines[1:]:
            if line.skipped < line.iteration - last:
                training.append([line.iteration, number(line.loss)])
            elif training:
                training.append([line.iteration, training[-1][1]])
            last = line.iteration
        for line in run_log.validations(attempt):
            if line.dataset != "test set" and line.loss is not None:
                validation[line.iteration] = line.loss
    return {"training": training, "validation": list(map(list, validation.items()))}


def outcome(text: str, code: int, iterations: int) -> Result:
    """The content of result.json for a run that ended with this log and exit code,
    without its command.

    Raises UserError if the run failed.
    """
    losses = parse_log(text)
    attempt = text[text.rindex(STARTED) :].partition("\n")[2]
    # by Megatron's check
    ended = code and re.search(
        r"found (NaN|Inf) in|Unexpected result (nan|inf)", attempt
    )
    points = losses["training"] + losses["validation"]
    if ended or not all(math.isfinite(loss) for _, loss in points):
        return losses | {"diverged": True}
    if code:
        raise UserError(f"exit code {code}: {run_log.cause(attempt)}")
    ends = [end for end, _ in losses["validation"]]
    if not losses["training"] or ends[-1:] != [iterations]:
        raise UserError(
            "it ended, but its log holds no training loss (is --log-interval "
            "above --train-iters?) or no validation "
            "loss after the last iteration (does --split leave data for it?)"
        )
    return losses | {"diverged": False}


# --- figures
# --------------------------------------------------------------------------------------


def number(loss: float | None) -> float:
    """A loss from JSON, which has no nan."""
    return math.nan if loss is None else loss


def spread(by_seed: dict[int, float]) -> Figures:
    """{"by_seed", "mean", "sd"}: the sample standard deviation, nan of fewer than two;
    a mean of none is nan."""
    values = list(by_seed.values())
    mean = statistics.fmean(values) if values else math.nan
    sd = math.nan
    if len(values) > 1 and math.isfinite(mean):
        sd = statistics.stdev(values)
    return {"by_seed": by_seed, "mean": mean, "sd": sd}


def percent(loss: float, reference: float) -> float:
    return 100 * (loss - reference) / reference


def summarize(results: Results, lr: str, variant: str, seeds: Sequence[int]) -> Figures:
    """The figures of a variant at a learning rate, from the seeds that have results.

    A diverged run has an infinite loss. A gap needs both runs of a seed, and a vanilla
    that has not diverged.
    """
    final = {}
    diverged = []
    gaps = {}
    for seed in seeds:
        result = results.get((lr, variant, seed))
        vanilla = results.get((lr, "vanilla", seed))
        if result is None:
            continue
        final[seed] = validated(result)
        if result["diverged"]:
            diverged.append(seed)
        if vanilla is not None and not vanilla["diverged"]:
            gaps[seed] = percent(final[seed], validated(vanilla))
    return {
        "lr": lr,
        "variant": variant,
        "finished": list(final),
        "diverged": diverged,
        "validation_loss": spread(final),
        "gap_percent": spread(gaps),
    }


def validated(result: Result) -> float:
    """The final validation loss; infinite if the run diverged."""
    return math.inf if result["diverged"] else result["validation"][-1][1]


def too_large(rows: Sequence[Figures], limit: float, seeds: int) -> list[str]:
    """A line for each variant and rate whose mean gap is above the limit, or unknown
    for some seed."""
    lines = []
    for row in rows:
        if row["variant"] == "vanilla":
            continue
        gap = row["gap_percent"]
        begin = f"{row['variant']} at lr {row['lr']}: the gap"
        if len(gap["by_seed"]) < seeds:
            lines.append(f"{begin} is known for {len(gap['by_seed'])} of {seeds} seeds")
        elif gap["mean"] > limit:
            lines.append(f"{begin} {gap['mean']:+.3g} % is above --max-gap {limit:g}")
    return lines


# --- for people
# --------------------------------------------------------------------------------------


def markdown(facts: Sequence[str], rows: Sequence[Figures]) -> str:
    """report.md: what was run, a table for each learning rate, the picture."""
    lines = [*facts, ""]
    for lr, own in itertools.groupby(rows, operator.itemgetter("lr")):
        lines += [f"## Learning rate {lr}", "", *HEAD, *map(_row, own), ""]
    if rows:
        lines += ["![training and validation losses](curves.png)", ""]
    return "\n".join([*lines, *EXPLANATION]) + "\n"


HEAD = ("| variant | final validation loss | gap, % |", "| --- | ---: | ---: |")
EXPLANATION = """\
Means over the seeds ± sample standard deviation. Gap: validation loss above vanilla's of the same seed, that is with
the same initial weights, batches and validation samples.""".splitlines()


def _row(row: Figures) -> str:
    loss = shown(row["validation_loss"], ".4f")
    gap = "" if row["variant"] == "vanilla" else shown(row["gap_percent"], "+.2f")
    return f"| {row['variant']} | {loss} | {gap} |"


def shown(figure: Figures, form: str) -> str:
    """A mean, with the standard deviation if there is one."""
    mean = figure["mean"]
    if math.isnan(mean):
        return "–"
    if math.isinf(mean):
        return "diverged"
    if math.isnan(figure["sd"]):
        return format(mean, form)
    return f"{mean:{form}} ± {figure['sd']:{form.lstrip('+')}}"
