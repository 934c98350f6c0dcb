"""The rows of the paper's figures: what the planner's cost model predicts, and whether a claim of the text holds.

Invariant: a claim's number comes from the same plans as the figure's bars; what is out of memory has no speed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any

from bench import planner_checks
from megatron_2bw.models import cluster as clusters
from megatron_2bw.models import model as models
from megatron_2bw.models.plan import Plan
from megatron_2bw.planner.cost.links import layout
from megatron_2bw.planner.cost.memory import GIB
from megatron_2bw.planner.cost.simulated import Cost
from megatron_2bw.schedules import SCHEDULES, B, F, Shape
from megatron_2bw.timelines.simulator import iteration_time
from scripts.paper_data import PAPER, Panel, Run, grid

TOLERANCE = 0.15  # of a ratio, where a claim names no bar
HEADS = 32  # of Figure 11's models


@dataclass
class Point:
    """A bar, or a place on a curve: the fastest of its runs.

    figure     the panel's name in paper.yaml
    predicted  samples/s, GiB or billions of parameters; a word where nothing fits
    free       the same with the faster of both rank orders
    same       samples/s at the microbatch that is the fastest for 2BW
    gib        bytes of the heaviest stage / 2^30
    alone      samples/s whether it fits or not
    measured   on the cluster whose logs were collected: a number, or the word of the status
    """

    figure: str
    panel: str
    series: str
    x: Any
    predicted: float | str
    free: float | str = ""
    same: float | str = ""
    plan: str = ""
    gib: float = 0.0
    alone: float = 0.0
    paper: float | str = ""
    ticked: bool = False
    measured: float | str = ""


@dataclass
class Claim:
    """A row of the table of claims; `holds` is None where nothing decides it, `only` names a reading that holds."""

    says: str
    source: str
    paper: str
    predicted: str = ""
    holds: bool | None = None
    only: str = ""
    here: str = ""
    on_cluster: str = ""
    notes: list[str] = field(default_factory=list)


def points(figure: str, own: Sequence[Panel], measured: Mapping[str, Mapping[str, Any]]) -> list[Point]:
    """Of a figure with the runs of `own`. measured: the rows of sweep.py's table, by the name of the run."""
    spec, found, sizes = PAPER["figures"][figure], {}, {}
    for run in grid(own):
        row = run.row()
        x = row[spec["x"]] if spec["x"] in row else spec["x"].format(**row)
        point = _point(run, (spec["panel"].format(**row), spec["series"].format(**row), x), spec.get("y", ""))
        point.measured = _measured(measured.get(run.name, {}), spec.get("y", ""))
        key = point.panel, point.series, point.x
        found[key] = _faster(found[key], point) if key in found else point
        sizes[(*key, run.microbatch)] = point.predicted
    for (panel, series, x), point in found.items():
        if lead := found.get((panel, "PipeDream-2BW", x)):
            point.same = sizes.get((panel, series, x, int(lead.plan.rpartition("b")[2])), "")
    return list(found.values())


def _point(run: Run, place: tuple, y: str) -> Point:
    cost, plan, panel = run.cost, run.plan, run.panel
    speeds, gib = {}, cost.memory.heaviest(plan) / GIB
    for inside in (False, True):
        other = plan.changed(pipeline_inside=inside)
        speeds[inside] = other.global_batch / cost.seconds(other)
    value, free = (gib, gib) if y == "GiB" else (speeds[False], max(speeds.values()))
    if not cost.fits(plan):
        value, free = gib if y == "GiB" else "OOM", "OOM"
    paper = "" if panel.paper is None else panel.paper
    return Point(panel.figure, *place, value, free, "", plan.name, gib, speeds[False], paper, panel.ticked)


def _measured(row: Mapping[str, Any], y: str) -> float | str:
    value = row.get("peak_memory_gib" if y == "GiB" else "samples_per_second", "")
    return value or row.get("status", "")


def _faster(one: Point, other: Point) -> Point:
    """The faster point, with the faster of both measurements; a word gives way to a number."""

    first, second = (one, other) if _number(one.predicted) >= _number(other.predicted) else (other, one)
    free = max(one.free, other.free, key=_number)
    return replace(first, free=free, measured=max(first.measured, second.measured, key=_number))


# --- claims that are ratios, or whether something fits ----------------------------------------------------------------


