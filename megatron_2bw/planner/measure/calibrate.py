"""Fits a cluster's constants to a few measured iteration times. NumPy only.

Gauss-Newton on the logarithms of the times, with the preset as a prior: a constant on which no run depends keeps its
value. Invariant: the constants keep their physical meaning, so one fit serves all plans and models.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from megatron_2bw.errors import UserError, file_errors
from megatron_2bw.files import write_whole
from megatron_2bw.planner.cost.simulated import Cost
from megatron_2bw.planner.describe.cluster import Cluster
from megatron_2bw.planner.describe.model import LARGEST, Model
from megatron_2bw.planner.describe.plan import RECOMPUTE, Plan
from megatron_2bw.planner.find.legality import violations
from megatron_2bw.schedules import SCHEDULE_NAMES

DEVICE = ("gemm_efficiency", "memory_efficiency", "layer_launch_us", "collective_launch_us", "exchange_us", "step_us")
LINK = ("gb_s", "latency_us")
NOISE, PRIOR = 0.1, 0.5  # standard deviations of a time about the model's and a constant about the preset's, in logs
SHARE_LIMIT = 0.95  # of the peak and of the bandwidth


@dataclass(frozen=True)
class Run:
    """A measured run: seconds per iteration of a model's plan, on the plan's number of GPUs."""

    model: Model
    plan: Plan
    seconds: float
    precision: str = "bf16"
    flash: bool = False


def predict(cluster: Cluster, runs: Sequence[Run]) -> list[float]:
    """Seconds per iteration of each run on `cluster`, with the run's number of servers."""
    costs: dict[tuple, Cost] = {}
    seconds = []
    for run in runs:
        servers = -(-run.plan.gpus // cluster.gpus_per_server)
        key = (run.model, servers, run.precision, run.flash)
        if key not in costs:
            costs[key] = Cost(run.model, replace(cluster, servers=servers), run.precision, run.flash)
        seconds.append(costs[key].seconds(run.plan))
    return seconds


def calibrate(cluster: Cluster, runs: Sequence[Run], iterations: int = 15) -> Cluster:
    """`cluster` with the constants that fit `runs` best. Links between servers are fitted only if runs use them."""
    import numpy as np

    names = [("device", name) for name in DEVICE] + [("inside", name) for name in LINK]
    if cluster.device.attention_efficiency and any(run.flash for run in runs):
        names.append(("device", "attention_efficiency"))
    if any(run.plan.gpus > cluster.gpus_per_server for run in runs):
        names += [("between", name) for name in LINK]
    start = np.array([getattr(getattr(cluster, part), name) for part, name in names])
    logs = np.log([run.seconds for run in runs])

    def build(x) -> Cluster:
        built = cluster
        for (part, name), value in zip(names, start * np.exp(x)):
            old = getattr(built, part)
            changed = {name: float(min(value, SHARE_LIMIT) if name.endswith("efficiency") else value)}
            if name == "gb_s":  # the rates of fewer GPUs of a server change alike
                changed |= {few: getattr(old, few) * changed[name] / old.gb_s for few in ("pair_gb_s", "four_gb_s")}
            built = replace(built, **{part: replace(old, **changed)})
        return built

    def residuals(x):
        return np.concatenate([(np.log(predict(build(x), runs)) - logs) / NOISE, x / PRIOR])

    x, damping, small = np.zeros(len(names)), 1e-2, 1e-3
    errors = residuals(x)
    for _ in range(iterations):
        slope = np.stack([(residuals(x + small * unit) - errors) / small for unit in np.eye(len(x))], axis=1)
        while damping < 1e6:
            change = np.linalg.solve(slope.T @ slope + damping * np.eye(len(x)), -slope.T @ errors)
            tried = residuals(x + change)
            if tried @ tried < errors @ errors:
                x, errors, damping = x + change, tried, damping / 3
                break
            damping *= 3
        else:
            break
    fitted = build(x)
    return replace(fitted, device=replace(fitted.device, calibration=f"fitted to {len(runs)} measured runs"))


COLUMNS = ("layers", "hidden", "heads", "sequence", "tensor", "depth", "width", "microbatch", "global_batch", "seconds")
OPTIONAL = {"vocab": 50257, "recompute": "none", "schedule": "megatron", "virtual": 1, "precision": "bf16", "flash": 0}
OPTIONAL |= {"kind": "gpt", "ffn": 0, "groups": 0, "gated": 0}
SWITCHES = ("sequence_parallel", "distributed_optimizer", "pipeline_inside")
OPTIONAL |= dict.fromkeys(SWITCHES, 0)
REST = "more cells than the header has columns"


def read_runs(path: Path) -> list[Run]:
    """Runs from a CSV file with COLUMNS and any of OPTIONAL. UserError names the wrong line and column."""
    try:
        with file_errors(str(path)), open(path, encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file, restkey=REST))
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: not a readable CSV file ({error})") from None
    if not rows:
        raise UserError(f"{path}: no rows; expected a header with {', '.join(COLUMNS)}")
    missing, unknown = set(COLUMNS) - set(rows[0]), set(rows[0]) - set(COLUMNS) - set(OPTIONAL) - {REST}
    if missing or unknown:
        what = f"the column {sorted(missing)[0]} is missing" if missing else f"unknown column {sorted(unknown)[0]}"
        raise UserError(f"{path}: {what} (known: {', '.join([*COLUMNS, *OPTIONAL])})")
    return [_run(row, f"{path}, line {line}") for line, row in enumerate(rows, 2)]


