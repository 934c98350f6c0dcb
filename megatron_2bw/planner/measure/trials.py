"""Plans that were run beside what was predicted of them: reading a run's log, the table, the order, a picture.

Invariant: a trial holds measured figures only if its run came to its end. Pure Python; `draw` alone uses matplotlib.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_2bw.planner.cost.memory import GIB
from megatron_2bw.planner.describe.plan import Plan

OK, OUT_OF_MEMORY, FAILED, TIMEOUT, REFUSED = "ok", "out of memory", "failed", "timeout", "refused"
LEAST = 4  # iterations, so that one is left: see `steady_seconds`


@dataclass(frozen=True)
class Trial:
    """A plan, predicted and run.

    flags             Megatron's and this project's, of plan and model
    predicted         seconds an iteration
    measured          median of `steady`; None if it did not run to its end
    steady            seconds of the iterations that count
    predicted_memory  bytes of each stage
    measured_memory   the same, measured; () where the log has none. On the CPU that is the process's resident memory,
                      libraries included, so it does not compare
    status            OK, OUT_OF_MEMORY, FAILED, TIMEOUT, or REFUSED: not started, for it cannot run here
    error             one line, if it is not OK
    took              seconds of the run, start and end included
    others            share of the cores' time that other processes took meanwhile; None where the ranks use GPUs
    log               the file with all that it printed
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
        """Predicted over measured: below 1 the plan was slower than predicted."""
        return self.predicted / self.measured if self.measured else None

    def entries(self) -> dict[str, Any]:
        """What a line of trials.jsonl holds."""
        return asdict(self) | {"name": label(self.plan), "ratio": self.ratio}


def label(plan: Plan) -> str:
    """The plan's name with what else the planner chose, so that no two plans of a search share it."""
    words = [plan.name, f"m{plan.microbatches}"]
    if plan.recompute != "none":
        words.append(f"{plan.recompute} recompute")
    if plan.first or plan.last:
        words.append(f"layers {plan.first}..{plan.last}")
    words += [
        word
        for word, given in (
            ("sequence-parallel", plan.sequence_parallel),
            ("distributed optimizer", plan.distributed_optimizer),
            ("tp-pp-dp", plan.pipeline_inside),
        )
        if given
    ]
    return " ".join(words)


# --- a run's log -----------------------------------------------------------------------------------------------------


def iteration_seconds(log: str) -> dict[int, float]:
    """Seconds by iteration, as Megatron logs them with --log-interval 1."""
    lines = re.findall(r"\biteration +(\d+)/ *\d+ \|[^\n]*?elapsed time per iteration \(ms\): ([\d.]+) \|", log)
    return {int(iteration): float(milliseconds) / 1e3 for iteration, milliseconds in lines}


def steady_seconds(log: str, iterations: int, flushes: bool) -> tuple[float, ...]:
    """Those of the iterations between filling and draining; () if the log ends before the last one.

    The first line holds the loading of code, the second is Megatron's mean of both, and in the third a late step is
    made for the first time. A pipeline that never flushes empties in its last iteration.
    """
    seconds = iteration_seconds(log)
    if set(seconds) != set(range(1, iterations + 1)):
        return ()
    first = 4 if iterations > 6 else 3
    last = iterations if flushes or iterations == first else iterations - 1
    return tuple(seconds[iteration] for iteration in range(first, last + 1))


def stage_memory(log: str, plan: Plan) -> tuple[float, ...]:
    """Peak bytes of each stage (of its heaviest rank), or () if the log does not have them all.

    This project's schedules put them into each log line, rounded to 0.01 GiB; under Megatron's own the first rank of
    each data-parallel group tells them after the second iteration.
    """
    ours = re.findall(r"peak memory by stage \(GiB\): ([\d. ]+?) \|", log)
    if ours:
        stages = tuple(float(word) * GIB for word in ours[-1].split())
        return stages if len(stages) == plan.depth else ()
    found: dict[int, float] = {}
    line = r"\[Rank (\d+)\] \(after \d+ iterations\) memory \(MB\) \|[^\n]*?max allocated: ([\d.]+)"
    for rank, mebibytes in re.findall(line, log):
        below = int(rank) // plan.tensor
        stage = below % plan.depth if plan.pipeline_inside else below // plan.width
        found[stage] = max(found.get(stage, 0.0), float(mebibytes) * 2**20)
    return tuple(found[stage] for stage in range(plan.depth)) if set(found) == set(range(plan.depth)) else ()


