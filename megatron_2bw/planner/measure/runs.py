"""Measured runs as models and plans: the rows of CSV files, and the logs of real runs.

Invariant: a run has a legal plan and a positive time; UserError names the file, and the line or the argument.
"""

from __future__ import annotations

import csv
import io
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from megatron_2bw import run_log
from megatron_2bw.errors import UserError, file_errors
from megatron_2bw.files import write_whole
from megatron_2bw.models import model as models
from megatron_2bw.models import plan as plans
from megatron_2bw.models.inputs import NUMERICS
from megatron_2bw.models.model import Model
from megatron_2bw.models.plan import RECOMPUTE, Plan
from megatron_2bw.planner.find.legality import PRECISIONS, violations
from megatron_2bw.schedules import SCHEDULE_NAMES
from megatron_2bw.sizes import layout_stages

COLUMNS = ("layers", "hidden", "heads", "sequence", "tensor", "depth", "width", "microbatch", "global_batch", "seconds")
OPTIONAL = {"vocab": 50257, "recompute": "none", "schedule": "megatron", "virtual": 1, "precision": "bf16", "flash": 0}
OPTIONAL |= {"kind": "gpt", "ffn": 0, "groups": 0, "head_size": 0, "gated": 0, "rms_norm": 0, "rotary": 0, "tied": 1}
OPTIONAL |= {"bias": 1, "dropout": 1, "sequence_parallel": 0, "distributed_optimizer": 0, "pipeline_inside": 0}
OPTIONAL |= {"first": 0, "last": 0, "gradient_slots": 2, "extra_warmup": "0", "extrapolate": 0, "gpipe_round": 0}
OPTIONAL |= {"recompute_layers": 1, "overlap": 1, "memory_gib": 0, "context": 1, "stages": "", "recompute_block": 0}
OPTIONAL |= {"recompute_modules": "", "numerics": ""}
LISTS = ("recompute_modules", "numerics")  # words with semicolons between them
SWITCHES = {f.name for kind in (Model, Plan) for f in fields(kind) if f.type == "bool"} | {"flash", "overlap"}
REST = "more cells than the header has columns"
WORDS = {"recompute": RECOMPUTE, "schedule": SCHEDULE_NAMES, "precision": PRECISIONS, "kind": ("gpt", "bert")}
TORCH = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.uint8": "fp8"}
LAYOUT = "pipeline_model_parallel_layout"
LOGS = ("*.log", "*.out", "*.txt")
WARMUP_LINES = 3  # of a log: the first includes loading, the second the first, the third the first late step


@dataclass(frozen=True)
class Run:
    """A measured run: seconds per iteration of a model's plan, on the plan's number of GPUs.

    memory  GiB that torch allocated on the heaviest stage's GPUs at most; 0 if unknown
    row     its cells as a table's row
    """

    model: Model
    plan: Plan
    seconds: float
    precision: str = "bf16"
    flash: bool = False
    memory: float = 0.0
    row: dict[str, object] = field(default_factory=dict, compare=False)


def read(paths: Sequence[Path]) -> list[Run]:
    """The runs of CSV files, of logs, and of the logs in folders."""
    found: list[Run] = []
    for path in paths:
        if path.is_dir():
            logs = sorted({log for name in LOGS for log in path.rglob(name)})
            logs = [log for log in logs if _arguments(_text(log), log)]
            found += [read_log(log) for log in logs]
            if not logs:
                raise UserError(f"{path}: no log with Megatron's arguments ({', '.join(LOGS)})")
        else:
            found += [read_log(path)] if f"*{path.suffix}" in LOGS else read_runs(path)
    return found


# --- CSV -------------------------------------------------------------------------------------------------------------


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


