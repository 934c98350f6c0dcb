"""The claims of the paper that are no ratio of a figure's bars.

Those with an id in paper.yaml are functions of that name: (what is found, whether it
holds). A claim about schedules is checked on the lists that the runtime executes, and
needs no argument. The others have as arguments what they need: `found`, a figure's
points, or `reading`. Measured claims fill their row.
"""

import itertools
import json
import math
import shlex
import statistics
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from bench.planner_checks import PAPER as SPACE
from bench.planner_checks import best, throughput
from megatron_2bw.base.errors import UserError
from megatron_2bw.run.start.torchrun import ROOT
from megatron_2bw.schedules import SCHEDULES, STEP, B, F, Shape
from megatron_2bw.tools.planner.cost.communication import layout
from megatron_2bw.tools.planner.cost.memory import GIB
from megatron_2bw.tools.planner.descriptions import cluster as clusters
from megatron_2bw.tools.planner.descriptions.plan import Plan
from megatron_2bw.tools.planner.find import advice
from megatron_2bw.tools.planner.find.search import Search
from megatron_2bw.tools.timelines.simulator import iteration_time
from scripts.paper_data import PAPER, Reading, Row, cost_of, grid, panels
from scripts.paper_figures import Claim, Point, agrees

Judged = tuple[str, bool]


# --- schedules
# --------------------------------------------------------------------------------------


def flush_cost() -> Judged:
    shares = []
    for d in (4, 8, 64):
        flushed = iteration_time(SCHEDULES["gpipe"], d, d)
        shares.append(flushed / iteration_time(SCHEDULES["2bw"], d, d))
    text = ", ".join(map("{:.2f}".format, shares))
    return f"{text} at d = m = 4, 8, 64", agrees(2, max(shares))


def most_held(name: str, shape: Shape) -> Counter[str]:
    """The most stashes (microbatches between forward and backward) and weight versions
    that a stage of the schedule's lists has: versions are those of these microbatches
    and the newest."""
    most = Counter()
    for stage in range(shape.stages):
        live = {}
        steps = 0
        for iteration in range(shape.end):
            for action in SCHEDULES[name].actions(shape, stage, iteration):
                if action.kind == F:
                    live[action.microbatch] = action.version
                elif action.kind == B:
                    del live[action.microbatch]
                elif action.kind == STEP:
                    steps += 1
                versions = {*live.values(), steps}
                most |= Counter(stashes=len(live), versions=len(versions))
    return most


def judge_held(spec: Row, row: Claim) -> None:
    """Fills the row: the most versions, or stashes, of a schedule in each shape."""
    held = spec["held"]
    most = []
    for sizes in held["shapes"]:
        counts = most_held(held["schedule"], Shape(*sizes))
        most.append(counts[held["of"]])
    row.predicted = f"{most} at {held['at']}"
    row.holds = most == held["most"]


def flush_stashes() -> Judged:
    shape = Shape(8, 32, 0, 2)
    flush = most_held("pipedream-flush", shape)["stashes"]
    gpipe = most_held("gpipe", shape)["stashes"]
    return f"{flush} against {gpipe} at d = 8, m = 32", (flush, gpipe) == (8, 32)


def version_formula() -> Judged:
    wrong = passes = 0
    for d, m in ((4, 4), (2, 3), (8, 24)):
        shape = Shape(d, m, 0, 5)
        for stage, iteration in itertools.product(range(d), range(5)):
            for action in SCHEDULES["2bw"].actions(shape, stage, iteration):
                if action.kind in (F, B):
                    batch = action.microbatch // m
                    passes += 1
                    wrong += action.version != max(batch - 1, 0)
    return f"{wrong} of {passes} passes differ", not wrong


def placement() -> Judged:
    order = layout(1, 4, 2, False, 4)  # Megatron's
    between = sum(map(bool, order.boundaries[:3]))
    servers = order.data.servers
    text = f"replicas on {servers}, {between} of 3 boundaries between servers"
    return text, servers == 1


# --- the cost model
# --------------------------------------------------------------------------------------


def recompute_larger(found: list[Point]) -> Judged:
    largest = defaultdict(int)
    for point in found:
        if point.predicted != "OOM":
            way = f"{point.figure} {point.series.split()[-1]}"
            largest[way] = max(largest[way], point.x)
    none_a = largest["10a none"]
    full_a = largest["10a full"]
    none_b = largest["10b none"]
    full_b = largest["10b full"]
    larger = full_a > none_a and full_b > none_b
    holds = larger and full_b * none_a > full_a * none_b
    return f"10a {none_a} to {full_a}, 10b {none_b} to {full_b}", holds


