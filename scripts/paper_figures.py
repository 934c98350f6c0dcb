"""The rows of the paper's figures: what the planner's cost model predicts, and whether
a claim of the text holds.

Invariant: a claim's number comes from the same plans as the figure's bars; what is out
of memory has no speed.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from megatron_2bw.tools.planner.cost.memory import GIB
from megatron_2bw.tools.planner.descriptions.plan import Plan
from scripts.paper_data import (
    FIRST,
    PAPER,
    Panel,
    PaperRun,
    Reading,
    Row,
    cost_of,
    grid,
)

HEADS = 32  # of Figure 11's models


@dataclass
class Point:
    """A bar, or a place on a curve: the fastest of its runs.

    figure     the panel's name in paper.yaml
    predicted  samples/s, samples/s a server, GiB or billions of parameters; a word
               where nothing fits
    gib        bytes of the heaviest stage / 2^30
    room       GiB that it may take
    alone      the prediction, whether it fits or not
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
    measured: Mapping[str, Row],
    reading: Reading = FIRST,
) -> list[Point]:
    """The points of a figure with the runs of `own`. measured: the rows of sweep.py's
    table, by the name of the run."""
    spec = PAPER["figures"][figure]
    y = spec.get("y", "")
    plans_of_2bw = {}
    if reading.same:
        for point in points(figure, own, {}):
            if "2BW" in point.series:
                plans_of_2bw[point.panel, point.x] = point.plan
    fastest = {}
    for run in grid(own, reading=reading):
        row = run.row()
        panel = spec["panel"].format(**row)
        series = spec["series"].format(**row)
        x = row[spec["x"]] if spec["x"] in row else spec["x"].format(**row)
        size = f" b{run.microbatch}"
        if plans_of_2bw and not plans_of_2bw[panel, x].endswith(size):
            continue
        point = _point(run, panel, series, x, y)
        point.measured = _measured(measured.get(run.name, {}), y)
        place = (panel, series, x)
        fastest[place] = _faster(fastest.get(place, point), point)
    return list(fastest.values())


def _point(run: PaperRun, panel: str, series: str, x: Any, y: str) -> Point:
    own = run.panel
    gib = run.cost.memory.heaviest(run.plan) / GIB
    room = run.cost.allowed(run.plan) / GIB
    alone = gib
    if y != "GiB":
        alone = run.speed() / (own.servers if y.endswith("a server") else 1)
    predicted = alone if gib <= room or y == "GiB" else "OOM"
    point = Point(own.figure, panel, series, x, predicted, run.plan.name, gib, room)
    return replace(point, alone=alone, paper=own.paper, ticked=own.ticked)


def _measured(row: Row, y: str) -> float | str:
    value = row.get("peak_memory_gib" if y == "GiB" else "samples_per_second", "")
    return value or row.get("status", "")


def _faster(one: Point, other: Point) -> Point:
    """The faster point, with the faster of both measurements; a word gives way to a
    number."""
    faster = one if _number(one.predicted) >= _number(other.predicted) else other
    return replace(faster, measured=max(one.measured, other.measured, key=_number))


def _number(value: float | str) -> float:
    """A word counts as less than any number."""
    return value if isinstance(value, (int, float)) else -1.0


# --- one rule for all claims
# --------------------------------------------------------------------------------------


def agrees(paper: float | str, ours: float) -> bool:
    """A number of ours is within the tolerance of the paper's; `at most N` is a limit;
    a ratio is more than 1, slightly more (by no more than the tolerance), or less."""
    tolerance = PAPER["tolerance"]
    if paper == "slightly more":
        return 1 < ours <= 1 + tolerance
    if paper in ("more", "faster", "grows"):
        return ours > 1
    if paper == "slower":
        return ours < 1
    if isinstance(paper, str):
        return ours <= float(paper.removeprefix("at most "))
    return abs(ours / paper - 1) <= tolerance


