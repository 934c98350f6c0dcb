"""What the sections of planner_accuracy.py share: a check, the published tables, the
planner's costs and plans."""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from pathlib import Path

from megatron_2bw.tools.planner.cost.simulated import Cost
from megatron_2bw.tools.planner.descriptions import cluster, model
from megatron_2bw.tools.planner.descriptions.plan import Plan
from megatron_2bw.tools.planner.find.search import Search
from megatron_2bw.tools.planner.find.space import Space

MEASURED = Path(__file__).resolve().parent / "measured"
# The paper's system: no tensor parallelism, no sharded optimizer, even stages, every
# layer recomputed or none, and the warm-up of 1F1B.
PAPER = Space(
    512,
    schedules=("2bw",),
    tensor=(1,),
    recompute=("none", "full"),
    gradient_slots=(2,),
    distributed_optimizer=(False,),
    virtual=(1,),
    uneven=False,
    extra_warmup=False,
    host=False,
)


@dataclass
class Check:
    """One claim: its rows, the bar, the result, and what the prediction takes for
    granted."""

    name: str
    source: str
    bar: str
    holds: bool
    result: str
    rows: list[dict] = field(default_factory=list)
    assumes: str = ""


def within(
    percent: float,
    name: str,
    source: str,
    rows: list[dict],
    key: str = "error",
    what: str = "",
    shown: bool = True,
    assumes: str = "",
) -> Check:
    """Whether the relative error `key` of each row, apart from rows that the planner
    was fitted to, is small enough."""
    worst = max(abs(row[key]) for row in rows if not row.get("fitted to"))
    bar, result = f"{what}within {percent:g} %", f"largest error {worst:.1%}"
    return Check(
        name,
        source,
        bar,
        worst <= percent / 100,
        result,
        rows if shown else [],
        assumes,
    )


def compared(
    measured: float, predicted: float, unit: str, digits: int
) -> dict[str, float]:
    """The end of a row: both values, the predicted one rounded, and its relative
    error."""
    error = round(predicted / measured - 1, 3)
    return {
        f"measured {unit}": measured,
        f"predicted {unit}": round(predicted, digits),
        "error": error,
    }


def table(name: str) -> list[dict[str, str]]:
    with open(MEASURED / name, newline="") as file:
        return list(csv.DictReader(file))


def integers(row: dict[str, str], *names: str) -> list[int]:
    return [int(row[name]) for name in names]


def shape_of(row: dict[str, str], name: str, **more: int) -> model.Model:
    """The model of a row of a published table."""
    hidden = row.get("hidden") or row["hidden_size"]
    return model.Model(name, int(row["layers"]), int(hidden), int(row["heads"]), **more)


def a100_cost(shape: model.Model, gpus: int) -> Cost:
    """On servers of 8 A100-80GB, with Megatron of that time: no flash attention,
    blocking exchanges."""
    return Cost(
        shape,
        cluster.preset("dgx-a100-80", -(-gpus // 8)),
        "bf16",
        flash=False,
        old_exchange=True,
    )


def best(cost: Cost, space: Space) -> Plan | None:
    return next((plan for _, plan in Search(cost, space)), None)


def throughput(cost: Cost, plan: Plan) -> float:
    return plan.global_batch / cost.seconds(plan)


def described(plan: Plan | None) -> str:
    if plan is None:
        return "nothing fits"
    recompute = "" if plan.recompute == "none" else f", {plan.recompute} recompute"
    order = ", pipelines inside servers" if plan.pipeline_inside else ""
    sizes = f"t{plan.tensor} d{plan.depth} w{plan.width} b{plan.microbatch} m{plan.microbatches}"
    return f"{plan.schedule_name} {sizes}{recompute}{order}"