def deeper_larger(found: list[Point]) -> Judged:
    sizes = [point.predicted for point in found if point.series == "2 gradient slots"]
    text = ", ".join(map("{:.1f}".format, sizes))
    return f"{text} billion at d = 4 ... 64", sizes == sorted(set(sizes))


def largest(found: list[Point]) -> Judged:
    deepest = max(PAPER["figures"]["11"]["depths"])
    one, two = [point.predicted for point in found if point.x == deepest]
    text = f"{one:.1f} billion with one gradient slot, {two:.1f} with two"
    return text, agrees(30, one) or agrees(30, two)


def table_values(found: list[Point]) -> Judged:
    texts = [""]
    right = 0
    for point in found:
        if agrees(point.paper, point.alone):
            right += 1
            continue
        share = point.alone / point.paper
        model = point.panel.split()[0]
        texts.append(f"{model} {point.x}: {share:.2f} of the paper's")
    texts[0] = f"{right} of {len(found)}"
    return "; ".join(texts), right == len(found)


def ticked(found: list[Point]) -> Judged:
    fastest = {}
    for point in sorted(found, key=attrgetter("alone")):
        fastest[point.figure] = point.ticked
    same = sum(fastest.values())
    count = len(fastest)
    return f"{same} of {count}", same == count


def chosen(reading: Reading) -> Judged:
    """The planner's own choice in the paper's space, for each group of rows."""
    texts = []
    same = 0
    for run in grid(panels("table1"), reading=reading):
        if not run.panel.ticked:
            continue
        cost = run.cost
        depth = run.plan.depth
        own = best(cost, SPACE)
        same += own.depth == depth and own.width == run.plan.width
        kept = best(cost, replace(SPACE, depth=(depth,)))
        share = throughput(cost, kept) / throughput(cost, own)
        sizes = f"({own.width}, {own.depth}) b {own.microbatch}"
        texts.append(f"{run.panel.model} {sizes}, the ticked sizes {share:.2f}")
    count = len(texts)
    listed = "; ".join(texts)
    return f"{same} of {count}: {listed}", same == count


def whole_models(reading: Reading) -> Judged:
    data = []
    pipedream = []
    for name in ("gpt-1.3b", "gpt-2.2b", "gpt-3.8b"):
        cost = cost_of(name, 1, reading)
        if cost.fits(Plan(1, 1, 8, 1, 1, "full", "megatron")):
            data.append(name)
        if cost.fits(Plan(1, 8, 1, 1, 1, "full", "pipedream")):
            pipedream.append(name)
    texts = []
    for way, fitting in (("data parallelism", data), ("PipeDream", pipedream)):
        names = ", ".join(fitting) or "none"
        texts.append(f"{way}: {names} fits")
    return "; ".join(texts), not data + pipedream


def megatron_8b(reading: Reading) -> Judged:
    cost = cost_of("gpt-8.3b", clusters.preset("p3dn.24xlarge", 1), reading)
    plan = Plan(8, 1, 1, 1, 8, "full", "megatron")
    gib = cost.memory.heaviest(plan) / GIB
    return f"{gib:.1f} GiB of {cost.allowed(plan) / GIB:.1f}", cost.fits(plan)


def planned_depths(reading: Reading) -> Judged:
    small = cost_of("gpt-2.2b", 8, reading)
    large = cost_of("gpt-3.8b", 8, reading)
    texts = []
    for batch in (512, 1024, 2048):
        space = replace(SPACE, batch=batch, extra_warmup=reading.ahead)
        texts.append(f"{best(small, space).depth}, {best(large, space).depth}")
    return f"{'; '.join(texts)} at batch 512; 1024; 2048", set(texts) == {"8, 16"}


def fastest(reading: Reading) -> Judged:
    """The fastest of all schedules by the planner: in the paper's space with Megatron's
    interleaved stages too."""
    texts = []
    holds = True
    every = ("2bw", "pipedream-flush", "megatron")
    for name, servers, batch in (
        ("gpt-2.2b", 1, 64),
        ("gpt-2.2b", 8, 2048),
        ("gpt-3.8b", 8, 2048),
    ):
        cost = cost_of(name, servers, reading)
        space = replace(SPACE, batch=batch, virtual=None, extra_warmup=reading.ahead)
        speeds = {}
        shown = []
        for schedule in every:
            plan = best(cost, replace(space, schedules=(schedule,)))
            if plan:
                speed = throughput(cost, plan)
                speeds[plan.schedule_name] = speed
                shown.append(f"{plan.schedule_name} {speed:.1f}")
        space = replace(space, schedules=every)
        (first, *_), *_ = advice.ranked(Search(cost, space), 1)
        listed = ", ".join(shown)
        advised = f"advised is {first.schedule_name}"
        texts.append(f"{name} at {batch}: {listed} samples/s, {advised}")
        fastest = max(speeds, key=speeds.get)
        holds &= fastest.startswith("2bw")
    return "; ".join(texts), holds


