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
from pathlib import Path

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
                    passes += 1
                    wrong += action.version != max(action.microbatch // m - 1, 0)
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
    wrong = []
    for point in found:
        if not agrees(point.paper, point.alone):
            share = point.alone / point.paper
            model = point.panel.split()[0]
            wrong.append(f"{model} {point.x}: {share:.2f} of the paper's")
    right = f"{len(found) - len(wrong)} of {len(found)}"
    return "; ".join([right, *wrong]), not wrong


def ticked(found: list[Point]) -> Judged:
    fastest = {}
    for point in found:
        first = fastest.setdefault(point.figure, point)
        if point.alone > first.alone:
            fastest[point.figure] = point
    same = 0
    for point in fastest.values():
        same += point.ticked
    return f"{same} of {len(fastest)}", same == len(fastest)


def chosen(reading: Reading) -> Judged:
    """The planner's own choice in the paper's space, for each group of rows."""
    texts = []
    same = 0
    for run in grid(panels("table1"), reading=reading):
        if run.panel.ticked:
            own = best(run.cost, SPACE)
            same += (own.width, own.depth) == (run.plan.width, run.plan.depth)
            kept = best(run.cost, replace(SPACE, depth=(run.plan.depth,)))
            share = throughput(run.cost, kept) / throughput(run.cost, own)
            sizes = f"({own.width}, {own.depth}) b {own.microbatch}"
            texts.append(f"{run.panel.model} {sizes}, the ticked sizes {share:.2f}")
    return f"{same} of {len(texts)}: {'; '.join(texts)}", same == len(texts)


def whole_models(reading: Reading) -> Judged:
    plans = {
        "data parallelism": Plan(1, 1, 8, 1, 1, "full", "megatron"),
        "PipeDream": Plan(1, 8, 1, 1, 1, "full", "pipedream"),
    }
    texts = []
    none_fits = True
    for way, plan in plans.items():
        fitting = []
        for name in ("gpt-1.3b", "gpt-2.2b", "gpt-3.8b"):
            if cost_of(name, 1, reading).fits(plan):
                fitting.append(name)
                none_fits = False
        texts.append(f"{way}: {', '.join(fitting) or 'none'} fits")
    return "; ".join(texts), none_fits


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
    for name, servers, batch in (
        ("gpt-2.2b", 1, 64),
        ("gpt-2.2b", 8, 2048),
        ("gpt-3.8b", 8, 2048),
    ):
        cost = cost_of(name, servers, reading)
        space = replace(SPACE, batch=batch, virtual=None, extra_warmup=reading.ahead)
        speeds = {}
        schedules = ("2bw", "pipedream-flush", "megatron")
        for schedule in schedules:
            plan = best(cost, replace(space, schedules=(schedule,)))
            if plan:
                speeds[plan.schedule_name] = throughput(cost, plan)
        space = replace(space, schedules=schedules)
        advised = advice.ranked(Search(cost, space), 1)[0][0].schedule_name
        shown = ", ".join(f"{way} {speed:.1f}" for way, speed in speeds.items())
        texts.append(f"{name} at {batch}: {shown} samples/s, advised is {advised}")
        holds &= max(speeds, key=speeds.get).startswith("2bw")
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


def judge_runs(
    spec: Row,
    row: Claim,
    runs: Mapping[str, Sequence[float]],
    unit: str,
) -> None:
    """Fills the row with mean and interval of 95 % of each label's values. That of 2bw
    decides."""
    notes = []
    for label, values in runs.items():
        mean = statistics.fmean(values)
        half = T95[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
        text = f"{mean:+.2f} ± {half:.2f}"
        if label == "2bw":
            row.here = f"{text} {unit}"
            row.holds = _holds(spec, mean, half)
        else:
            notes.append(f"{label}: {text}")
    row.notes += [f"{len(values)} seeds", *notes]


def _holds(spec: Row, mean: float, half: float) -> bool | None:
    """Whether the interval lies below spec["most"] and the tolerance, or above
    spec["least"]; None if it has values on both sides."""
    side, bound = (1, spec["most"]) if "most" in spec else (-1, spec["least"])
    beyond = side * (mean - bound) - PAPER["tolerance"] * abs(bound)
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
    content = json.loads((ROOT / PAPER["convergence"][spec["task"]]).read_text())
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
    table2 = json.loads((ROOT / "docs" / "table2.json").read_text())["rows"]
    accuracies = {}
    for entry in table2:
        if entry["task"] == spec["task"]:
            accuracies[entry["label"]] = entry["runs"].values()
    vanilla = accuracies.pop("vanilla")
    gains = {}
    for label, values in accuracies.items():
        pairs = zip(values, vanilla, strict=True)
        gains[label] = [value - other for value, other in pairs]
    judge_runs(spec, row, gains, f"points in `{spec['task']}`")
