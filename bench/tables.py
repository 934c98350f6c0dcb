"""What the benchmarks share: their options, the files that they write, tables and
pictures.

python bench/tables.py FILE.json ...          prints a benchmark's rows as the Markdown
tables of docs/ python bench/tables.py --draw FILE.json ...   draws its picture again,
FILE.png
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_2bw.base.files import new_figure, write_figure, write_json

BENCHES = {"efficiency": "schedule_efficiency", "slowdown": "slow_links"}  # by a column
COLOURS = ("#0072b2", "#bdbdbd", "#e69f00", "#00664c")


def new_parser(description: str, name: str) -> argparse.ArgumentParser:
    """With --json, by default out/bench/`name`.json."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=Path("out/bench", f"{name}.json"))
    return parser


def bar_chart(
    groups: Sequence[str], series: Mapping[str, Sequence[float]], label: str, form: str
) -> Any:
    """Horizontal bars with their values: a group for each of `groups`, and in it a bar
    of each series (NaN: none)."""
    height = 0.84 / len(series)
    names = [
        textwrap.fill(group, 36, break_on_hyphens=False, break_long_words=False)
        for group in groups
    ]
    lines = max(name.count("\n") + 1 for name in names)
    figure = new_figure(
        7, 0.8 + max(0.17 * len(series) + 0.1, 0.17 * lines) * len(groups)
    )
    axis = figure.subplots()
    for place, (name, values) in enumerate(series.items()):
        ys = [y + (place + 0.5) * height - 0.42 for y in range(len(groups))]
        # alone, 2BW is blue
        places = [place if len(series) > 1 else "2bw" not in group for group in groups]
        bars = axis.barh(
            ys,
            values,
            0.94 * height,
            label=name,
            color=[COLOURS[at % len(COLOURS)] for at in places],
        )
        texts = ["" if math.isnan(value) else format(value, form) for value in values]
        axis.bar_label(bars, texts, padding=3, fontsize=8)
    axis.set_yticks(range(len(groups)), names, fontsize=9)
    axis.tick_params(axis="y", length=0)
    axis.invert_yaxis()
    axis.margins(x=0.1, y=0.01)
    axis.set_xlabel(label)
    axis.set_xticks([])
    axis.spines[["top", "right", "bottom"]].set_visible(False)
    if len(series) > 1:
        figure.legend(
            loc="outside upper right", ncols=len(series), fontsize=9, frameon=False
        )
    return figure


def write_result(path: Path, result: Any, figure: Any = None) -> None:
    """Write the JSON, and a picture of the same name if there is one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, result)
    if figure is not None:
        write_figure(path.with_suffix(".png"), figure)
        print(f"wrote {path} and {path.with_suffix('.png')}", flush=True)


def table(rows: list[dict]) -> str:
    """One line a row; columns that are the same in all rows are left out, unless there
    is one row."""
    columns = [
        name
        for name in rows[0]
        if len(rows) == 1 or len({str(row[name]) for row in rows}) > 1
    ]
    lines = [
        "| " + " | ".join(columns) + " |",
        "| " + " | ".join("---" for _ in columns) + " |",
    ]
    lines += [
        "| " + " | ".join(str(row[name]) for name in columns) + " |" for row in rows
    ]
    same = ", ".join(
        f"{name} {row}"
        for name, row in rows[0].items()
        if name not in columns and row != ""
    )
    return "\n".join(lines + ([] if not same else ["", f"In all rows: {same}."]))


def checks(entries: list[dict]) -> str:
    """A summary, then the rows of each check (planner_accuracy.py)."""
    same = ("source", "assumes", "bar", "result")
    holds = {True: "yes", False: "**no**"}
    summary = [
        {
            "claim": check["name"],
            **{name: check[name] for name in same},
            "holds": holds[check["holds"]],
        }
        for check in entries
    ]
    parts = [
        f"### {check['name']}\n\n{table(check['rows'])}"
        for check in entries
        if check["rows"]
    ]
    return "\n\n".join([table(summary), *parts])


def picture(content: dict):
    rows = content["rows"]
    bench = importlib.import_module(
        f"bench.{next(BENCHES[name] for name in rows[0] if name in BENCHES)}"
    )
    return bench.draw(rows)


if __name__ == "__main__":
    again = "--draw" in sys.argv
    for path in (Path(word) for word in sys.argv[1:] if word != "--draw"):
        content = json.loads(path.read_text())
        if again:
            write_figure(path.with_suffix(".png"), picture(content))
            continue
        print(
            f"{path}\n\n{checks(content['checks']) if 'checks' in content else table(content['rows'])}\n"
        )