def failure(log: str) -> tuple[str, str]:
    """(status, one line) of a run that did not come to its end."""
    lines = [re.sub(r"^\[rank\d+\]: *", "", line).strip() for line in log.splitlines()]
    lines = [line for line in lines if line]
    # The error that is printed first is the cause: the other ranks' are of the connections that it closed.
    errors = [line for line in lines if re.match(r"([\w.]+: error|[\w.]*(Error|Exception)): \S", line)]
    full = [line for line in lines if re.search(r"OutOfMemoryError|out of memory|can't allocate memory", line)]
    if full:
        return OUT_OF_MEMORY, full[0]
    killed = [line for line in lines if re.search(r"Signal \d+ \(SIG\w+\) received by", line)]
    return FAILED, (errors or killed or lines[-1:] or ["no output"])[0]


# --- all trials ------------------------------------------------------------------------------------------------------


def spearman(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Rank correlation, 1 for the same order and -1 for the reverse; None where all of one side are equal."""
    ranks = [[(sum(y < x for y in side) + sum(y <= x for y in side) - 1) / 2 for x in side] for side in (left, right)]
    if any(len(set(side)) < 2 for side in ranks):
        return None
    return statistics.correlation(*ranks)


def _pairs(trials: Sequence[Trial]) -> list[tuple[float, float]]:
    """(predicted, measured) seconds a sample, for plans of a search may differ in their global batch."""
    done = [trial for trial in trials if trial.measured]
    return [(trial.predicted / trial.plan.global_batch, trial.measured / trial.plan.global_batch) for trial in done]


def rank_correlation(trials: Sequence[Trial]) -> float | None:
    """`spearman` of predicted and measured seconds a sample; None for fewer than three trials."""
    pairs = _pairs(trials)
    return spearman(*zip(*pairs)) if len(pairs) >= 3 else None


def order(trials: Sequence[Trial]) -> str:
    """One line: whether the plans came in the predicted order."""
    pairs = _pairs(trials)
    if len(pairs) < 2:
        return "order: it takes two plans that ran"
    by_prediction = sorted(pairs)
    right = all(before[1] <= after[1] for before, after in zip(by_prediction, by_prediction[1:]))
    text = "order: as predicted" if right else "order: not as predicted"
    best = min(pairs, key=lambda pair: pair[1])
    if not right:
        text += f", the fastest was predicted {'fastest' if best[0] == by_prediction[0][0] else 'slower'}"
    correlation = rank_correlation(trials)
    return text if correlation is None else f"{text} (Spearman {correlation:.2f} of {len(pairs)} plans)"


def table(trials: Sequence[Trial], memory: bool) -> str:
    """Aligned lines: predicted, measured, their ratio, samples a second; with `memory` that of the heaviest stage."""
    heads = ["plan", "predicted ms", "measured ms", "ratio", "samples/s", *["GiB predicted", "measured"] * memory, ""]
    rows = [heads]
    for trial in trials:
        row = [label(trial.plan), f"{1e3 * trial.predicted:.1f}", "", "", ""]
        if trial.measured:
            row[2:] = [
                f"{1e3 * trial.measured:.1f}",
                f"{trial.ratio:.2f}",
                f"{trial.plan.global_batch / trial.measured:.1f}",
            ]
        if memory:
            both = (trial.predicted_memory, trial.measured_memory)
            row += [f"{max(stages) / GIB:.2f}" if stages else "" for stages in both]
        rows.append([*row, trial.status if trial.status != OK else ""])
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *(word.rjust(width) for word, width in zip(row[1:-1], widths[1:-1])), row[-1]]
        ).rstrip()
        for row in rows
    )


def draw(trials: Sequence[Trial], path: Path) -> None:
    """Predicted and measured milliseconds an iteration, two bars a plan."""
    from matplotlib.figure import Figure

    done = [trial for trial in trials if trial.measured]
    figure = Figure(figsize=(max(5.0, 1.5 + 1.3 * len(done)), 4.2), layout="constrained")
    axis = figure.subplots()
    for name, shift, heights, color in (
        ("predicted", -0.2, [trial.predicted for trial in done], "#8fb3d9"),
        ("measured", 0.2, [trial.measured for trial in done], "#1f5fa8"),
    ):
        bars = axis.bar(
            [place + shift for place in range(len(done))],
            [1e3 * height for height in heights],
            0.38,
            label=name,
            color=color,
        )
        axis.bar_label(bars, fmt="%.3g", fontsize=8)
    names = [label(trial.plan).replace(" ", "\n", 1) + f"\nbatch {trial.plan.global_batch}" for trial in done]
    axis.set_xticks(range(len(done)), names, fontsize=8)
    axis.set_ylabel("milliseconds an iteration")
    axis.margins(y=0.25)
    axis.legend(frameon=False, ncols=2)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png", dpi=150)
