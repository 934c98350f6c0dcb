"""The intervals of a plan's first run, and what the planner says about the run."""

from dataclasses import replace

import pytest

from megatron_2bw.tools.planner.cost.simulated import Cost
from megatron_2bw.tools.planner.descriptions import cluster, model
from megatron_2bw.tools.planner.descriptions.plan import Plan
from megatron_2bw.tools.planner.tell import training

COST = Cost(model.preset("gpt-2.2b"), cluster.preset("dgx-a100-80", 2), "bf16")
PLAN = Plan(1, 8, 2, 2, 16, corrected=True)


@pytest.mark.parametrize(
    "seconds, save, evaluate, log",
    [
        (0, 1000, 1000, 10),
        (1e-6, 10000, 10000, 10),
        (1, 2000, 2000, 10),
        (37, 50, 200, 2),
        (1800, 1, 200, 1),
    ],
)
def test_intervals_follow_the_time_of_an_iteration(seconds, save, evaluate, log):
    words = training.flags(seconds)
    given = {
        name: int(words[words.index(f"--{name}-interval") + 1])
        for name in ("eval", "log")
    }
    assert (training.save_interval(seconds), given) == (
        save,
        {"eval": evaluate, "log": log},
    )


@pytest.mark.parametrize(
    "precision, changes, each",
    [
        ("bf16", {}, 2 + 4 + 8 + 2 + 2),
        ("bf16", {"corrected": False}, 2 + 4 + 8 + 2),
        ("fp32", {}, 4 + 8 + 4 + 4),
        ("fp32", {"corrected": False, "schedule": "megatron"}, 4 + 8),
    ],
)
def test_the_bytes_of_a_checkpoint(precision, changes, each):
    cost = Cost(COST.model, COST.cluster, precision)
    assert (
        training.checkpoint_bytes(cost, replace(PLAN, **changes))
        == each * COST.model.parameters()
    )
