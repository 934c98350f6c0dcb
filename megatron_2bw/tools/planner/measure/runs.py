"""Measured runs as models and plans: the rows of CSV files, and the logs of real runs.

Invariant: a run has a legal plan and a positive time; UserError names the file, and the
line or the argument.
"""

import ast
import contextlib
import csv
import re
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megatron_2bw.base import run_log
from megatron_2bw.base.errors import Parser, UserError, file_errors
from megatron_2bw.run.flags.project_flags import late
from megatron_2bw.run.flags.unsupported import layout_stages
from megatron_2bw.schedules import SCHEDULE_NAMES, TwoBW
from megatron_2bw.tools.planner.descriptions import plan as plans
from megatron_2bw.tools.planner.descriptions.inputs import add_model_flags, model_of
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
    "layers hidden heads sequence tensor depth width microbatch global_batch seconds"
).split()
LOGS = ("*.log", "*.out", "*.txt")
# of a log: the first includes loading, the second the first, the third the first late
# step
WARMUP_LINES = 3


@dataclass(frozen=True)
class MeasuredRun:
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
MODEL = {entry.name: entry.type for entry in fields(Model)}
PLAN = {entry.name: entry.type for entry in fields(Plan)}
REST = {entry.name: entry.type for entry in fields(_Row)}
_OTHERS = {*COLUMNS, "name", "microbatches"}
OPTIONAL = [name for name in MODEL | PLAN | REST if name not in _OTHERS]


def is_log(path: Path) -> bool:
    """Whether the path is a log, or a folder of logs."""
    return path.suffix != ".csv"


def read(paths: Sequence[Path]) -> list[MeasuredRun]:
    """The runs of CSV files, of logs, and of folders: their runs' `output`, or their
    logs with Megatron's arguments."""
    runs = []
    for path in paths:
        if not is_log(path):
            runs += read_runs(path)
        elif path.is_dir():
            runs += map(read_log, _logs(path))
        else:
            runs.append(read_log(path))
    return runs


def _logs(folder: Path) -> list[Path]:
    records = sorted({log.parent for log in folder.rglob("rank-0.txt")})
    logs = []
    for name in LOGS:
        for log in sorted(folder.rglob(name)):
            if _arguments(_text(log), log):
                logs.append(log)
    if not logs and not records:
        raise UserError(
            f"{folder}: no log with Megatron's arguments ({', '.join(LOGS)})"
        )
    return records or logs