def _run(row: dict[str, object], where: str) -> Run:
    if row.get(REST):
        raise UserError(f"{where}: {REST}")
    values = {name: _value(row, name, where) for name in [*COLUMNS, *OPTIONAL]}
    each = values["microbatch"] * values["width"]
    if values["global_batch"] % each:
        raise UserError(f"{where}: global_batch must be a multiple of microbatch × width, {each}")
    values["microbatches"], values["gpipe_round"] = values["global_batch"] // each, values["gpipe_round"] or None
    if not values["overlap"] and values["schedule"] == "megatron" and values["width"] > 1:
        if values["virtual"] > 1:
            raise UserError(f"{where}: interleaved stages are planned with --overlap-grad-reduce only")
        values["schedule"] = "pipedream-flush"  # the same order of computation, and no overlap
    try:
        model = Model("run", **{f.name: values[f.name] for f in fields(Model) if f.name in values})
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    plan = Plan(**{f.name: values[f.name] for f in fields(Plan)})
    broken = violations(plan, model, plan.gpus, values["precision"])
    if broken:
        raise UserError(f"{where}: {broken[0].message}")
    return Run(model, plan, values["seconds"], values["precision"], values["flash"], values["memory_gib"], row)


def _value(row: dict[str, object], name: str, where: str):
    cell = row.get(name)
    text = str(OPTIONAL.get(name, "") if cell in (None, "") else cell).strip()
    if name in WORDS:
        if text not in WORDS[name]:
            raise UserError(f"{where}: {name} is {text!r}, not one of {', '.join(WORDS[name])}")
        return text
    try:
        if name in LISTS:
            return tuple(word.strip() for word in text.split(";") if word.strip())
        if name in ("extra_warmup", "stages"):  # numbers with blanks between them
            numbers = tuple(int(word) for word in text.split())
            return numbers if any(numbers) and min(numbers) >= 0 and max(numbers) < 1e12 else ()
        number = float(text) if name in ("seconds", "memory_gib") else int(text)
    except ValueError:
        raise UserError(f"{where}: {name} is {text!r}, not a number") from None
    if name in SWITCHES and number in (0, 1):
        return bool(number)
    least = 0 if OPTIONAL.get(name) == 0 else 1 if name != "seconds" else 1e-12
    if name in SWITCHES or not least <= number < 1e12:
        wanted = "0 or 1" if name in SWITCHES else "positive and below 1e12"
        raise UserError(f"{where}: {name} must be {wanted}, not {text}")
    return number


