"""Measured plans next to their predictions: reading a run's log, the table, the order, a picture.

Invariant: a trial holds measured figures only if its run completed. Pure Python; only `draw` imports matplotlib.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_2bw import run_log
from megatron_2bw.files import new_figure, write_figure
from megatron_2bw.models.plan import Plan
from megatron_2bw.planner.cost.memory import GIB
from megatron_2bw.planner.tell.explain import aligned

OK, OUT_OF_MEMORY, FAILED, TIMEOUT, REFUSED = "ok", "out of memory", "failed", "timeout", "refused"
MIN_ITERATIONS = 4  # of which `steady_seconds` keeps one


@dataclass(frozen=True)
class Trial:
    """A plan with its prediction and its measurement.

    flags             Megatron's and this project's, of plan and model
    predicted         seconds per iteration
    measured          median of `steady`; None if the run did not complete
    steady            seconds of the iterations in the steady state
    predicted_memory  bytes of each stage
    measured_memory   the same, measured; () if the log has none. On the CPU this is the process's resident memory with
                      all libraries, so it is not comparable
    status            OK, OUT_OF_MEMORY, FAILED, TIMEOUT, or REFUSED: not started, because it cannot run here
    error             one line, if the status is not OK
    took              seconds of the whole run
    others            share of the cores' time that other processes used during the run; None if the ranks use GPUs
    log               the file with the run's output
    """

    plan: Plan
    flags: tuple[str, ...]
    predicted: float
    predicted_memory: tuple[float, ...]
    measured: float | None = None
    steady: tuple[float, ...] = ()
    measured_memory: tuple[float, ...] = ()
    status: str = OK
    error: str = ""
    took: float = 0.0
    others: float | None = None
    log: str = ""

    @property
    def ratio(self) -> float | None:
        """Predicted over measured: below 1 if the plan was slower than predicted."""
        return self.predicted / self.measured if self.measured else None

    def entries(self) -> dict[str, Any]:
        """The content of a line of trials.jsonl."""
        return asdict(self) | {"name": label(self.plan), "ratio": self.ratio}


def label(plan: Plan) -> str:
    """The plan's name with all other choices of the planner, so that plans of a search differ in it."""
    words = (
        (plan.name, True),
        (f"m{plan.microbatches}", True),
        (f"{plan.recompute_name} recompute", plan.recompute != "none"),
        (f"layers {plan.first}..{plan.last}", plan.first or plan.last),
        ("sequence-parallel", plan.sequence_parallel),
        ("distributed optimizer", plan.distributed_optimizer),
        ("tp-pp-dp", plan.pipeline_inside),
    )
    return " ".join(word for word, given in words if given)


# --- a run's log -----------------------------------------------------------------------------------------------------


def iteration_seconds(log: str) -> dict[int, float]:
    """Seconds by iteration, from a log with --log-interval 1."""
    return {line.iteration: line.milliseconds / 1e3 for line in run_log.training(log) if line.milliseconds}


def steady_seconds(log: str, iterations: int, flushes: bool) -> tuple[float, ...]:
    """Seconds of the iterations between filling and draining; () if the log ends before the last iteration.

    The first line includes the loading of code, and the second is the mean of both (see run_log). The third includes
    the first late step. A pipeline without flushes drains in its last iteration.
    """
    seconds = iteration_seconds(log)
    if set(seconds) != set(range(1, iterations + 1)):
        return ()
    first = 4 if iterations > 6 else 3
    last = iterations if flushes or iterations == first else iterations - 1
    return tuple(seconds[iteration] for iteration in range(first, last + 1))


def stage_memory(log: str, plan: Plan) -> tuple[float, ...]:
    """Peak bytes of each stage (of its heaviest rank), or () if the log lacks a stage.

    This project's schedules print them in each line of an iteration, rounded to 0.01 GiB. With Megatron's own schedule
    the first rank of each data-parallel group prints its peak after the second iteration.
    """
    ours = [line.stage_memory for line in run_log.training(log) if line.stage_memory]
    if ours:
        return tuple(size * GIB for size in ours[-1]) if len(ours[-1]) == plan.depth else ()
    found: dict[int, float] = {}
    line = r"\[Rank (\d+)\] \(after \d+ iterations\) memory \(MB\) \|[^\n]*?max allocated: ([\d.]+)"
    for rank, mebibytes in re.findall(line, log):
        below = int(rank) // (plan.tensor * plan.context)
        stage = below % plan.depth if plan.pipeline_inside else below // plan.width
        found[stage] = max(found.get(stage, 0.0), float(mebibytes) * 2**20)
    return tuple(found[stage] for stage in range(plan.depth)) if set(found) == set(range(plan.depth)) else ()