# --- measurements: benchmarks of this machine, and the recorded runs of docs/
# --------------------------------------------------------------------------------------

# of Student's distribution, for so many values
T95 = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776}


@cache
def measured_rows(name: str, out: Path, fresh: bool) -> list[Row]:
    """The rows of a benchmark of paper.yaml; `fresh` ones are of a run now."""
    rows = []
    for part in PAPER["measured"][name]["parts"]:
        path = ROOT / part["recorded"]
        if fresh and "command" in part:
            path = out / "measured" / path.name
            words = shlex.split(part["command"])
            print(f"paper.py: python {part['command']}", flush=True)
            command = [sys.executable, *words, "--json", str(path)]
            if subprocess.run(command, cwd=ROOT, check=False).returncode:
                raise UserError(
                    f"{words[0]} failed, see above; --skip-measurements takes recorded results"
                )
        rows += json.loads(path.read_text())["rows"]
    return rows


def measured_value(spec: Row, rows: Sequence[Row]) -> float:
    """The value that a claim takes from the rows: of one row, or the ratio of a
    pair."""
    values = []
    for wanted in spec.get("ratio") or [spec["row"]]:
        row = next(row for row in rows if wanted.items() <= row.items())
        values.append(row[spec["of"]])
    return values[0] / values[1] if "ratio" in spec else values[0]


def recorded(name: str) -> Row:
    return json.loads((ROOT / name).read_text())


def judge_runs(
    spec: Row,
    row: Claim,
    runs: Mapping[str, Any],
    unit: str,
) -> None:
    """Fills the row with mean and interval of 95 % of each label's values. That of 2bw
    decides."""
    notes = []
    for label, values in runs.items():
        count = len(values)
        mean = statistics.fmean(values)
        error = statistics.stdev(values) / math.sqrt(count)
        half = T95[count] * error
        text = f"{mean:+.2f} ± {half:.2f}"
        if label == "2bw":
            row.here = f"{text} {unit}"
            row.holds = _holds(spec, mean, half)
        else:
            notes.append(f"{label}: {text}")
    row.notes += [f"{count} seeds", *notes]


def _holds(spec: Row, mean: float, half: float) -> bool | None:
    """Whether the interval lies below spec["most"] and the tolerance, or above
    spec["least"]; None if it has values on both sides."""
    if "most" in spec:
        bound = spec["most"]
        beyond = mean - bound
    else:
        bound = spec["least"]
        beyond = bound - mean
    beyond -= PAPER["tolerance"] * abs(bound)
    return None if abs(beyond) < half else beyond <= 0


def judge_losses(spec: Row, row: Claim, collected: Mapping[str, Row]) -> None:
    """Figure 5, in the paper's statistic: the gap in perplexity, and the iterations
    that it stands for; by the recorded runs (docs/convergence.md)."""
    real = {}
    for entry in collected.values():
        real[entry["figure"], entry["schedule"]] = entry["validation_loss"]
    two = real.get((spec["two_bw"], "2bw"))
    one = real.get((spec["vanilla"], "pipedream-flush"))
    if one and two:
        row.on_cluster = f"{100 * (math.exp(two - one) - 1):+.2f} % perplexity"
    content = recorded(PAPER["convergence"][spec["task"]])
    variants = {entry["variant"]: entry for entry in content["summary"]}
    vanilla = variants.pop("vanilla")["validation_loss"]["by_seed"]
    unit = "% perplexity"
    runs = {}
    for variant, entry in variants.items():
        runs[variant] = []
        for seed, loss in entry["validation_loss"]["by_seed"].items():
            # of the recorded runs; megatron-2bw convergence has no lag now
            if spec["id"] == "lag":
                unit = "% of the iterations"
                lag = entry["lag_iterations"]["by_seed"][seed]
                runs[variant].append(100 * lag / content["iterations"])
            else:
                runs[variant].append(100 * math.expm1(loss - vanilla[seed]))
    judge_runs(spec, row, runs, unit)
    rate = content["learning_rates"][0]
    row.notes.append(f"a small model, {content['iterations']} iterations at {rate}")


def judge_accuracy(spec: Row, row: Claim) -> None:
    """Table 2 in small: points of accuracy above vanilla's, of the same pretraining and
    finetuning seeds."""
    task = spec["task"]
    accuracies = {}
    for entry in recorded("docs/table2.json")["rows"]:
        if entry["task"] == task:
            accuracies[entry["label"]] = np.array([*entry["runs"].values()])
    vanilla = accuracies.pop("vanilla")
    gains = {}
    for label, values in accuracies.items():
        gains[label] = values - vanilla
    judge_runs(spec, row, gains, f"points in `{task}`")