def ratios(spec: Mapping[str, Any], found: Iterable[Point], value: str) -> dict[str, float]:
    """Panel and x -> the first series' value over the second's, where both have a number.

    An entry of `ratio` is a series, or a series and its x; with `best` each series' largest value counts.
    """
    values = {(point.figure, point.series, point.x): getattr(point, value) for point in found}
    places = dict.fromkeys((figure, x) for figure, _, x in values if x in spec.get("at", [x]))
    ends = [entry if isinstance(entry, list) else [entry, None] for entry in spec["ratio"]]
    if "best" in spec:
        tops: dict[tuple, Any] = {}
        for (figure, series, _), number in values.items():
            tops[figure, series, "best"] = max(tops.get((figure, series, "best"), 0.0), _number(number))
        values, places = tops, dict.fromkeys((figure, "best") for figure, _, _ in tops)
    ratio = {}
    for figure, x in places:
        one, two = (_number(values.get((figure, series, own or x), "")) for series, own in ends)
        if figure in spec["panels"] and one > 0 and two > 0:
            ratio[figure if "best" in spec or ends[0][1] else f"{figure} at {x}"] = one / two
    return ratio


def _number(value: float | str) -> float:
    """A word counts as less than any number."""
    return value if isinstance(value, (int, float)) else -1.0


def judge_ratio(spec: Mapping[str, Any], row: Claim, found: list[Point]) -> None:
    """Fills the row. The largest ratio decides, as `up to` does in the text; with `every`, all of them."""
    low, high = spec.get("bar") or (spec["paper"] * (1 - TOLERANCE), spec["paper"] * (1 + TOLERANCE))
    value = spec.get("of", "predicted")
    fixed, free, same, real = (ratios(spec, found, name) for name in (value, "free", "same", "measured"))
    row.notes.append(f"bar {low:.3g} to {high:.3g}")
    judged = fixed if "every" in spec else dict(sorted(fixed.items(), key=lambda pair: pair[1])[-1:])
    row.holds = bool(judged) and all(low <= ratio <= high for ratio in judged.values())
    row.predicted = ", ".join(f"{ratio:.2f} ({place})" for place, ratio in judged.items())
    row.predicted = row.predicted or "no ratio: out of memory"
    for text, other in {"the faster rank order of each system": free, "2BW's microbatch for both": same}.items():
        most = max(other.values(), default=0.0) if value == "predicted" else 0.0
        if most and f"{most:.2f}" != f"{max(fixed.values(), default=0):.2f}":
            row.notes.append(f"with {text}: {most:.2f} ({max(other, key=other.get)})")
            row.only = text if not row.holds and low <= most <= high else row.only
    if real:
        row.on_cluster = f"{max(real.values()):.2f}"


def judge_fit(spec: Mapping[str, Any], row: Claim, found: list[Point]) -> None:
    """Fills the row: whether a series fits at an x."""
    (panel,), (series, x) = spec["panels"], spec["fit"]
    point = next(point for point in found if (point.figure, point.series, point.x) == (panel, series, x))
    row.predicted = f"{point.gib:.1f} GiB, {'out of memory' if point.free == 'OOM' else 'fits'}"
    row.holds, row.on_cluster = (point.free != "OOM") is spec["fits"], str(point.measured)


# --- claims of other kinds: (what is predicted, whether it holds) -----------------------------------------------------

Judged = tuple[str, bool | None]


def _bar(figure: str, name: str) -> list[float]:
    return next(claim["bar"] for claim in PAPER["figures"][figure]["claims"] if claim["id"] == name)


def flush_cost(found: list[Point]) -> Judged:
    times = {(name, d): iteration_time(SCHEDULES[name], d, d) for name in ("gpipe", "2bw") for d in (4, 8, 64)}
    shares = [times["gpipe", d] / times["2bw", d] for d in (4, 8, 64)]
    return ", ".join(f"{share:.2f}" for share in shares) + " at d = m = 4, 8, 64", max(shares) <= 2


def _most(name: str, limit: str, depth: int, microbatches: int) -> int:
    """The largest over the stages of a schedule's limit."""
    shape = Shape(depth, microbatches)
    return max(getattr(SCHEDULES[name], limit)(shape, stage) for stage in range(depth))


def pipedream_versions(found: list[Point]) -> Judged:
    most = [_most("pipedream", "max_versions", d, 1) for d in (2, 4, 8)]
    return f"{most} at d = 2, 4, 8", most == [2, 4, 8]


