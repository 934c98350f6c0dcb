"""Measured runs as models and plans: the rows of CSV files, and the logs of real runs.

Invariant: a run has a legal plan and a positive time; UserError names the file, and the
line or the argument.
"""

from __future__ import annotations

import csv
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megatron_2bw.base import run_log
from megatron_2bw.base.errors import UserError, file_errors
from megatron_2bw.run.flags.unsupported import layout_stages
from megatron_2bw.schedules import SCHEDULE_NAMES
from megatron_2bw.tools.planner.descriptions import model as models
from megatron_2bw.tools.planner.descriptions import plan as plans
from megatron_2bw.tools.planner.descriptions.inputs import dense_layers
from megatron_2bw.tools.planner.descriptions.model import Model
from megatron_2bw.tools.planner.descriptions.plan import Plan
from megatron_2bw.tools.planner.descriptions.reading import (
    Amount,
    Count,
    Described,
    Positive,
    described,
)
from megatron_2bw.tools.planner.find.legality import violations

COLUMNS = (
    "layers",
    "hidden",
    "heads",
    "sequence",
    "tensor",
    "depth",
    "width",
    "microbatch",
    "global_batch",
    "seconds",
)
LAYOUT = "pipeline_model_parallel_layout"
LOGS = ("*.log", "*.out", "*.txt")
# of a log: the first includes loading, the second the first, the third the first late
# step
WARMUP_LINES = 3


@dataclass(frozen=True)
class Run:
    """A measured run: seconds per iteration of a model's plan, on the plan's number of
    GPUs.

    memory  GiB that torch allocated on the heaviest stage's GPUs at most; 0 if unknown
    """

    model: Model
    plan: Plan
    seconds: float
    precision: str = "bf16"
    flash: bool = False
    memory: float = 0.0


@dataclass(frozen=True)
class _Row(Described):
    """What a table's row holds apart from the model and the plan. overlap: of the
    reduction with the last backward."""

    global_batch: Count
    seconds: Positive
    precision: str = "bf16"
    flash: bool = False
    overlap: bool = True
    memory_gib: Amount = 0.0


# The columns of a table, by what they describe.
MODEL, PLAN, REST = (
    {entry.name: entry.type for entry in fields(kind)} for kind in (Model, Plan, _Row)
)
OPTIONAL = [
    name
    for name in (MODEL | PLAN | REST)
    if name not in (*COLUMNS, "name", "microbatches")
]


def read(paths: Sequence[Path]) -> list[Run]:
    """The runs of CSV files, of logs, and of folders: their logs with Megatron's
    arguments, else their `output`."""
    found: list[Run] = []
    for path in paths:
        if path.is_dir():
            records = sorted({log.parent for log in path.rglob("rank-0.txt")})
            logs = sorted(
                {
                    log
                    for name in LOGS
                    for log in path.rglob(name)
                    if log.parent not in records
                }
            )
            logs = [log for log in logs if _arguments(_text(log), log)] or records
            found += map(read_log, logs)
            if not logs:
                raise UserError(
                    f"{path}: no log with Megatron's arguments ({', '.join(LOGS)})"
                )
        else:
            found += [read_log(path)] if f"*{path.suffix}" in LOGS else read_runs(path)
    return found


