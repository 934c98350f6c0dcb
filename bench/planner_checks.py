"""What the sections of planner_accuracy.py share: a check, the published tables, the
planner's costs and plans."""

import csv
import json
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_2bw.base.files import read_yaml
from megatron_2bw.tools.planner.cost.simulated import Cost
from megatron_2bw.tools.planner.descriptions import cluster
from megatron_2bw.tools.planner.descriptions.model import Model
from megatron_2bw.tools.planner.descriptions.plan import Plan
from megatron_2bw.tools.planner.find.search import Search
from megatron_2bw.tools.planner.find.space import Space

MEASURED = Path(__file__).resolve().parent / "measured"
CLAIMS = read_yaml(MEASURED / "claims.yaml")
# The paper's system: no tensor parallelism, no sharded optimizer, even stages, every
# layer recomputed or none, and the warm-up of 1F1B.
PAPER = Space(
    512,
    schedules=("2bw",),
    tensor=(1,),
    recompute=("none", "full"),
    memory=("two-slots",),
    distributed_optimizer=(False,),
    virtual=(1,),
    uneven=False,
    extra_warmup=False,
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
    rows: list[dict]
    assumes: str


def check(claim: str, holds: bool, result: str, rows: list[dict]) -> Check:
    """A check of an entry of claims.yaml."""
    spec = CLAIMS[claim]
    return Check(
        spec["name"],
        spec["source"],
        spec["bar"],
        bool(holds),  # NumPy's is no JSON
        result,
        rows,
        spec["assumes"],
    )


def within(claim: str, rows: list[dict]) -> Check:
    """Whether the relative error of each row, apart from rows that the planner was
    fitted to, is small enough."""
    spec = CLAIMS[claim]
    column = spec.get("column", "error")
    worst = 0.0
    for row in rows:
        if not row.get("fitted to"):
            worst = max(worst, abs(row[column]))
    shown = rows if spec.get("shown", True) else []
    holds = worst <= spec["limit"]
    return check(claim, holds, f"largest error {worst:.1%}", shown)


def compared(
    measured: float, predicted: float, unit: str, digits: int
) -> dict[str, float]:
    """The end of a row: both values, the predicted one rounded, and its relative
    error."""
    return {
        f"measured {unit}": measured,
        f"predicted {unit}": round(predicted, digits),
        "error": relative_error(predicted, measured),
    }


def relative_error(predicted: float, measured: float) -> float:
    return round(predicted / measured - 1, 3)


def table(name: str) -> list[SimpleNamespace]:
    """The rows of a published table: their cells, and the model and the plan that these
    describe."""
    with open(MEASURED / name, newline="") as file:
        return list(map(described_row, csv.DictReader(file)))


def described_row(cells: dict[str, str]) -> SimpleNamespace:
    row = SimpleNamespace()
    for column, text in cells.items():
        setattr(row, column, typed(text))
    if "layers" in cells:
        row.model = fields_of(Model, row)
    if "microbatches" in cells:
        row.plan = fields_of(Plan, row)
    return row


def typed(text: str) -> Any:
    """A number, true or false, or else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def fields_of(kind: type, row: SimpleNamespace) -> Any:
    """The dataclass of the row's cells with names of its fields."""
    values = {}
    for field in fields(kind):
        if hasattr(row, field.name):
            values[field.name] = getattr(row, field.name)
    return kind(**values)


def a100_cost(model: Model, gpus: int) -> Cost:
    """The cost on servers of 8 A100-80GB, with Megatron of that time: no flash
    attention, blocking exchanges."""
    servers = cluster.preset("dgx-a100-80", -(-gpus // 8))
    return Cost(model, servers, "bf16", flash=False, old_exchange=True)


def best(cost: Cost, space: Space) -> Plan | None:
    for _, plan in Search(cost, space):
        return plan
    return None


def throughput(cost: Cost, plan: Plan) -> float:
    return plan.global_batch / cost.seconds(plan)