def read_runs(path: Path) -> list[MeasuredRun]:
    """Runs from a CSV file with COLUMNS and any of OPTIONAL. UserError names the wrong
    line and column."""
    with file_errors(str(path)), open(path, encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise UserError(f"{path}: no rows; expected a header with {', '.join(COLUMNS)}")
    missing = set(COLUMNS) - set(rows[0])
    unknown = set(rows[0]) - {*COLUMNS, *OPTIONAL}
    for name in sorted(missing) + sorted(unknown):
        fault = "is missing" if name in missing else "is unknown"
        known = ", ".join([*COLUMNS, *OPTIONAL])
        raise UserError(f"{path}: the column {name} {fault} (known: {known})")
    runs = []
    for line, row in enumerate(rows, 2):
        runs.append(_run(row, f"{path}, line {line}"))
    return runs


def _run(row: Mapping[str, str], where: str) -> MeasuredRun:
    cells = {"name": "run", "schedule": "megatron", "microbatches": 1}
    for name, cell in row.items():
        if cell:
            cells[name] = _typed(cell, PLAN.get(name, ""))
    model_cells = _chosen(cells, MODEL)
    plan_cells = _chosen(cells, PLAN)
    rest = described(_Row, _chosen(cells, REST), where)
    with _errors_of(where):
        model = described(Model, model_cells, where)
        plan = described(Plan, plan_cells, where)
        return _measured(model, plan, rest)


@contextlib.contextmanager
def _errors_of(where: str) -> Iterator[None]:
    """UserErrors begin with `where`."""
    try:
        yield
    except UserError as error:
        cause = str(error).removeprefix(f"{where}: ")
        raise UserError(f"{where}: {cause}") from None


def _measured(model: Model, plan: Plan, rest: _Row) -> MeasuredRun:
    plan = _checked(plan, rest)
    for cause in violations(plan, model, plan.gpus, rest.precision):
        raise UserError(cause)
    return MeasuredRun(
        model=model,
        plan=plan,
        seconds=rest.seconds,
        precision=rest.precision,
        flash=rest.flash,
        memory=rest.memory_gib,
    )


def _chosen(cells: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    chosen = {}
    for name in names:
        if name in cells:
            chosen[name] = cells[name]
    return chosen


def _checked(plan: Plan, rest: _Row) -> Plan:
    """The plan with the row's global batch and overlap."""
    plan = plan.changed(microbatches=rest.global_batch // plan.global_batch)
    if plan.global_batch != rest.global_batch:
        raise UserError(
            f"global_batch {rest.global_batch} is not a multiple of microbatch × width"
        )
    if plan.schedule not in SCHEDULE_NAMES:
        known = ", ".join(SCHEDULE_NAMES)
        raise UserError(f"schedule {plan.schedule} is not one of {known}")
    if rest.overlap or plan.schedule != "megatron" or plan.width == 1:
        return plan
    if plan.virtual > 1:
        raise UserError(
            "interleaved stages are planned with --overlap-grad-reduce only"
        )
    # the same order of computation, and no overlap
    return plan.changed(schedule="pipedream-flush")


def _typed(cell: str, kind: str) -> Any:
    """A cell; a tuple's is a list of numbers with blanks between them."""
    return cell.split() if kind == "tuple[int, ...]" else _value(cell)


# --- logs
# --------------------------------------------------------------------------------------

_ARGUMENT = re.compile(r"^(?:\[[^\]\n]*\]:? ?)? +(\w+) \.{3,} (.*?) *$", re.MULTILINE)


def _text(path: Path) -> str:
    """The text of a log, or of all ranks of a run's `output`."""
    with file_errors(str(path)):
        files = [path]
        if path.is_dir():
            files = sorted(path.glob("rank-*.txt"))
        return "\n".join(file.read_text(errors="replace") for file in files)


def _texts(log: str, path: Path) -> Iterator[str]:
    """The log, and the file that it names, also where its folder was moved."""
    yield log
    named = re.search(r"> output: (.+\.txt) has all", log)
    if named:
        for place in (Path(named[1]), *sorted(path.parent.rglob("rank-0.txt"))):
            if place.is_file():
                yield _text(place)


def _arguments(log: str, path: Path) -> dict[str, Any]:
    """Megatron's arguments by name."""
    for text in _texts(log, path):
        begun = text.rfind("--- arguments ---")
        ended = text.rfind("--- end of arguments ---")
        if 0 <= begun < ended:
            found = _ARGUMENT.findall(text[begun:ended])
            return {name: _value(value) for name, value in found}
    return {}


def _value(text: str) -> Any:
    """A printed value: of Python, or else the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def read_log(path: Path) -> MeasuredRun:
    """The run of a log or of a run's `output`: the median time of its iterations in the
    steady state, its peak memory.

    UserError if it has no arguments, or too few iterations.
    """
    log = _text(path)
    arguments = _arguments(log, path)
    given = arguments.get
    if not arguments:
        raise UserError(
            f"{path}: no arguments of Megatron: give the run's --save folder, or run with --verbose"
        )
    if given("recompute_method") == "block":
        raise UserError(f"{path}: runs with --recompute-method block are not read")
    times = []
    for line in run_log.training(log):
        if line.milliseconds:
            times.append(line.milliseconds)
    if len(times) <= WARMUP_LINES:
        raise UserError(f"{path}: fewer than {WARMUP_LINES + 1} lines of iterations")
    precision = "fp32"
    for name in ("fp16", "bf16"):
        if given(name):
            precision = name
    unfused = given("attention_backend") == "AttnBackend.unfused"
    plan = _plan(arguments, str(path))
    rest = _Row(
        given("global_batch_size"),
        statistics.median(times[WARMUP_LINES:]) / 1e3,
        precision,
        flash=given("transformer_impl") != "local" and not unfused,
        overlap=bool(given("overlap_grad_reduce", True)),
        memory_gib=_memory(log, plan),
    )
    with _errors_of(str(path)):
        return _measured(_model(arguments, "sop loss" in log), plan, rest)


def _model(arguments: dict[str, Any], bert: bool) -> Model:
    parser = Parser()
    add_model_flags(parser)
    options = parser.parse_args([])
    options.bert = bert
    options.disable_bias_linear = not arguments.get("add_bias_linear", True)
    for name, value in arguments.items():
        if name in options and value is not None:
            setattr(options, name, value)
    return model_of(options)


def _plan(arguments: dict[str, Any], where: str) -> Plan:
    """The plan, without the number of its microbatches."""
    entries = {"microbatches": 1}
    for name, argument in plans.ARGUMENTS.items():
        value = arguments.get(argument)
        if name in PLAN and value is not None:
            entries[name] = value
    replica = entries["microbatch"] * entries["width"]
    batch = arguments["global_batch_size"] // replica
    schedule = TwoBW(late(str(entries.get("late", "all"))))
    correction = arguments.get("two_bw_correction", "none")
    entries |= {
        "late": None if schedule.late == "all" else schedule.late_of(batch),
        "corrected": correction != "none",
        "recompute_layers": arguments.get("recompute_num_layers") or 1,
        "grad_reduce_in_bf16": arguments.get("grad_reduce_in_bf16", False),
    }
    layout = arguments.get("pipeline_model_parallel_layout")
    if layout:
        stages = [stage.count("t") for stage in layout_stages(layout)]
        # else they are interleaved
        if len(stages) == entries["depth"]:
            entries["stages"] = stages
    return described(Plan, entries, where)


def _memory(log: str, plan: Plan) -> float:
    """Peak GiB of the heaviest stage, of which this project's schedules print all in
    each line of an iteration; 0 if the log lacks a stage."""
    peaks = []
    for line in run_log.training(log):
        peaks = line.stage_memory or peaks
    return max(peaks) if len(peaks) == plan.depth else 0.0