def versions(found: list[Point]) -> Judged:
    most = [_most("2bw", "max_versions", d, d) for d in (2, 4, 8)]
    return f"{most} at d = 2, 4, 8", most == [2, 2, 2]


def in_flight(found: list[Point]) -> Judged:
    most = [_most("2bw", "max_in_flight", d, 4 * d) for d in (2, 4, 8)]
    return f"{most} at d = 2, 4, 8", most == [2, 4, 8]


def flush_stashes(found: list[Point]) -> Judged:
    most = [_most(name, "max_in_flight", 8, 32) for name in ("pipedream-flush", "gpipe")]
    return f"{most[0]} against {most[1]} at d = 8, m = 32", most == [8, 32]


def _versions(kind: str) -> dict[tuple[int, int], int]:
    """(stage, microbatch) -> the version that 2BW's list runs it on, in five batches of Figure 2."""
    shape = Shape(4, 4, 0, 5)
    lists = [(stage, SCHEDULES["2bw"].actions(shape, stage, j)) for stage in range(4) for j in range(5)]
    return {(stage, action.microbatch): action.version for stage, own in lists for action in own if action.kind == kind}


def first_use(found: list[Point]) -> Judged:
    first = min(microbatch for (_, microbatch), version in _versions(F).items() if version == 1)
    return f"input {first + 1}", first + 1 == 9


