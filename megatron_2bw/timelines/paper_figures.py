"""The paper's Figures 1, 2 and 3, drawn from the lists that the runtime executes."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from megatron_2bw.schedules import SCHEDULES, Shape
from megatron_2bw.timelines.picture import draw_shapes
from megatron_2bw.timelines.simulator import simulate
from megatron_2bw.timelines.text import render


class Figure(NamedTuple):
    """Stacked schedules, each with a shape; `until` cuts pipelines that continue."""

    panels: list[tuple[str, Shape]]
    until: float | None = None
    versions: bool = False


FIGURES = {
    1: Figure([("gpipe", Shape(4, 4, 0, 2)), ("pipedream", Shape(4, 1, 0, 16))], until=42),
    2: Figure([("2bw", Shape(4, 4, 0, 4))], until=39, versions=True),
    3: Figure([("gpipe", Shape(2, 4, 0, 2)), ("pipedream-flush", Shape(2, 4, 0, 2))]),
}


def draw_figure(number: int, path: Path) -> None:
    """Write the paper's figure `number` to `path`."""
    figure = FIGURES[number]
    panels = [(SCHEDULES[name], shape) for name, shape in figure.panels]
    draw_shapes(panels, path, until=figure.until, versions=figure.versions)


def print_figure(number: int) -> None:
    for name, shape in FIGURES[number].panels:
        print(f"\n{name}, {shape.stages} stages, {shape.microbatches} microbatches a batch")
        print(render(simulate(SCHEDULES[name], shape), shape.stages, columns=140, versions=FIGURES[number].versions))
