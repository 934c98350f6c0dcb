"""megatron-2bw gpu-check: runs the rows one after the other, keeps each result at once,
prints it.

Invariant: one row that fails or hangs does not stop the others.
"""

import functools
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_2bw.base.command_line import parser_of
from megatron_2bw.base.errors import file_errors
from megatron_2bw.base.files import write_json
from megatron_2bw.base.local_ranks import WorldError, WorldTimeout
from megatron_2bw.base.run_log import cause
from megatron_2bw.run.flags.rule import installed
from megatron_2bw.run.start import doctor
from megatron_2bw.tools.gpu_check.rows import ROWS, Check, Failed, Row

OK = "ok"
FAILED = "FAILED"
HANGS = "hangs"
SKIPPED = "skipped"

Result = dict[str, Any]  # of a row

NEEDS = {"cuda": "a GPU"}  # in words

say = functools.partial(print, flush=True)


def main(argv: Sequence[str], prog: str) -> int:
    names = [row.name for row in ROWS]
    parser = parser_of(prog, __file__)
    parser.add_argument(
        "--row",
        action="append",
        choices=names,
        metavar="NAME",
        help="only this row, may be repeated: %(choices)s",
    )
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.device_count():
        parser.error("--device cuda: torch finds no GPU here")
    rows = [row for row in ROWS if row.name in (options.row or names)]
    return run_rows(rows, options.device, options.json)


def run_rows(rows: Sequence[Row], device: str, path: Path) -> int:
    """Run `rows` and print their results and how many there are. 0 if no row has
    failed."""
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    check = Check("cuda" if gpus else "cpu")
    os.environ["MEGATRON_2BW_WORLD_DEVICE"] = check.device
    about = machine(check, gpus)
    results = {}
    for name, value in about.items():
        say(f"{name}: {value}")
    for row in rows:
        clock = time.strftime("%H:%M:%S")
        say(f"{clock} {row.name} (at most {row.seconds:.0f} s) ...")
        results[row.name] = {"what": row.what} | result_of(row, check)
        with file_errors(f"--json {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, {"machine": about, "rows": results})
        say(f"         {brief(results[row.name])}")
    kinds = [result["result"] for result in results.values()]
    counts = [f"{kinds.count(kind)} {kind}" for kind in (OK, FAILED, HANGS, SKIPPED)]
    say(f"{', '.join(counts)}\nwrote {path}")
    return int(FAILED in kinds or HANGS in kinds)


def result_of(row: Row, check: Check) -> Result:
    """Run a row: its result, its figures or the reason, its seconds."""
    available = {"cuda": check.device == "cuda"}
    for need in row.needs:
        if not available.get(need, installed(need)):
            why = f"needs {NEEDS.get(need, need)}"
            return {"result": SKIPPED, "why": why}
    begun = time.monotonic()
    check.deadline = begun + row.seconds
    try:
        result = {"result": OK, "figures": row.run(check)}
    except WorldTimeout as error:
        why = f"not over after {row.seconds:.0f} s"
        result = {"result": HANGS, "why": why, "log": str(error)}
    except Exception as error:
        result = {"result": FAILED, "why": reason(error), "log": str(error)}
    return result | {"seconds": round(time.monotonic() - begun, 1)}


def reason(error: Exception) -> str:
    """One line. Of ranks that failed, also the line of their logs that says why."""
    line, _, logs = str(error).strip().partition("\n")
    if isinstance(error, WorldError):
        line = f"{line}; {cause(logs)}"
    elif not isinstance(error, Failed):
        line = f"{type(error).__name__}: {line}"
    return line[:300]


def machine(check: Check, gpus: int) -> dict[str, str]:
    """What `megatron-2bw doctor` prints; fills in the memory of `check`."""
    if gpus:
        properties = torch.cuda.get_device_properties(0)
        check.gib = round(properties.total_memory / 2**30, 1)
        device = f"{gpus} GPUs"
    else:
        device = "the CPU: figures of time and memory mean nothing"
    about = {"device": device}
    for _, name, version, meaning in doctor.findings():
        about[name] = f"{version} {meaning}".rstrip()
    return about


def brief(result: Result) -> str:
    """Result and figures, or the reason, in one line."""
    figures = []
    for name, value in result.get("figures", {}).items():
        text = f"{value:.4g}" if isinstance(value, float) else value
        figures.append(f"{name} {text}")
    return f"{result['result']}  {result.get('why', ', '.join(figures))}"