def failure(log: str) -> tuple[str, str]:
    """(status, one line) of a run that did not complete."""
    full = re.search(r"^.*(OutOfMemoryError|out of memory|can't allocate memory).*$", log, re.MULTILINE)
    return (OUT_OF_MEMORY, run_log.cause(full[0])) if full else (FAILED, run_log.cause(log))


# --- all trials ------------------------------------------------------------------------------------------------------


def spearman(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Rank correlation: 1 for the same order, -1 for the reverse; None if all values of one side are equal."""
    if any(len(set(side)) < 2 for side in (left, right)):
        return None
    return statistics.correlation(left, right, method="ranked")


def _pairs(trials: Sequence[Trial]) -> list[tuple[float, float]]:
    """(predicted, measured) seconds per sample: the plans of a search may have different global batches."""
    done = [trial for trial in trials if trial.measured]
    return [(trial.predicted / trial.plan.global_batch, trial.measured / trial.plan.global_batch) for trial in done]


def rank_correlation(trials: Sequence[Trial]) -> float | None:
    """`spearman` of predicted and measured seconds per sample; None for fewer than three trials."""
    pairs = _pairs(trials)
    return spearman(*zip(*pairs)) if len(pairs) >= 3 else None


def order(trials: Sequence[Trial]) -> str:
    """One line: whether the measured order is the predicted order."""
    pairs = _pairs(trials)
    if len(pairs) < 2:
        return "order: unknown, fewer than two plans ran"
    text, best = "order: as predicted", min(pairs, key=lambda pair: pair[1])
    if any(before[1] > after[1] for before, after in pairwise(sorted(pairs))):
        rank = "fastest" if best[0] == min(pairs)[0] else "slower"
        text = f"order: not as predicted, the fastest was predicted {rank}"
    correlation = rank_correlation(trials)
    return text if correlation is None else f"{text} (Spearman {correlation:.2f} of {len(pairs)} plans)"


def within(trials: Sequence[Trial], error: float) -> str:
    """One line: how many measured times are within the predictions' uncertainty."""
    ratios = [trial.ratio for trial in trials if trial.ratio is not None]
    inside = sum(abs(ratio - 1) <= error for ratio in ratios)
    return f"measured within the uncertainty of {error:.0%}: {inside} of {len(ratios)} plans"


def table(trials: Sequence[Trial], memory: bool) -> str:
    """Aligned lines: predicted, measured, their ratio, samples per second; with `memory` the heaviest stage's."""
    heads = ["plan", "predicted ms", "measured ms", "ratio", "samples/s", *["GiB predicted", "measured"] * memory, ""]
    rows = [heads]
    for trial in trials:
        row = [label(trial.plan), f"{1e3 * trial.predicted:.1f}", "", "", ""]
        if trial.measured:
            rate = trial.plan.global_batch / trial.measured
            row[2:] = [f"{1e3 * trial.measured:.1f}", f"{trial.ratio:.2f}", f"{rate:.1f}"]
        if memory:
            both = (trial.predicted_memory, trial.measured_memory)
            row += [f"{max(stages) / GIB:.2f}" if stages else "" for stages in both]
        rows.append([*row, trial.status if trial.status != OK else ""])
    return "\n".join(aligned(rows, {0, len(heads) - 1}))


def draw(trials: Sequence[Trial], path: Path) -> None:
    """Draw predicted and measured milliseconds per iteration, two bars per plan."""
    done = [trial for trial in trials if trial.measured]
    figure = new_figure(max(5.0, 1.5 + 1.3 * len(done)), 4.2)
    axis = figure.subplots()
    for name, shift, color in (("predicted", -0.2, "#8fb3d9"), ("measured", 0.2, "#1f5fa8")):
        places, heights = [i + shift for i in range(len(done))], [1e3 * getattr(trial, name) for trial in done]
        bars = axis.bar(places, heights, 0.38, label=name, color=color)
        axis.bar_label(bars, fmt="%.3g", fontsize=8)
    names = [label(trial.plan).replace(" ", "\n", 1) + f"\nbatch {trial.plan.global_batch}" for trial in done]
    axis.set_xticks(range(len(done)), names, fontsize=8)
    axis.set_ylabel("milliseconds per iteration")
    axis.margins(y=0.25)
    axis.legend(frameon=False, ncols=2)
    axis.spines[["top", "right"]].set_visible(False)
    write_figure(path, figure)