def read_runs(path: Path) -> list[Run]:
    """Runs from a CSV file with COLUMNS and any of OPTIONAL. UserError names the wrong
    line and column."""
    with file_errors(str(path)), open(path, encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise UserError(f"{path}: no rows; expected a header with {', '.join(COLUMNS)}")
    missing, unknown = set(COLUMNS) - set(rows[0]), set(rows[0]) - {*COLUMNS, *OPTIONAL}
    if missing or unknown:
        what = (
            f"the column {sorted(missing)[0]} is missing"
            if missing
            else f"unknown column {sorted(unknown)[0]}"
        )
        raise UserError(f"{path}: {what} (known: {', '.join([*COLUMNS, *OPTIONAL])})")
    return [_run(row, f"{path}, line {line}") for line, row in enumerate(rows, 2)]


def _run(row: Mapping[str, Any], where: str) -> Run:
    cells = {
        name: _typed(str(cell), PLAN.get(name, ""))
        for name, cell in row.items()
        if cell not in (None, "")
    }
    rest = described(
        _Row, {name: cell for name, cell in cells.items() if name in REST}, where
    )
    try:
        model = described(
            Model,
            {"name": "run"} | {name: cells[name] for name in MODEL if name in cells},
            where,
        )
        cells = {"schedule": "megatron", "microbatches": 1} | cells
        plan = described(
            Plan, {name: cells[name] for name in PLAN if name in cells}, where
        )
        plan = plan.changed(
            microbatches=rest.global_batch // plan.global_batch,
            gpipe_round=plan.gpipe_round or None,
        )
        if plan.global_batch != rest.global_batch:
            raise UserError(
                f"global_batch {rest.global_batch} is not a multiple of microbatch × width"
            )
        if plan.schedule not in SCHEDULE_NAMES:
            raise UserError(
                f"schedule {plan.schedule} is not one of {', '.join(SCHEDULE_NAMES)}"
            )
        if not rest.overlap and plan.schedule == "megatron" and plan.width > 1:
            if plan.virtual > 1:
                raise UserError(
                    "interleaved stages are planned with --overlap-grad-reduce only"
                )
            # the same order of computation, and no overlap
            plan = plan.changed(schedule="pipedream-flush")
        for cause in violations(plan, model, plan.gpus, rest.precision):
            raise UserError(cause)
    except UserError as error:
        raise UserError(f"{where}: {str(error).removeprefix(f'{where}: ')}") from None
    return Run(model, plan, rest.seconds, rest.precision, rest.flash, rest.memory_gib)


def _typed(cell: str, kind: str) -> Any:
    """A cell; a tuple's is a list of numbers with blanks between them (zeros are
    none)."""
    if kind == "tuple[int, ...]":
        return cell.split() if cell.strip("0 ") else []
    return int(cell) if kind == "int | str" and cell.isdigit() else cell


# --- logs
# --------------------------------------------------------------------------------------

# A row's column by Megatron's argument; a missing one, or None, leaves the column's
# default.
ARGUMENTS = {
    argument: name
    for name, argument in (models.ARGUMENTS | plans.ARGUMENTS).items()
    if name != "groups"
}
ARGUMENTS |= {"overlap_grad_reduce": "overlap"}
_ARGUMENT = re.compile(r"^(?:\[[^\]\n]*\]:? ?)? +(\w+) \.{3,} (.*?) *$", re.MULTILINE)


def _text(path: Path) -> str:
    """Of a log, or of all ranks of a run's `output`."""
    with file_errors(str(path)):
        files = sorted(path.glob("rank-*.txt")) if path.is_dir() else [path]
        return "\n".join(file.read_text(errors="replace") for file in files)


def _arguments(log: str, path: Path) -> dict[str, str]:
    """Megatron's arguments by name: as the log has them, or the file that it names,
    also where its folder was moved."""
    named = re.search(r"> output: (.+\.txt) has all", log)
    places = (Path(named[1]), *sorted(path.parent.rglob("rank-0.txt"))) if named else ()
    for text in (log, *(_text(place) for place in places if place.is_file())):
        begun, ended = (
            text.rfind("--- arguments ---"),
            text.rfind("--- end of arguments ---"),
        )
        if 0 <= begun < ended:
            return dict(_ARGUMENT.findall(text[begun:ended]))
    return {}


def read_log(path: Path) -> Run:
    """The run of a log or of a run's `output`: the median time of its iterations in the
    steady state, its peak memory.

    UserError if it has no arguments, or too few iterations.
    """
    log = _text(path)
    given = _arguments(log, path)
    if not given:
        raise UserError(
            f"{path}: no arguments of Megatron: give the run's --save folder, or run with --verbose"
        )
    if given.get("multi_latent_attention") == "True":
        raise UserError(f"{path}: runs with --multi-latent-attention are not read")
    times = [line.milliseconds for line in run_log.training(log) if line.milliseconds][
        WARMUP_LINES:
    ]
    if not times:
        raise UserError(f"{path}: fewer than {WARMUP_LINES + 1} lines of iterations")
    row = {
        name: _cell(given[argument])
        for argument, name in ARGUMENTS.items()
        if argument in given
    }
    row |= {
        "seconds": statistics.median(times) / 1e3,
        "kind": "bert" if "sop loss" in log else "gpt",
        "precision": next(
            (name for name in ("bf16", "fp16") if given.get(name) == "True"), "fp32"
        ),
        "groups": given.get("num_query_groups", 0)
        if given.get("group_query_attention") == "True"
        else 0,
        "dense": dense_layers(given.get("moe_layer_freq", "1")),
        "tied": given.get("untie_embeddings_and_output_weights") != "True",
        "rms_norm": given.get("normalization") == "RMSNorm",
        "rotary": given.get("position_embedding_type") == "rope",
        "dropout": any(
            given.get(name) != "0.0" for name in ("attention_dropout", "hidden_dropout")
        ),
        "flash": given.get("transformer_impl") != "local"
        and "unfused" not in given.get("attention_backend", ""),
        "extrapolate": given.get("two_bw_correction", "none") != "none",
        "stages": " ".join(
            str(stage.count("t"))
            for stage in layout_stages(_cell(given.get(LAYOUT, "")))
        ),
        "grad_reduce_in_bf16": given.get("grad_reduce_in_bf16") == "True",
    }
    block = given.get("recompute_method") == "block"
    row["recompute_block" if block else "recompute_layers"] = (
        _cell(given.get("recompute_num_layers", "")) or 1
    )
    # no layout, or one of interleaved stages
    if len(row["stages"].split()) != int(row["depth"]):
        row["stages"] = ""
    return _run(
        row | {"memory_gib": round(_memory(log, _run(row, str(path)).plan), 3)},
        str(path),
    )


def _memory(log: str, plan: Plan) -> float:
    """Peak GiB of the heaviest stage; 0 if the log lacks a stage.

    This project's schedules print all stages in each line of an iteration. With
    Megatron's own schedule the first rank of each data-parallel group prints its peak
    after the second iteration.
    """
    ours = [line.stage_memory for line in run_log.training(log) if line.stage_memory]
    line = r"\[Rank (\d+)\] \(after \d+ iterations\) memory \(MB\) \|[^\n]*?max allocated: ([\d.]+)"
    ranks = {
        int(rank): float(mebibytes) / 1024 for rank, mebibytes in re.findall(line, log)
    }
    whole = (
        len(ours[-1]) == plan.depth
        if ours
        else len(ranks) == plan.tensor * plan.context * plan.depth
    )
    return max(ours[-1] if ours else ranks.values()) if whole else 0.0


def _cell(value: str) -> str:
    """An argument's value as a cell of a CSV file."""
    return "" if value == "None" else re.sub(r"[\[\](),]+", " ", value).strip()
