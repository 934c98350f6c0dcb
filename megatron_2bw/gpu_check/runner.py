"""megatron-2bw gpu-check: runs the rows one after the other, keeps each result at once, prints the table.

Invariant: one row that fails or hangs does not stop the others; a row with a result does not run again, unless --again.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_2bw.errors import Parser, UserError, file_errors, names_of
from megatron_2bw.files import write_json
from megatron_2bw.gpu_check import probes
from megatron_2bw.gpu_check.rows import NEEDS, ROWS, Check, Failed, Row
from megatron_2bw.local_ranks import WorldError, WorldTimeout, run_world
from megatron_2bw.start.doctor import version

PARTS = tuple(dict.fromkeys(row.part for row in ROWS))
OK, FAILED, HANGS, SKIPPED, LATER = "ok", "FAILED", "hangs", "skipped", "not run"
BAD = (FAILED, HANGS)
CAUSE = re.compile(r"[\w.]+Errors?\b|.*: error: ")  # in the log of a rank
MEASURED = ("cost", "thread")  # parts that are about time and memory
NO_FIGURES = "on the CPU: no figures"
RESULTS = Path("out/gpu_check/results.json")


def main(argv: Sequence[str], prog: str) -> int:
    parser = Parser(prog=prog, description="Checks this project on the GPUs of this machine.", allow_abbrev=False)
    add = parser.add_argument
    add("--part", type=names_of(PARTS), default=PARTS, metavar="NAME,...", help=f"of {', '.join(PARTS)} (default: all)")
    add("--row", action="append", metavar="NAME", help="only this row, as the table names it; may be repeated")
    add("--minutes", type=float, default=30.0, help="start no row that could end later (default: 30)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="cpu: a tiny model, without figures")
    add("--json", type=Path, default=RESULTS, metavar="FILE", help="results, to continue from")
    add("--again", action="store_true", help="also run rows that have a result")
    options = parser.parse_args(argv)
    rows = [row for row in ROWS if row.part in options.part and (not options.row or row.name in options.row)]
    for name in options.row or ():
        if not any(row.name == name for row in rows):
            parser.error(f"--row {name}: no such row; rows are {'; '.join(row.name for row in ROWS)}")
    try:
        return run(rows, options.device, options.minutes, options.json, options.again)
    except UserError as error:
        parser.error(str(error))


def run(rows: Sequence[Row], device: str, minutes: float, path: Path, again: bool = False) -> int:
    """Run `rows` and print the table of all results. 0 if none of the rows has failed."""
    end = time.monotonic() + 60 * minutes
    if device == "cuda" and not torch.cuda.device_count():
        raise UserError("--device cuda: torch finds no GPU here")
    check = Check("cuda" if device != "cpu" and torch.cuda.device_count() else "cpu")
    os.environ["MEGATRON_2BW_WORLD_DEVICE"] = check.device
    about = machine(check)
    results = previous(path, about, again)
    print("\n".join(f"{name}: {value}" for name, value in about.items()), flush=True)
    for row in rows:
        key = f"{row.part}: {row.name}"
        if not again and results.get(key, {}).get("result") in (OK, *BAD):
            continue
        print(f"{time.strftime('%H:%M:%S')} {key} (at most {row.seconds:.0f} s) ...", flush=True)
        results[key] = {"what": row.what} | result_of(row, check, end)
        with file_errors(f"--json {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, {"machine": about, "rows": results})
        print(f"         {brief(results[key])}", flush=True)
    print("\n" + table(results, check.device) + f"\nwrote {path}", flush=True)
    return int(any(results[f"{row.part}: {row.name}"]["result"] in BAD for row in rows))


def result_of(row: Row, check: Check, end: float) -> dict[str, Any]:
    """Run a row: its result, its figures or the reason, its seconds."""
    for need in row.needs:
        if not NEEDS[need][0](check):
            return {"result": SKIPPED, "why": NEEDS[need][1]}
    begun = time.monotonic()
    if begun + row.seconds > end:
        return {"result": LATER, "why": "the time is up: run the same command again"}
    check.deadline = begun + row.seconds
    try:
        found = {"result": OK, "figures": row.run(check)}
        if check.device == "cpu" and row.part in MEASURED:
            found["why"] = NO_FIGURES
    except WorldTimeout as error:
        found = {"result": HANGS, "why": f"not over after {row.seconds:.0f} s", "log": str(error)}
    except Exception as error:
        found = {"result": FAILED, "why": reason(error), "log": str(error)}
    return found | {"seconds": round(time.monotonic() - begun, 1)}


def reason(error: Exception) -> str:
    """One line. Of ranks that failed, the first line that names an error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    causes = [line for line in lines[1:] if CAUSE.match(line)] if isinstance(error, WorldError) else []
    name = "" if isinstance(error, (Failed, WorldError)) else f"{type(error).__name__}: "
    return name + "; ".join([lines[0], *causes[:1]])[:300]


def machine(check: Check) -> dict[str, Any]:
    """GPU, driver and versions; fills in the GPUs of `check`."""
    about: dict[str, Any] = {"device": NO_FIGURES, "host": platform.node()}
    if check.device == "cuda":
        check.gpus = torch.cuda.device_count()
        about = _gpu() | {"GPUs": check.gpus, "host": platform.node()}
        check.gib = about["gib"]
        words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            answer = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout
            about["driver"] = answer.splitlines()[0]
        except (OSError, subprocess.SubprocessError, IndexError):
            about["driver"] = "unknown: nvidia-smi does not answer"
    about |= {"python": platform.python_version(), "torch": torch.__version__, "torch's CUDA": torch.version.cuda}
    about |= {name: version(name) or "not installed" for name in ("megatron-core", "transformer-engine")}
    about["Apex"] = "installed" if importlib.util.find_spec("amp_C") else "not installed"
    return about


def _gpu() -> dict[str, Any]:
    try:
        return run_world(1, probes.machine, timeout=120)[0]
    except WorldError as error:
        if "forked subprocess" not in str(error):
            raise UserError(f"no rank can use the GPU: {reason(error)}") from None
    print("an import starts CUDA: each rank imports Megatron anew", flush=True)
    os.environ["MEGATRON_2BW_WORLD_START"] = "spawn"
    return run_world(1, probes.machine, timeout=120)[0]


def previous(path: Path, about: dict[str, Any], again: bool) -> dict[str, Any]:
    """The results of `path`. UserError if they are those of another machine."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text())
        old, results = content["machine"], content["rows"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"--json {path}: not a file of results; remove it or name another") from None
    other = [name for name in about if name != "host" and old.get(name) != about[name]]
    if other and not again:
        name = other[0]
        was = f"with {name} {old.get(name)}, not {about[name]}"
        raise UserError(f"--json {path}: results {was}; name another file, or give --again")
    return {} if other else results


def brief(result: dict[str, Any]) -> str:
    """Result and figures, or the reason, in one line."""
    figures = ", ".join(f"{name} {short(value)}" for name, value in result.get("figures", {}).items())
    return f"{result['result']}  {result.get('why', figures)}"


def short(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {short(entry)}" for name, entry in value.items()) + "}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def table(results: dict[str, Any], device: str) -> str:
    """A line for each row."""
    width = max(map(len, results), default=0)
    head = [NO_FIGURES] * (device == "cpu")
    lines = [f"{key:{width}}  {brief(result)}" for key, result in results.items()]
    counts = {kind: sum(r["result"] == kind for r in results.values()) for kind in (OK, *BAD, SKIPPED, LATER)}
    return "\n".join([*head, *lines, ", ".join(f"{count} {kind}" for kind, count in counts.items())])
