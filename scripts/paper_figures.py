"""The rows of the paper's figures: what the planner's cost model predicts, and whether
a claim of the text holds.

Invariant: a claim's number comes from the same plans as the figure's bars; what is out
of memory has no speed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from bench import planner_checks
from megatron_2bw.schedules import SCHEDULES, STEP, B, F, Shape
from megatron_2bw.tools.planner.cost.communication import layout
from megatron_2bw.tools.planner.cost.memory import GIB
from megatron_2bw.tools.planner.descriptions import cluster as clusters
from megatron_2bw.tools.planner.descriptions.plan import Plan
from megatron_2bw.tools.planner.find import advice
from megatron_2bw.tools.planner.find.search import Search
from megatron_2bw.tools.timelines.simulator import iteration_time
from scripts.paper_data import FIRST, PAPER, Panel, Reading, Run, cost_of, grid, panels

HEADS = 32  # of Figure 11's models


@dataclass
class Point:
    """A bar, or a place on a curve: the fastest of its runs.

    figure     the panel's name in paper.yaml
    predicted  samples/s, samples/s a server, GiB or billions of parameters; a word
               where nothing fits
    gib        bytes of the heaviest stage / 2^30
    room       GiB that it may take
    alone      as predicted, whether it fits or not
    measured   on the cluster whose logs were collected: a number, or the word of the
               status
    """

    figure: str
    panel: str
    series: str
    x: Any
    predicted: float | str
    plan: str = ""
    gib: float = 0.0
    room: float = 0.0
    alone: float = 0.0
    paper: float | str = ""
    ticked: bool = False
    measured: float | str = ""


@dataclass
class Claim:
    """A row of the table of claims.

    holds    None where nothing decides it
    decides  a prediction, a measurement, or the lists that the runtime executes
    turns    the readings under which the prediction's verdict is another one
    """

    says: str
    source: str
    paper: str
    decides: str = "prediction"
    predicted: str = ""
    holds: bool | None = None
    turns: list[str] = field(default_factory=list)
    here: str = ""
    on_cluster: str = ""
    notes: list[str] = field(default_factory=list)


def points(
    figure: str,
    own: Sequence[Panel],
    measured: Mapping[str, Mapping[str, Any]],
    reading: Reading = FIRST,
) -> list[Point]:
    """Of a figure with the runs of `own`. measured: the rows of sweep.py's table, by
    the name of the run."""
    spec, found = PAPER["figures"][figure], {}
    lead = (
        {(p.panel, p.x): p.plan for p in points(figure, own, {}) if "2BW" in p.series}
        if reading.same
        else {}
    )
    for run in grid(own, reading=reading):
        row = run.row()
        x = row[spec["x"]] if spec["x"] in row else spec["x"].format(**row)
        place = spec["panel"].format(**row), spec["series"].format(**row), x
        if lead and not lead[place[0], x].endswith(f" b{run.microbatch}"):
            continue
        point = _point(run, place, spec.get("y", ""))
        point.measured = _measured(measured.get(run.name, {}), spec.get("y", ""))
        found[place] = _faster(found[place], point) if place in found else point
    return list(found.values())


def _point(run: Run, place: tuple, y: str) -> Point:
    plan, panel = run.plan, run.panel
    gib, room = run.cost.memory.heaviest(plan) / GIB, run.cost.allowed(plan) / GIB
    value = (
        gib
        if y == "GiB"
        else run.speed() / (panel.servers if y.endswith("a server") else 1)
    )
    predicted = value if y == "GiB" or gib <= room else "OOM"
    paper = "" if panel.paper is None else panel.paper
    return Point(
        panel.figure,
        *place,
        predicted,
        plan.name,
        gib,
        room,
        value,
        paper,
        panel.ticked,
    )


def _measured(row: Mapping[str, Any], y: str) -> float | str:
    value = row.get("peak_memory_gib" if y == "GiB" else "samples_per_second", "")
    return value or row.get("status", "")


def _faster(one: Point, other: Point) -> Point:
    """The faster point, with the faster of both measurements; a word gives way to a
    number."""
    first = max(one, other, key=lambda point: _number(point.predicted))
    return replace(first, measured=max(one.measured, other.measured, key=_number))


# --- one rule for all claims
# --------------------------------------------------------------------------------------

MORE, LESS = ("more", "faster", "grows"), ("slower",)


def agrees(paper: float | str, ours: float) -> bool:
    """A number of ours is within the tolerance of the paper's; `at most N` is a limit;
    a ratio is more than 1, slightly more (by no more than the tolerance), or less."""
    if paper == "slightly more":
        return 1 < ours <= 1 + PAPER["tolerance"]
    if isinstance(paper, str):
        return (
            ours > 1
            if paper in MORE
            else ours < 1
            if paper in LESS
            else ours <= float(paper.split()[-1])
        )
    return abs(ours / paper - 1) <= PAPER["tolerance"]


def ratios(
    spec: Mapping[str, Any], found: Iterable[Point], value: str
) -> dict[tuple[str, Any], float]:
    """(panel, x) -> the first series' value over the second's, where both have a
    number.

    An entry of `ratio` is a series, or a series and its x; with `best` each series'
    largest value counts.
    """
    values = {
        (point.figure, point.series, point.x): getattr(point, value) for point in found
    }
    places = dict.fromkeys(
        (figure, x) for figure, _, x in values if x in spec.get("at", [x])
    )
    ends = [
        entry if isinstance(entry, list) else [entry, None] for entry in spec["ratio"]
    ]
    if "best" in spec:
        tops: dict[tuple, Any] = {}
        for (figure, series, _), number in values.items():
            tops[figure, series, ""] = max(
                tops.get((figure, series, ""), 0.0), _number(number)
            )
        values, places = tops, dict.fromkeys((figure, "") for figure, _, _ in tops)
    ratio = {}
    for figure, x in places:
        one, two = (
            _number(values.get((figure, series, own or x), "")) for series, own in ends
        )
        if figure in spec["panels"] and one > 0 and two > 0:
            ratio[figure, "" if ends[0][1] else x] = one / two
    return ratio


def _number(value: float | str) -> float:
    """A word counts as less than any number."""
    return value if isinstance(value, (int, float)) else -1.0


def judge_ratio(spec: Mapping[str, Any], row: Claim, found: list[Point]) -> None:
    """Fills the row. The largest ratio decides, as `up to` does in the text; with
    `every`, all of them. The row shows the largest of each panel."""
    own, real = (
        ratios(spec, found, value)
        for value in (spec.get("of", "predicted"), "measured")
    )
    shown: dict[Any, float] = {}
    for (panel, x), ratio in own.items():
        key = (panel, x) if "every" in spec else panel
        shown[key] = max(shown.get(key, 0.0), ratio)
    judged = (
        [*shown.values()] if "every" in spec else [max(shown.values())] if shown else []
    )
    row.holds = bool(judged) and all(agrees(spec["paper"], ratio) for ratio in judged)
    names = {
        key: " at ".join(map(str, filter(None, key))) if "every" in spec else key
        for key in shown
    }
    text = ", ".join(f"{names[key]} {ratio:.2f}" for key, ratio in shown.items())
    row.predicted = text or "no ratio: out of memory"
    if real:
        row.on_cluster = f"{max(real.values()):.2f}"


def judge_fit(spec: Mapping[str, Any], row: Claim, found: list[Point]) -> None:
    """Fills the row: whether a series fits at an x."""
    place = (*spec["panels"], *spec["fit"])
    point = next(
        point for point in found if (point.figure, point.series, point.x) == place
    )
    fits = "fits" if point.gib <= point.room else "out of memory"
    row.predicted, row.holds = (
        f"{point.gib:.2f} GiB of {point.room:.2f}, {fits}",
        spec["paper"] == fits,
    )
    row.on_cluster = str(point.measured)


# --- claims of other kinds, by id: (what is found, whether it holds), of a figure's
# points under a reading -----------

Judged = tuple[str, bool | None]


def flush_cost(found: list[Point], reading: Reading) -> Judged:
    times = {
        (name, d): iteration_time(SCHEDULES[name], d, d)
        for name in ("gpipe", "2bw")
        for d in (4, 8, 64)
    }
    shares = [times["gpipe", d] / times["2bw", d] for d in (4, 8, 64)]
    return ", ".join(
        f"{share:.2f}" for share in shares
    ) + " at d = m = 4, 8, 64", agrees(2, max(shares))


def held(name: str, shape: Shape) -> tuple[int, int]:
    """The most (microbatches between forward and backward, weight versions) that a
    stage of the schedule's lists has: versions are those of these microbatches and the
    newest."""
    stashes = versions = 0
    for stage in range(shape.stages):
        live: dict[int, int] = {}
        steps = 0
        for action in (
            action
            for j in range(shape.end)
            for action in SCHEDULES[name].actions(shape, stage, j)
        ):
            if action.kind == F:
                live[action.microbatch] = action.version
            elif action.kind == B:
                del live[action.microbatch]
            steps += action.kind == STEP
            stashes, versions = (
                max(stashes, len(live)),
                max(versions, len({*live.values(), steps})),
            )
    return stashes, versions


def pipedream_versions(found: list[Point], reading: Reading) -> Judged:
    most = [held("pipedream", Shape(d, 1, 0, 4 * d))[1] for d in (2, 4, 8)]
    return f"{most} at d = 2, 4, 8", most == [2, 4, 8]


def versions(found: list[Point], reading: Reading) -> Judged:
    most = [held("2bw", Shape(d, d, 0, 5))[1] for d in (2, 4, 8)]
    return f"{most} at d = 2, 4, 8", most == [2, 2, 2]


def in_flight(found: list[Point], reading: Reading) -> Judged:
    most = [held("2bw", Shape(d, 4 * d, 0, 3))[0] for d in (2, 4, 8)]
    return f"{most} at d = 2, 4, 8", most == [2, 4, 8]


def flush_stashes(found: list[Point], reading: Reading) -> Judged:
    most = [held(name, Shape(8, 32, 0, 2))[0] for name in ("pipedream-flush", "gpipe")]
    return f"{most[0]} against {most[1]} at d = 8, m = 32", most == [8, 32]


def version_formula(found: list[Point], reading: Reading) -> Judged:
    wrong = passes = 0
    for d, m in ((4, 4), (2, 3), (8, 24)):
        shape = Shape(d, m, 0, 5)
        lists = [
            SCHEDULES["2bw"].actions(shape, stage, j)
            for stage in range(d)
            for j in range(5)
        ]
        both = [action for own in lists for action in own if action.kind in (F, B)]
        wrong += sum(
            action.version != max(action.microbatch // m - 1, 0) for action in both
        )
        passes += len(both)
    return f"{wrong} of {passes} passes differ", not wrong


def placement(found: list[Point], reading: Reading) -> Judged:
    order = layout(1, 4, 2, False, 4)  # Megatron's
    between = sum(map(bool, order.boundaries[:3]))
    return (
        f"replicas on {order.data.servers}, {between} of 3 boundaries between servers",
        order.data.servers == 1,
    )


def recompute_larger(found: list[Point], reading: Reading) -> Judged:
    fits: dict[tuple[str, str], list[int]] = {}
    for point in found:
        if point.predicted != "OOM":
            fits.setdefault((point.figure, point.series.split()[-1]), []).append(
                point.x
            )
    largest = [
        [max(fits.get((figure, way), [0])) for way in ("none", "full")]
        for figure in ("10a", "10b")
    ]
    holds = (
        all(full > none for none, full in largest)
        and largest[1][1] * largest[0][0] > largest[0][1] * largest[1][0]
    )
    return "10a {} to {}, 10b {} to {}".format(*largest[0], *largest[1]), holds


@lru_cache
def largest_model(
    depth: int, slots: int, reading: Reading = FIRST
) -> tuple[float, int, int]:
    """(billions of parameters, layers, hidden) of the largest model with equal stages
    that fits on 64 V100."""
    plan, sizes = (
        Plan(1, depth, 64 // depth, 1, depth, "full", "2bw", gradient_slots=slots),
        [(0.0, 0, 0)],
    )
    first, last, step = PAPER["figures"]["11"]["hidden"]
    for hidden in range(first, last + 1, step):
        for layers in itertools.count(depth, depth):
            shape = ("layers", layers), ("hidden", hidden), ("heads", HEADS)
            cost = cost_of("gpt-28.3b", 8, "fp16", reading, *shape)
            if not cost.fits(plan):
                break
            sizes.append((cost.model.parameters() / 1e9, layers, hidden))
    return max(sizes)


def largest_panels() -> list[Panel]:
    """Figure 11 as runs: at each depth the largest model by `largest_model`, and one
    layer more on each stage."""
    found = []
    for depth in PAPER["figures"]["11"]["depths"]:
        _, layers, hidden = largest_model(depth, 2)
        for count in (layers, layers + depth):
            shape = (("layers", count), ("hidden", hidden), ("heads", HEADS))
            one = Panel(
                f"11-d{depth}-l{count}",
                "gpt-28.3b",
                8,
                8,
                depth,
                (64,),
                (1,),
                ("PipeDream-2BW",),
            )
            found.append(replace(one, shape=shape))
    return found


def largest_models(
    measured: Mapping[str, Mapping[str, Any]], reading: Reading = FIRST
) -> list[Point]:
    """Figure 11: for each depth and number of gradient slots, the largest model that
    fits, over the hidden sizes."""
    found = []
    for slots, depth in itertools.product((1, 2), PAPER["figures"]["11"]["depths"]):
        billions, layers, hidden = largest_model(depth, slots, reading)
        series = f"{slots} gradient slot{'s' if slots > 1 else ''}"
        point = Point(
            "11", "64 GPUs", series, depth, billions, f"{layers} layers of {hidden}"
        )
        rows = [
            row for row in measured.values() if row["depth"] == depth and slots == 2
        ]
        ran = [
            int(row["figure"].rpartition("-l")[2])
            for row in rows
            if row["status"] == "completed"
        ]
        if rows:
            point.measured = billions * max(ran) / layers if ran else rows[0]["status"]
        found.append(point)
    return found


def deeper_larger(found: list[Point], reading: Reading) -> Judged:
    own = [point.predicted for point in found if point.series == "2 gradient slots"]
    rises = all(one < other for one, other in itertools.pairwise(own))
    return ", ".join(f"{size:.1f}" for size in own) + " billion at d = 4 ... 64", rises


def largest(found: list[Point], reading: Reading) -> Judged:
    most = [
        point.predicted
        for point in found
        if point.x == max(PAPER["figures"]["11"]["depths"])
    ]
    text = "{:.1f} billion with one gradient slot, {:.1f} with two".format(*most)
    return text, any(agrees(30, size) for size in most)


def table_values(found: list[Point], reading: Reading) -> Judged:
    wrong = [point for point in found if not agrees(point.paper, point.alone)]
    texts = [
        f"{point.panel.split()[0]} {point.x}: {point.alone / point.paper:.2f} of the paper's"
        for point in wrong
    ]
    return "; ".join([f"{len(found) - len(wrong)} of {len(found)}", *texts]), not wrong


def ticked(found: list[Point], reading: Reading) -> Judged:
    groups = [
        [point for point in found if point.figure == name]
        for name in dict.fromkeys(p.figure for p in found)
    ]
    same = [max(own, key=lambda point: point.alone).ticked for own in groups]
    return f"{sum(same)} of {len(same)}", all(same)


def chosen(found: list[Point], reading: Reading) -> Judged:
    """The planner's own choice in the paper's space, for each group of rows."""
    texts, same = [], 0
    for run in (
        run for run in grid(panels("table1"), reading=reading) if run.panel.ticked
    ):
        own, plan = planner_checks.best(run.cost, planner_checks.PAPER), run.plan
        same += (own.width, own.depth) == (plan.width, plan.depth)
        kept = planner_checks.best(
            run.cost, replace(planner_checks.PAPER, depth=(plan.depth,))
        )
        share = planner_checks.throughput(run.cost, kept) / planner_checks.throughput(
            run.cost, own
        )
        texts.append(
            f"{run.panel.model} ({own.width}, {own.depth}) b {own.microbatch}, "
            f"the ticked sizes {share:.2f}"
        )
    return f"{same} of {len(texts)}: {'; '.join(texts)}", same == len(texts)


def whole_models(found: list[Point], reading: Reading) -> Judged:
    plans = {"data parallelism": Plan(1, 1, 8, 1, 1, "full", "megatron")}
    plans |= {"PipeDream": Plan(1, 8, 1, 1, 1, "full", "pipedream")}
    costs = {
        name: cost_of(name, 1, "fp16", reading)
        for name in ("gpt-1.3b", "gpt-2.2b", "gpt-3.8b")
    }
    fits = {
        way: [name for name, cost in costs.items() if cost.fits(plan)]
        for way, plan in plans.items()
    }
    return "; ".join(
        f"{way}: {', '.join(own) or 'none'} fits" for way, own in fits.items()
    ), not any(fits.values())


def megatron_8b(found: list[Point], reading: Reading) -> Judged:
    cost = cost_of("gpt-8.3b", clusters.preset("p3dn.24xlarge", 1), "fp16", reading)
    plan = Plan(8, 1, 1, 1, 8, "full", "megatron")
    return (
        f"{cost.memory.heaviest(plan) / GIB:.1f} GiB of {cost.allowed(plan) / GIB:.1f}",
        cost.fits(plan),
    )


def planned_depths(found: list[Point], reading: Reading) -> Judged:
    pairs = []
    for batch in (512, 1024, 2048):
        space = replace(planner_checks.PAPER, batch=batch, extra_warmup=reading.ahead)
        costs = [cost_of(name, 8, "fp16", reading) for name in ("gpt-2.2b", "gpt-3.8b")]
        pairs.append(tuple(planner_checks.best(cost, space).depth for cost in costs))
    return "; ".join(
        "{}, {}".format(*pair) for pair in pairs
    ) + " at batch 512; 1024; 2048", set(pairs) == {(8, 16)}


def fastest(found: list[Point], reading: Reading) -> Judged:
    """Of all schedules, by the planner: in the paper's space with Megatron's
    interleaved stages too."""
    texts, first = [], []
    for name, servers, batch in (
        ("gpt-2.2b", 1, 64),
        ("gpt-2.2b", 8, 2048),
        ("gpt-3.8b", 8, 2048),
    ):
        cost, others = (
            cost_of(name, servers, "fp16", reading),
            ("2bw", "pipedream-flush", "megatron"),
        )
        space = replace(
            planner_checks.PAPER,
            batch=batch,
            schedules=others,
            virtual=None,
            extra_warmup=reading.ahead,
        )
        plans = [
            planner_checks.best(cost, replace(space, schedules=(other,)))
            for other in others
        ]
        speeds = {
            plan.schedule_name: planner_checks.throughput(cost, plan)
            for plan in plans
            if plan
        }
        advised = advice.ranked(Search(cost, space), 1)[0][0].schedule_name
        shown = ", ".join(f"{way} {speed:.1f}" for way, speed in speeds.items())
        texts.append(f"{name} at {batch}: {shown} samples/s, advised is {advised}")
        first.append(max(speeds, key=speeds.get).startswith("2bw"))
    return "; ".join(texts), all(first)
