"""Prints the rows of a benchmark's JSON as the Markdown tables of docs/, or draws its picture again, FILE.png.

python bench/tables.py FILE.json ...
python bench/tables.py --draw FILE.json ...
"""

import importlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_2bw.files import write_figure

BENCHES = {"efficiency": "schedule_efficiency", "slowdown": "slow_links"}  # by a column


def table(rows: list[dict]) -> str:
    """One line a row; columns that are the same in all rows are left out, unless there is one row."""
    columns = [name for name in rows[0] if len(rows) == 1 or len({str(row[name]) for row in rows}) > 1]
    lines = ["| " + " | ".join(columns) + " |", "| " + " | ".join("---" for _ in columns) + " |"]
    lines += ["| " + " | ".join(str(row[name]) for name in columns) + " |" for row in rows]
    same = ", ".join(f"{name} {row}" for name, row in rows[0].items() if name not in columns and row != "")
    return "\n".join(lines + ([] if not same else ["", f"In all rows: {same}."]))


def checks(entries: list[dict]) -> str:
    """A summary, then the rows of each check (planner_accuracy.py)."""
    same = ("source", "assumes", "bar", "result")
    holds = {True: "yes", False: "**no**"}
    summary = [
        {"claim": check["name"], **{name: check[name] for name in same}, "holds": holds[check["holds"]]}
        for check in entries
    ]
    parts = [f"### {check['name']}\n\n{table(check['rows'])}" for check in entries if check["rows"]]
    return "\n\n".join([table(summary), *parts])


def picture(content: dict):
    if "ranks" in content:
        return importlib.import_module("bench.soak").picture(content["ranks"])
    rows = content["rows"]
    bench = importlib.import_module(f"bench.{next(BENCHES[name] for name in rows[0] if name in BENCHES)}")
    return bench.draw(rows)


if __name__ == "__main__":
    again = "--draw" in sys.argv
    for path in (Path(word) for word in sys.argv[1:] if word != "--draw"):
        content = json.loads(path.read_text())
        if again:
            write_figure(path.with_suffix(".png"), picture(content))
            continue
        print(f"{path}\n\n{checks(content['checks']) if 'checks' in content else table(content['rows'])}\n")
