"""docs/planner.md and its recorded checks hold what the planner says today."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from bench import planner_published, tables
from megatron_2bw.tools.planner.cost.memory import GIB
from megatron_2bw.tools.planner.cost.simulated import Cost, Estimate
from megatron_2bw.tools.planner.descriptions import cluster, model
from megatron_2bw.tools.planner.find.advice import DELAY, TIE, ranked
from megatron_2bw.tools.planner.find.search import Search
from megatron_2bw.tools.planner.find.space import Space
from megatron_2bw.tools.planner.tell.explain import three

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "planner.md").read_text()
CHECKS = json.loads((DOCS / "bench" / "planner_accuracy.json").read_text())["checks"]


def test_the_table_is_of_the_recorded_checks():
    assert len(CHECKS) > 10
    assert all(check["assumes"] for check in CHECKS)
    sets = [
        check for check in CHECKS if check["name"] == "published runs by set, below"
    ]
    again = "print it again: python bench/tables.py docs/bench/planner_accuracy.json"
    assert tables.table(sets[0]["rows"]) in PAGE, again


@pytest.mark.parametrize(
    "section",
    [
        planner_published.zero_bubble_table,
        planner_published.korthikanti_2022,
        planner_published.links,
    ],
)
def test_the_recorded_checks_are_those_of_today(section):
    for check in section():
        assert asdict(check) in CHECKS, (
            "run bench/planner_accuracy.py --json docs/bench/planner_accuracy.json"
        )


def best_plan(cost: Cost, space: Space, rate: float) -> Estimate:
    """What `plan` recommends. A tie with the fastest is at most TIE and DELAY slower,
    so if the fastest has `rate` samples/s, slower plans need no search; if the fastest
    is slower than that, there may be no plan."""
    limit = (1 + TIE) * (1 + DELAY) / rate
    plans, _ = ranked(Search(cost, space, limit=1.001 * limit), 8)
    return cost.estimate(plans[0])


def test_the_example_is_the_plan_of_today():
    part = re.search(r"\(--servers (\d+) --gpus-per-server (\d+)\)", PAGE)
    cost = Cost(
        model.preset("gpt-2.2b"),
        cluster.preset("p3.16xlarge", 8).part(*map(int, part.groups())),
        "fp16",
        torch_adam=True,
    )
    answer = re.search(r"^    (Best: .+?\.)$", PAGE, re.MULTILINE | re.DOTALL)[1]
    line = " ".join(answer.split())
    best = best_plan(
        cost,
        Space(512, max_gap=0.1),
        float(re.search(r"([\d.]+) samples/s", line)[1]),
    )
    speed = f"{three(best.throughput)} samples/s, {three(best.seconds)} s an iteration"
    sizes = f"{best.heaviest / GIB:.2f} GiB of {best.capacity / GIB:.2f} allowed"
    assert line.startswith(f"Best: {best.plan.title}, {speed}, {sizes} (ESTIMATED: ")