def ratios(
    spec: Row, found: Sequence[Point], value: str
) -> dict[tuple[str, Any], float]:
    """(panel, x) -> the first series' value over the second's, where both have a
    number.

    An entry of `ratio` is a series, or a series and its x; with `best` each series'
    largest value counts.
    """
    numbers = {}
    for point in found:
        place = (point.figure, point.series, "" if "best" in spec else point.x)
        number = _number(getattr(point, value))
        numbers[place] = max(numbers.get(place, -1.0), number)
    one, two = spec["ratio"]
    ratio = {}
    for figure, _, x in numbers:
        if figure not in spec["panels"] or x not in spec.get("at", [x]):
            continue
        first = (figure, one, x)
        second = (figure, two, x)
        if isinstance(one, list):
            first = (figure, *one)
            second = (figure, *two)
            x = ""
        over = numbers.get(first, -1.0)
        under = numbers.get(second, -1.0)
        if over > 0 and under > 0:
            ratio[figure, x] = over / under
    return ratio


def judge_ratio(spec: Row, row: Claim, found: list[Point]) -> None:
    """Fills the row. The largest ratio decides, as `up to` does in the text; with
    `every`, all of them. The row shows the largest of each panel."""
    shown = {}
    value = spec.get("of", "predicted")
    for (panel, x), ratio in ratios(spec, found, value).items():
        label = f"{panel} at {x}" if "every" in spec and x else panel
        shown[label] = max(shown.get(label, 0.0), ratio)
    judged = sorted(shown.values())
    if "every" not in spec:
        judged = judged[-1:]
    row.holds = bool(judged)
    for ratio in judged:
        row.holds &= agrees(spec["paper"], ratio)
    text = ", ".join(f"{label} {ratio:.2f}" for label, ratio in shown.items())
    row.predicted = text or "no ratio: out of memory"
    if real := ratios(spec, found, "measured"):
        row.on_cluster = f"{max(real.values()):.2f}"


def judge_fit(spec: Row, row: Claim, found: list[Point]) -> None:
    """Fills the row: whether a series fits at an x."""
    place = (*spec["panels"], *spec["fit"])
    (point,) = [
        point for point in found if (point.figure, point.series, point.x) == place
    ]
    fits = "fits" if point.gib <= point.room else "out of memory"
    row.predicted = f"{point.gib:.2f} GiB of {point.room:.2f}, {fits}"
    row.holds = spec["paper"] == fits
    row.on_cluster = str(point.measured)


# --- Figure 11
# --------------------------------------------------------------------------------------


@lru_cache
def largest_model(depth: int, memory: str, reading: Reading) -> tuple[float, int, int]:
    """(billions of parameters, layers, hidden) of the largest model with equal stages
    that fits on 64 V100."""
    width = 64 // depth
    plan = Plan(1, depth, width, 1, depth, "full", "2bw", memory=memory)
    largest = (0.0, 0, 0)
    first, last, step = PAPER["figures"]["11"]["hidden"]
    for hidden in range(first, last + 1, step):
        for layers in itertools.count(depth, depth):
            shape = (("layers", layers), ("hidden", hidden), ("heads", HEADS))
            cost = cost_of("gpt-28.3b", 8, reading, shape=shape)
            if not cost.fits(plan):
                break
            billions = cost.model.parameters() / 1e9
            largest = max(largest, (billions, layers, hidden))
    return largest


def largest_models(reading: Reading) -> list[Point]:
    """Figure 11: for each depth, with one gradient slot and two, the largest model that
    fits, over the hidden sizes."""
    found = []
    depths = PAPER["figures"]["11"]["depths"]
    for memory, depth in itertools.product(("one-slot", "two-slots"), depths):
        billions, layers, hidden = largest_model(depth, memory, reading)
        series = "1 gradient slot" if memory == "one-slot" else "2 gradient slots"
        point = Point("11", "64 GPUs", series, depth, billions)
        point.plan = f"{layers} layers of {hidden}"
        found.append(point)
    return found
