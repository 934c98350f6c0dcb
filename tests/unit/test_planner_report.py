"""Pictures and traces of plans: the artists' numbers are those of the estimates and of
the simulator."""

import json
import re
import shlex

from matplotlib.collections import PolyCollection
from pytest import approx

from megatron_2bw.tools.planner.cost.memory import GIB
from megatron_2bw.tools.planner.cost.simulated import Cost
from megatron_2bw.tools.planner.descriptions import cluster, model
from megatron_2bw.tools.planner.descriptions.plan import Plan
from megatron_2bw.tools.planner.tell import report
from megatron_2bw.tools.timelines.simulator import Event

COST = Cost(model.preset("gpt-355m"), cluster.preset("p3.16xlarge", 1), "fp16")
PLANS = [
    Plan(1, 4, 2, 1, 4),
    Plan(1, 4, 2, 1, 4, schedule="gpipe", recompute="full", stages=(7, 6, 6, 5)),
    Plan(1, 4, 2, 1, 8, schedule="megatron", virtual=2),
    Plan(1, 1, 8, 1, 1, schedule="megatron", recompute="selective"),
]
ESTIMATES = [COST.estimate(plan) for plan in PLANS]


def bars(axis) -> list[tuple[int, float]]:
    """(row, length) of the bars of a timeline's forwards and backwards."""
    found = []
    for collection in axis.collections:
        if isinstance(collection, PolyCollection):
            for path in collection.get_paths():
                box = path.get_extents()
                if box.height > 0.5:
                    row = round((box.y0 + box.y1) / 2)
                    found.append((row, round(box.x1 - box.x0, 6)))
    return found


def last_backward(events: list[Event], microbatches: int) -> float:
    """The end of the last backward of the first microbatches."""
    end = 0.0
    for event in events:
        if event.action.kind == "B" and event.action.microbatch < microbatches:
            end = max(end, event.end)
    return end


def test_the_page_shows_two_batches_and_of_long_ones_a_window_around_the_end_of_the_first():
    for plan in PLANS:
        events, begin, end = report.first_batches(COST, plan)
        last = last_backward(events, 2 * plan.microbatches)
        assert begin == 0
        assert last <= end < 1.5 * last, plan
    plan = Plan(1, 4, 2, 1, 200, schedule="pipedream-flush")
    events, begin, end = report.first_batches(COST, plan)
    first = last_backward(events, 200)
    assert begin < first < end
    assert end - begin < 0.2 * first


def test_the_page_of_a_report_has_each_plan_once_and_the_simulated_timeline(tmp_path):
    path = report.write_report(COST, ESTIMATES, tmp_path)
    assert [path] == [*tmp_path.iterdir()]
    html = path.read_text()
    page = json.loads(re.search(r'id="report">(.*?)</script>', html, re.DOTALL)[1])
    for plan, estimate in zip(page["plans"], ESTIMATES, strict=True):
        assert plan["name"] == estimate.plan.title
        assert plan["rate"] == approx(estimate.throughput, rel=5e-3)
        assert plan["flags"] == shlex.join(estimate.plan.flags("fp16"))
        heaviest = max(sum(stage.values()) for stage in plan["memory"])
        assert heaviest == approx(estimate.heaviest / GIB, rel=1e-3)
        each = 1e3 * estimate.seconds / estimate.plan.global_batch
        assert sum(plan["split"].values()) == approx(each, rel=1e-2)
    for plan, timeline in zip(PLANS, page["timelines"], strict=True):
        events, begin, until = report.first_batches(COST, plan)
        for stage in range(plan.depth):
            actions = []
            starts = []
            for event in events:
                if event.stage == stage and event.end > begin and event.start < until:
                    actions.append(str(event.action))
                    starts.append(event.start - begin)
            assert timeline["shown"]["actions"][stage].split() == actions
            assert timeline["shown"]["starts"][stage] == approx(starts)
    # one file
    assert "src=" not in re.sub(r'id="report">.*?</script>', "", html, flags=re.DOTALL)