def version_formula(found: list[Point]) -> Judged:
    pairs = [(x, version) for kind in (F, B) for (_, x), version in _versions(kind).items()]
    wrong = sum(version != max(x // 4 - 1, 0) for x, version in pairs)
    return f"{wrong} of {len(pairs)} passes differ", not wrong


def placement(found: list[Point]) -> Judged:
    orders = {inside: layout(1, 4, 2, inside, 4) for inside in (False, True)}
    texts = [
        f"{'tp-pp-dp' if inside else 'tp-dp-pp'}: replicas on {order.data.servers}, "
        f"{sum(map(bool, order.boundaries[:3]))} of 3 boundaries between servers"
        for inside, order in orders.items()
    ]
    return "; ".join(texts), orders[False].data.servers == 1


def recompute_larger(found: list[Point]) -> Judged:
    fits: dict[tuple[str, str], list[int]] = {}
    for point in found:
        if point.predicted != "OOM":
            fits.setdefault((point.figure, point.series.split()[-1]), []).append(point.x)
    largest = [[max(fits[figure, way]) for way in ("none", "full")] for figure in ("10a", "10b")]
    gains = [full / none for none, full in largest]
    return "10a {} to {}, 10b {} to {}".format(*largest[0], *largest[1]), 1 < gains[0] < gains[1]


@lru_cache
def largest_model(depth: int, slots: int) -> tuple[float, int, int]:
    """(billions of parameters, layers, hidden) of the largest model with equal stages that fits on 64 V100."""
    cluster, sizes = clusters.preset("p3.16xlarge", 8), [(0.0, 0, 0)]
    plan = Plan(1, depth, cluster.gpus // depth, 1, depth, "full", "2bw", gradient_slots=slots)
    first, last, step = PAPER["figures"]["11"]["hidden"]
    for hidden in range(first, last + 1, step):
        for layers in itertools.count(depth, depth):
            shape = models.Model("scaled", layers, hidden, HEADS, sequence=512, tied=False)
            if not Cost(shape, cluster, "fp16").fits(plan):
                break
            sizes.append((shape.parameters() / 1e9, layers, hidden))
    return max(sizes)


def largest_panels() -> list[Panel]:
    """Figure 11 as runs: at each depth the largest model by `largest_model`, and one layer more on each stage."""
    found = []
    for depth in PAPER["figures"]["11"]["depths"]:
        _, layers, hidden = largest_model(depth, 2)
        for count in (layers, layers + depth):
            shape = (("layers", count), ("hidden", hidden), ("heads", HEADS))
            one = Panel(f"11-d{depth}-l{count}", "gpt-28.3b", 8, 8, depth, (64,), (1,), ("PipeDream-2BW",))
            found.append(replace(one, shape=shape))
    return found


def largest_models(measured: Mapping[str, Mapping[str, Any]]) -> list[Point]:
    """Figure 11: for each depth and number of gradient slots, the largest model that fits, over the hidden sizes."""
    found = []
    for slots, depth in itertools.product((1, 2), PAPER["figures"]["11"]["depths"]):
        billions, layers, hidden = largest_model(depth, slots)
        series = f"{slots} gradient slot{'s' if slots > 1 else ''}"
        point = Point("11", "64 GPUs", series, depth, billions, billions, plan=f"{layers} layers of {hidden}")
        rows = [row for row in measured.values() if row["depth"] == depth and slots == 2]
        ran = [int(row["figure"].rpartition("-l")[2]) for row in rows if row["status"] == "completed"]
        if rows:
            point.measured = billions * max(ran) / layers if ran else rows[0]["status"]
        found.append(point)
    return found


def deeper_larger(found: list[Point]) -> Judged:
    own = [largest_model(depth, 2)[0] for depth in PAPER["figures"]["11"]["depths"]]
    return ", ".join(f"{size:.1f}" for size in own) + " billion at d = 4 ... 64", own == sorted(own)


def largest(found: list[Point]) -> Judged:
    low, high = _bar("11", "largest")
    most = [largest_model(max(PAPER["figures"]["11"]["depths"]), slots)[0] for slots in (1, 2)]
    text = "{:.1f} billion with one gradient slot, {:.1f} with two".format(*most)
    return text, any(low <= size <= high for size in most)


def _by_panel(found: list[Point]) -> list[list[Point]]:
    return [[point for point in found if point.figure == name] for name in dict.fromkeys(p.figure for p in found)]


def ticked(found: list[Point]) -> Judged:
    same = [max(own, key=lambda point: point.alone).ticked for own in _by_panel(found)]
    return f"{sum(same)} of {len(same)}", all(same)


def rows_order(found: list[Point]) -> Judged:
    orders = [[sorted(own, key=attrgetter(value)) for value in ("alone", "paper")] for own in _by_panel(found)]
    same = [one == other for one, other in orders]
    return f"{sum(same)} of {len(same)}", all(same)


def flops(found: list[Point]) -> Judged:
    cost, low, high = planner_checks.paper_cost("gpt-355m", 1), *_bar("text", "flops")
    plans = [Plan(1, 1, 1, b, 512 // b, way, "megatron") for b in (1, 2, 4, 8, 16, 32) for way in ("none", "full")]
    speed = max(planner_checks.throughput(cost, plan) for plan in plans if cost.fits(plan))
    reached = speed * cost.model.sample_flops() / 1e12
    return f"{reached:.0f} TFLOP/s", low <= reached <= high


def whole_models(found: list[Point]) -> Judged:
    plans = {"data parallelism": Plan(1, 1, 8, 1, 1, "full", "megatron")}
    plans |= {"PipeDream": Plan(1, 8, 1, 1, 1, "full", "pipedream")}
    costs = {name: planner_checks.paper_cost(name, 1) for name in ("gpt-1.3b", "gpt-2.2b", "gpt-3.8b")}
    fits = {way: [name for name, cost in costs.items() if cost.fits(plan)] for way, plan in plans.items()}
    return "; ".join(f"{way}: {', '.join(own) or 'none'} fits" for way, own in fits.items()), not any(fits.values())


def megatron_8b(found: list[Point]) -> Judged:
    cost = Cost(replace(models.preset("gpt-8.3b"), tied=False), clusters.preset("p3dn.24xlarge", 1), "fp16")
    plan = Plan(8, 1, 1, 1, 8, "full", "megatron")
    return f"{cost.memory.heaviest(plan) / GIB:.1f} GiB of {cost.capacity / GIB:.1f}", cost.fits(plan)


def planned_depths(found: list[Point]) -> Judged:
    pairs = []
    for batch in (512, 1024, 2048):
        space = replace(planner_checks.PAPER, batch=batch)
        costs = [planner_checks.paper_cost(name, 8) for name in ("gpt-2.2b", "gpt-3.8b")]
        pairs.append(tuple(planner_checks.best(cost, space).depth for cost in costs))
    return "; ".join("{}, {}".format(*pair) for pair in pairs) + " at batch 512; 1024; 2048", set(pairs) == {(8, 16)}


JUDGES = (flush_cost, pipedream_versions, versions, in_flight, first_use, version_formula, flush_stashes, placement)
JUDGES += (recompute_larger, deeper_larger, largest, ticked, rows_order, flops, whole_models, megatron_8b)
JUDGES += (planned_depths,)
CHECKS: dict[str, Callable[[list[Point]], Judged]] = {judge.__name__.replace("_", "-"): judge for judge in JUDGES}
