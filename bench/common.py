"""What the benchmarks share: their options, how they write results."""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_2bw.files import new_figure, write_figure, write_json

COLOURS = ("#4292c6", "#bdbdbd", "#fdae6b", "#74c476")


def new_parser(description: str, name: str) -> argparse.ArgumentParser:
    """With --json, by default out/bench/`name`.json."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("out/bench", f"{name}.json"))
    return parser


def flag_sets(text: str) -> list[str]:
    """Sets of flags, separated by semicolons, for argparse."""
    return [part.strip() for part in text.split(";")]


def bar_chart(groups: Sequence[str], series: Mapping[str, Sequence[float]], label: str, form: str) -> Any:
    """Horizontal bars with their values: a group for each of `groups`, and in it a bar of each series (NaN: none)."""
    height = 0.84 / len(series)
    names = [textwrap.fill(group, 36, break_on_hyphens=False, break_long_words=False) for group in groups]
    lines = max(name.count("\n") + 1 for name in names)
    figure = new_figure(7, 0.8 + max(0.17 * len(series) + 0.1, 0.17 * lines) * len(groups))
    axis = figure.subplots()
    for place, (name, values) in enumerate(series.items()):
        ys = [y + (place + 0.5) * height - 0.42 for y in range(len(groups))]
        bars = axis.barh(ys, values, 0.94 * height, label=name, color=COLOURS[place % len(COLOURS)])
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
        figure.legend(loc="outside upper right", ncols=len(series), fontsize=9, frameon=False)
    return figure


def write_result(path: Path, result: Any, figure: Any = None) -> None:
    """Write the JSON, and a picture of the same name if there is one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, result)
    if figure is not None:
        write_figure(path.with_suffix(".png"), figure)
        print(f"wrote {path} and {path.with_suffix('.png')}", flush=True)
