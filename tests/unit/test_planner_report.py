"""Pictures and traces of plans: the artists' numbers are those of the estimates and of
the simulator."""

from __future__ import annotations

import json
import re
import shlex

from matplotlib.collections import PolyCollection
from pytest import approx

from megatron_2bw.schedules import SCHEDULES, Shape
from megatron_2bw.schedules.interleaved import Interleaved
from megatron_2bw.tools.planner.cost.memory import GIB
from megatron_2bw.tools.planner.cost.simulated import Cost
from megatron_2bw.tools.planner.descriptions import cluster, model
from megatron_2bw.tools.planner.descriptions.plan import Plan
from megatron_2bw.tools.planner.tell import report
from megatron_2bw.tools.timelines import picture
from megatron_2bw.tools.timelines.simulator import Times, simulate

COST = Cost(model.preset("gpt-355m"), cluster.preset("p3.16xlarge", 1), "fp16")
PLANS = [
    Plan(1, 4, 2, 1, 4),
    Plan(1, 4, 2, 1, 4, schedule="gpipe", recompute="full", stages=(7, 6, 6, 5)),
    Plan(1, 4, 2, 1, 8, schedule="megatron", virtual=2),
    Plan(1, 1, 8, 1, 1, schedule="megatron", recompute="selective"),
]
ESTIMATES = [COST.estimate(plan) for plan in PLANS]


def bars(axis) -> list[tuple[float, float, float]]:
    """(row, start, end) of the bars of a timeline's forwards and backwards."""
    boxes = [
        path.get_extents()
        for c in axis.collections
        if isinstance(c, PolyCollection)
        for path in c.get_paths()
    ]
    return sorted(
        (round((box.y0 + box.y1) / 2), box.x0, box.x1)
        for box in boxes
        if box.height > 0.5
    )


def test_the_page_shows_two_batches_and_of_long_ones_a_window_around_the_end_of_the_first():
    for plan in PLANS:
        events, begin, end = report.first_batches(COST, plan)
        last = max(
            e.end
            for e in events
            if e.action.kind == "B" and e.action.microbatch < 2 * plan.microbatches
        )
        assert begin == 0, plan
        assert last <= end < 1.5 * last, plan
    events, begin, end = report.first_batches(
        COST, Plan(1, 4, 2, 1, 200, schedule="pipedream-flush")
    )
    first = max(
        e.end for e in events if e.action.kind == "B" and e.action.microbatch < 200
    )
    assert begin < first < end
    assert end - begin < 0.2 * first


def test_the_page_of_a_report_has_each_plan_once_and_the_simulated_timeline(tmp_path):
    more = [COST.estimate(Plan(1, 2, 4, *sizes)) for sizes in ((2, 4), (1, 4), (1, 8))]
    assert [report.write_report(COST, ESTIMATES, [*more, ESTIMATES[0]], tmp_path)] == [
        *tmp_path.iterdir()
    ]
    html = (tmp_path / "index.html").read_text()
    found = json.loads(re.search(r'id="report">(.*?)</script>', html, re.DOTALL)[1])
    assert found["ranked"] == len(PLANS)
    assert [plan["name"] for plan in found["plans"][: len(PLANS)]] == [
        plan.title for plan in PLANS
    ]
    others = sorted(
        (max(more[1:], key=lambda e: e.throughput), more[0]),
        key=lambda e: -e.throughput,
    )
    shown = [(plan["name"], plan["rate"]) for plan in found["plans"][len(PLANS) :]]
    assert shown == [(e.plan.title, approx(e.throughput, rel=5e-3)) for e in others]
    for plan, estimate in zip(found["plans"], ESTIMATES):
        assert plan["flags"] == shlex.join(estimate.plan.flags("fp16"))
        assert max(sum(stage.values()) for stage in plan["memory"]) == approx(
            estimate.heaviest / GIB, rel=1e-3
        )
        each = 1e3 * estimate.seconds / estimate.plan.global_batch
        assert sum(plan["split"].values()) == approx(each, rel=1e-2)
    assert len(found["timelines"]) == len(PLANS)
    for plan, timeline in zip(PLANS, found["timelines"]):
        events, begin, until = report.first_batches(COST, plan)
        for stage in range(plan.depth):
            own = [
                e
                for e in events
                if e.stage == stage and e.end > begin and e.start < until
            ]
            assert timeline["shown"]["actions"][stage].split() == [
                str(event.action) for event in own
            ]
            assert timeline["shown"]["starts"][stage] == approx(
                [event.start - begin for event in own]
            )
    # one file
    assert "src=" not in re.sub(r'id="report">.*?</script>', "", html, flags=re.DOTALL)


def test_drawing_of_chunks_and_of_unequal_stages(tmp_path, monkeypatch):
    """Each chunk has its own colour and letter; stages have their own lengths; a
    shorter timeline keeps the axis."""
    times = Times([2.0, 4.0], [4.0, 4.0])
    long = Shape(2, 2, 0, 2)
    short = Shape(2, 2, 0, 1)
    figures = []
    monkeypatch.setattr(
        picture, "write_figure", lambda path, figure: figures.append(figure)
    )
    picture.draw_shapes(
        [(Interleaved(2), long), (SCHEDULES["gpipe"], short)],
        tmp_path / "chunks.png",
        times,
    )
    upper, lower = figures[0].axes
    assert (
        upper.get_xlim()
        == lower.get_xlim()
        == (0, max(e.end for e in simulate(Interleaved(2), long, times)))
    )
    assert "(forward 2 to 4, backward 4)" in lower.get_xlabel()
    assert {text.get_text() for text in upper.texts} == {
        f"{k}{c}" for k in range(1, 5) for c in "AB"
    }
    faces = {
        tuple(face)
        for c in upper.collections
        if len(c.get_paths())
        for face in c.get_facecolors()
    }
    assert len(faces) == 2 * 2 * 2  # batches, kinds, chunks
    forwards = {
        row: {round(end - start, 6) for r, start, end in bars(lower) if r == row}
        for row in (0, 1)
    }
    assert forwards == {1: {2.0, 4.0}, 0: {4.0}}
