"""What the benchmarks share: their options, the files that they write, tables and
pictures.

    python bench/tables.py FILE.json ...    # a benchmark's rows, as docs/ has them
"""

import argparse
import json
import math
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from megatron_2bw.base.files import new_figure, write_figure, write_json

COLOURS = ("#0072b2", "#bdbdbd", "#e69f00", "#00664c")
Row = dict[str, Any]


def new_parser(description: str, name: str) -> argparse.ArgumentParser:
    """With --json, by default out/bench/`name`.json."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=Path("out/bench", f"{name}.json"))
    return parser


def bar_chart(
    groups: Sequence[str], series: Mapping[str, Sequence[float]], label: str
) -> Any:
    """Horizontal bars with their shares: a group for each of `groups`, and in it a bar
    of each series (NaN: none)."""
    height = 0.84 / len(series)
    names = []
    lines = 1
    for group in groups:
        parts = textwrap.wrap(group, 36, break_on_hyphens=False, break_long_words=False)
        names.append("\n".join(parts))
        lines = max(lines, len(parts))
    tall = max(0.17 * len(series) + 0.1, 0.17 * lines)
    figure = new_figure(7, 0.8 + tall * len(groups))
    axis = figure.subplots()
    for place, (name, values) in enumerate(series.items()):
        ys = np.arange(len(groups)) + (place + 0.5) * height - 0.42
        colours = COLOURS[place % len(COLOURS)]
        if len(series) == 1:  # 2BW is blue
            colours = [COLOURS["2bw" not in group] for group in groups]
        bars = axis.barh(ys, values, 0.94 * height, label=name, color=colours)
        texts = ["" if math.isnan(value) else f"{value:.1%}" for value in values]
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


def markdown(rows: Iterable[Row]) -> str:
    """One line a row, and a head with the names of the columns."""
    lines = []
    for row in rows:
        if not lines:
            lines += [list(row), ["---"] * len(row)]
        lines.append(map(str, row.values()))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def table(rows: list[Row]) -> str:
    """One line a row; columns that are the same in all rows are left out, unless there
    is one row."""
    shown = [dict(row) for row in rows]
    same = []
    for name, value in rows[0].items():
        if len(rows) > 1 and all(str(row[name]) == str(value) for row in rows):
            for row in shown:
                del row[name]
            if value != "":
                same.append(f"{name} {value}")
    text = markdown(shown)
    if same:
        text += f"\n\nIn all rows: {', '.join(same)}."
    return text


def checks(entries: list[Row]) -> str:
    """A summary, then the rows of each check (planner_accuracy.py)."""
    summary = []
    parts = []
    for check in entries:
        row = {"claim": check["name"]}
        for name in ("source", "assumes", "bar", "result"):
            row[name] = check[name]
        row["holds"] = "yes" if check["holds"] else "**no**"
        summary.append(row)
        if check["rows"]:
            parts.append(f"### {check['name']}\n\n{table(check['rows'])}")
    return "\n\n".join([table(summary), *parts])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("files", type=Path, nargs="+")
    for path in parser.parse_args().files:
        content = json.loads(path.read_text())
        if "checks" in content:
            text = checks(content["checks"])
        else:
            text = table(content["rows"])
        print(f"{path}\n\n{text}\n")


if __name__ == "__main__":
    main()
