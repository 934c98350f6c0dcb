"""megatron-2bw gpu-check: runs the rows one after the other, keeps each result at once,
prints the table.

Invariant: one row that fails or hangs does not stop the others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_2bw.base.errors import Parser, file_errors
from megatron_2bw.base.files import write_json
from megatron_2bw.base.local_ranks import WorldError, WorldTimeout
from megatron_2bw.base.run_log import cause
from megatron_2bw.run.flags.rule import installed
from megatron_2bw.run.start import doctor
from megatron_2bw.tools.gpu_check.rows import ROWS, Check, Failed, Row

OK, FAILED, HANGS, SKIPPED = "ok", "FAILED", "hangs", "skipped"
BAD = (FAILED, HANGS)


def main(argv: Sequence[str], prog: str) -> int:
    names = ", ".join(row.name for row in ROWS)
    parser = Parser(
        prog=prog,
        description="Checks this project on the GPUs of this machine.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--row",
        action="append",
        metavar="NAME",
        help=f"only this row, may be repeated: {names}",
    )
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="cpu: a tiny model, without figures",
    )
    add(
        "--json",
        type=Path,
        default=Path("out/gpu_check/results.json"),
        metavar="FILE",
        help="the results",
    )
    options = parser.parse_args(argv)
    for name in options.row or ():
        if name not in [row.name for row in ROWS]:
            parser.error(f"--row {name}: no such row; rows are {names}")
    if options.device == "cuda" and not torch.cuda.device_count():
        parser.error("--device cuda: torch finds no GPU here")
    return run(
        [row for row in ROWS if not options.row or row.name in options.row],
        options.device,
        options.json,
    )


def run(rows: Sequence[Row], device: str, path: Path) -> int:
    """Run `rows` and print the table of the results. 0 if no row has failed."""
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    check = Check("cuda" if gpus else "cpu")
    os.environ["MEGATRON_2BW_WORLD_DEVICE"] = check.device
    about, results = machine(check, gpus), {}
    print("\n".join(f"{name}: {value}" for name, value in about.items()), flush=True)
    for row in rows:
        print(
            f"{time.strftime('%H:%M:%S')} {row.name} (at most {row.seconds:.0f} s) ...",
            flush=True,
        )
        results[row.name] = {"what": row.what} | result_of(row, check)
        with file_errors(f"--json {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, {"machine": about, "rows": results})
        print(f"         {brief(results[row.name])}", flush=True)
    print("\n" + table(results) + f"\nwrote {path}", flush=True)
    return int(any(result["result"] in BAD for result in results.values()))


def result_of(row: Row, check: Check) -> dict[str, Any]:
    """Run a row: its result, its figures or the reason, its seconds."""
    lacking = [
        name
        for name in row.needs
        if not (check.device == "cuda" if name == "cuda" else installed(name))
    ]
    if lacking:
        return {
            "result": SKIPPED,
            "why": f"needs {'a GPU' if lacking[0] == 'cuda' else lacking[0]}",
        }
    begun = time.monotonic()
    check.deadline = begun + row.seconds
    try:
        result = {"result": OK, "figures": row.run(check)}
    except WorldTimeout as error:
        result = {
            "result": HANGS,
            "why": f"not over after {row.seconds:.0f} s",
            "log": str(error),
        }
    except Exception as error:
        result = {"result": FAILED, "why": reason(error), "log": str(error)}
    return result | {"seconds": round(time.monotonic() - begun, 1)}


def reason(error: Exception) -> str:
    """One line. Of ranks that failed, also the line of their logs that says why."""
    line, _, logs = str(error).strip().partition("\n")
    if isinstance(error, WorldError):
        return f"{line}; {cause(logs)}"[:300]
    return (line if isinstance(error, Failed) else f"{type(error).__name__}: {line}")[
        :300
    ]


def machine(check: Check, gpus: int) -> dict[str, Any]:
    """What `megatron-2bw doctor` prints; fills in the memory of `check`."""
    if gpus:
        check.gib = round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)
    about = {
        "device": f"{gpus} GPUs"
        if gpus
        else "the CPU: figures of time and memory mean nothing"
    }
    return about | {
        name: f"{found} {meaning}".rstrip() for _, name, found, meaning in doctor.rows()
    }


def brief(result: dict[str, Any]) -> str:
    """Result and figures, or the reason, in one line."""
    figures = result.get("figures", {}).items()
    shown = (
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in figures
    )
    return f"{result['result']}  {result.get('why', ', '.join(shown))}"


def table(results: dict[str, Any]) -> str:
    """A line for each row, and the counts."""
    width = max(map(len, results), default=0)
    counts = {
        kind: sum(each["result"] == kind for each in results.values())
        for kind in (OK, *BAD, SKIPPED)
    }
    lines = [f"{name:{width}}  {brief(result)}" for name, result in results.items()]
    return "\n".join(
        [*lines, ", ".join(f"{count} {kind}" for kind, count in counts.items())]
    )