def write_predictions(runs: Sequence[Run], predicted: Sequence[float], path: Path) -> None:
    """Write the rows of `runs` with a column predicted_seconds."""
    text, names = io.StringIO(), dict.fromkeys(name for run in runs for name in run.row)
    writer = csv.DictWriter(text, [*names, "predicted_seconds"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(run.row | {"predicted_seconds": f"{seconds:.6g}"} for run, seconds in zip(runs, predicted))
    with file_errors(f"--predictions {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.getvalue())


# --- logs ------------------------------------------------------------------------------------------------------------

# A row's column by Megatron's argument; a missing one, or None, leaves the column's default.
ARGUMENTS = {argument: name for name, argument in (models.ARGUMENTS | plans.ARGUMENTS).items() if name != "groups"}
ARGUMENTS |= {"overlap_grad_reduce": "overlap"}
# What no plan can express, with the value that a plan has.
UNPLANNED = {"num_experts": "None"}
_ARGUMENT = re.compile(r"^(?:\[[^\]\n]*\]:? ?)? +(\w+) \.{3,} (.*?) *$", re.MULTILINE)


def _text(path: Path) -> str:
    with file_errors(str(path)):
        return path.read_text(errors="replace")


def _arguments(log: str, path: Path) -> dict[str, str]:
    """Megatron's arguments by name: as the log has them, or the file that it names, also where its folder was moved."""
    named = re.search(r"> output: (.+\.txt) has all", log)
    places = (Path(named[1]), *sorted(path.parent.rglob("rank-0.txt"))) if named else ()
    for text in (log, *(_text(place) for place in places if place.is_file())):
        begun, ended = text.rfind("--- arguments ---"), text.rfind("--- end of arguments ---")
        if 0 <= begun < ended:
            return dict(_ARGUMENT.findall(text[begun:ended]))
    return {}


def read_log(path: Path) -> Run:
    """The run of a log: the median time of its iterations in the steady state, and its peak memory."""
    log = _text(path)
    given = _arguments(log, path)
    if not given:
        remedy = "a run writes them to output/rank-0.txt, and prints them with --verbose"
        raise UserError(f"{path}: no arguments of Megatron: {remedy}")
    for name, planned in UNPLANNED.items():
        if given.get(name, planned) != planned:
            raise UserError(f"{path}: {name} is {given[name]}; the planner has plans with {planned} only")
    times = [line.milliseconds for line in run_log.training(log) if line.milliseconds][WARMUP_LINES:]
    if not times:
        raise UserError(f"{path}: fewer than {WARMUP_LINES + 1} lines of iterations")
    row = {name: _cell(given[argument]) for argument, name in ARGUMENTS.items() if argument in given}
    row |= {
        "seconds": statistics.median(times) / 1e3,
        "kind": "bert" if "sop loss" in log else "gpt",
        "precision": _precision(given),
        "groups": given.get("num_query_groups", 0) if given.get("group_query_attention") == "True" else 0,
        "tied": int(given.get("untie_embeddings_and_output_weights") != "True"),
        "rms_norm": int(given.get("normalization") == "RMSNorm"),
        "rotary": int(given.get("position_embedding_type") == "rope"),
        "dropout": int(any(given.get(name) != "0.0" for name in ("attention_dropout", "hidden_dropout"))),
        "flash": int(given.get("transformer_impl") != "local" and "unfused" not in given.get("attention_backend", "")),
        "extrapolate": int(given.get("two_bw_correction", "none") != "none"),
        "stages": " ".join(str(stage.count("t")) for stage in layout_stages(_cell(given.get(LAYOUT, "")))),
        "recompute_modules": ";".join(re.findall(r"\w+", _cell(given.get("recompute_modules", "")))),
        "numerics": ";".join(_numerics(given)),
    }
    block = given.get("recompute_method") == "block"
    row["recompute_block" if block else "recompute_layers"] = _cell(given.get("recompute_num_layers", "")) or 1
    if len(row["stages"].split()) != int(row["depth"]):  # no layout, or one of interleaved stages
        row["stages"] = ""
    run = _run(row, str(path))
    return _run(row | {"memory_gib": round(_memory(log, run.plan), 3)}, str(path))


def _memory(log: str, plan: Plan) -> float:
    """Peak GiB of the heaviest stage; 0 if the log lacks a stage.

    This project's schedules print all stages in each line of an iteration. With Megatron's own schedule the first rank
    of each data-parallel group prints its peak after the second iteration.
    """
    ours = [line.stage_memory for line in run_log.training(log) if line.stage_memory]
    line = r"\[Rank (\d+)\] \(after \d+ iterations\) memory \(MB\) \|[^\n]*?max allocated: ([\d.]+)"
    ranks = {int(rank): float(mebibytes) / 1024 for rank, mebibytes in re.findall(line, log)}
    whole = len(ours[-1]) == plan.depth if ours else len(ranks) == plan.tensor * plan.context * plan.depth
    return max(ours[-1] if ours else ranks.values()) if whole else 0.0


def _precision(given: dict[str, str]) -> str:
    if given.get("fp8", "None") not in ("None", "False"):
        return "fp8"
    return next((name for name in ("bf16", "fp16") if given.get(name) == "True"), "fp32")


def _numerics(given: dict[str, str]) -> list[str]:
    """The plan's `numerics` of a run's arguments, whose floats have torch's names."""
    found = []
    for name, values in NUMERICS.items():
        value = given.get(name[2:].replace("-", "_"), "")
        if not values and value == "True":
            found.append(name)
        kind = TORCH.get(value, value)
        if kind in values[1:] and given.get("use_precision_aware_optimizer") == "True":
            found.append(f"{name} {kind}")
    return found


def _cell(value: str) -> str:
    """An argument's value as a cell of a CSV file."""
    return {"None": "", "True": "1", "False": "0"}.get(value, re.sub(r"[\[\](),]+", " ", value).strip())
