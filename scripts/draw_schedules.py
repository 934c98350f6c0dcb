"""Draws the timelines of docs/schedules.md, or with --figure those of the paper's figures.

python scripts/draw_schedules.py [--out docs/schedules.png]
python scripts/draw_schedules.py --figure all [--out docs]   docs/figure1.png ..., and as text
"""

import argparse
from pathlib import Path
from typing import NamedTuple

from megatron_2bw.schedules import SCHEDULES, Shape
from megatron_2bw.simulator import simulate
from megatron_2bw.text_timeline import render
from megatron_2bw.timeline import draw, draw_shapes


class Figure(NamedTuple):
    """Schedules below each other, each on a shape; `until` cuts pipelines that go on."""

    panels: list[tuple[str, Shape]]
    until: float | None = None
    versions: bool = False


FIGURES = {
    1: Figure([("gpipe", Shape(4, 4, 0, 2)), ("pipedream", Shape(4, 1, 0, 16))], until=42),
    2: Figure([("2bw", Shape(4, 4, 0, 4))], until=39, versions=True),
    3: Figure([("gpipe", Shape(2, 4, 0, 2)), ("pipedream-flush", Shape(2, 4, 0, 2))]),
}


def draw_figure(number: int, folder: Path) -> Path:
    """Write the paper's figure `number` to `folder` and return the file."""
    figure, path = FIGURES[number], folder / f"figure{number}.png"
    folder.mkdir(parents=True, exist_ok=True)
    panels = [(SCHEDULES[name], shape) for name, shape in figure.panels]
    draw_shapes(panels, path, until=figure.until, versions=figure.versions)
    return path


def print_figure(number: int) -> None:
    for name, shape in FIGURES[number].panels:
        print(f"\n{name}, {shape.stages} stages, {shape.microbatches} microbatches a batch")
        print(render(simulate(SCHEDULES[name], shape), shape.stages, columns=140, versions=FIGURES[number].versions))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the picture, or with --figure the folder")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--figure", choices=("1", "2", "3", "all"), help="of the paper")
    options = parser.parse_args()
    if options.figure:
        for number in FIGURES if options.figure == "all" else [int(options.figure)]:
            print(f"wrote {draw_figure(number, options.out or Path('docs'))}")
            print_figure(number)
    else:
        out = options.out or Path("docs/schedules.png")
        names = ("2bw", "pipedream-flush", "gpipe")
        draw([SCHEDULES[name] for name in names], options.stages, options.microbatches, 3, out)
        print(f"wrote {out}")