def _run(row: dict[str, str], where: str) -> Run:
    if row.get(REST):
        raise UserError(f"{where}: {REST}")
    values = {name: _value(row, name, where) for name in [*COLUMNS, *OPTIONAL]}
    each = values["microbatch"] * values["width"]
    if values["global_batch"] % each:
        raise UserError(f"{where}: global_batch must be a multiple of microbatch × width, {each}")
    shape = {f.name: values[f.name] for f in fields(Model) if f.name in values}
    sizes = (values[name] for name in ("tensor", "depth", "width", "microbatch"))
    choices = (values[name] for name in ("recompute", "schedule", "virtual"))
    plan = Plan(*sizes, values["global_batch"] // each, *choices, **{name: bool(values[name]) for name in SWITCHES})
    try:
        model = Model("run", **shape | {"gated": bool(values["gated"])})
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    broken = violations(plan, model, plan.gpus, values["precision"])
    if broken:
        raise UserError(f"{where}: {broken[0].message}")
    return Run(model, plan, values["seconds"], values["precision"], bool(values["flash"]))


WORDS = {
    "recompute": RECOMPUTE,
    "schedule": SCHEDULE_NAMES,
    "precision": ("bf16", "fp16", "fp32"),
    "kind": ("gpt", "bert"),
}


def _value(row: dict[str, str], name: str, where: str) -> str | int | float:
    text = (row.get(name) or str(OPTIONAL.get(name, ""))).strip()
    if name in WORDS:
        if text not in WORDS[name]:
            raise UserError(f"{where}: {name} is {text!r}, not one of {', '.join(WORDS[name])}")
        return text
    try:
        number = float(text) if name == "seconds" else int(text)
    except ValueError:
        raise UserError(f"{where}: {name} is {text!r}, not a number") from None
    least = 0 if OPTIONAL.get(name) == 0 else 1 if name != "seconds" else 1e-12
    if not least <= number < LARGEST:
        raise UserError(f"{where}: {name} must be positive and below {LARGEST:g}, not {text}")
    return number


def write_predictions(runs: Path, predicted: Sequence[float], path: Path) -> None:
    """Write the table of `runs` with a column predicted_seconds."""
    with open(runs, encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    text = io.StringIO()
    writer = csv.DictWriter(text, [*rows[0], "predicted_seconds"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(row | {"predicted_seconds": f"{seconds:.6g}"} for row, seconds in zip(rows, predicted))
    with file_errors(f"--predictions {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.getvalue())
