"""The pictures of docs/: what is written on them is whole and can be read, and agrees with the printed text."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from bench import tables
from megatron_2bw.schedules import SCHEDULES, Shape
from megatron_2bw.timelines import picture
from megatron_2bw.timelines.simulator import simulate
from megatron_2bw.timelines.text import render

DOCS = Path(__file__).parents[2] / "docs"
BENCHES = "all_schedules correction correction_real distributed_optimizer real_compute shapes slow_links variants"


def whole(figure) -> bool:
    """Whether nothing is cut by the picture's edge, to a pixel."""
    figure.draw_without_rendering()
    drawn, edge = figure.get_tightbbox(), figure.bbox_inches.padded(1 / figure.dpi)
    return edge.contains(drawn.x0, drawn.y0) and edge.contains(drawn.x1, drawn.y1)


@pytest.mark.parametrize("name", BENCHES.split())
def test_labels_of_measurements_are_whole_and_apart(name):
    figure = tables.picture(json.loads((DOCS / "bench" / f"{name}.json").read_text()))
    assert whole(figure)
    for axis in figure.axes:
        for labels in (axis.get_xticklabels(), axis.get_yticklabels()):
            boxes = [label.get_window_extent() for label in labels if label.get_text() and not label.get_rotation()]
            assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


@pytest.mark.parametrize("name, iterations", [("2bw", 2), ("2bw", 4), ("pipedream-flush", 2)])
def test_a_timeline_and_its_text_have_the_same_busy_share(name, iterations, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(picture, "write_figure", lambda path, figure: drawn.append(figure))
    schedule, shape = SCHEDULES[name], Shape(4, 4, 0, iterations)
    picture.draw_shapes([(schedule, shape)], tmp_path / "a.png")
    share = render(simulate(schedule, shape), 4).split("; ")[-1]
    assert share.startswith("stages busy ") and drawn[0].axes[0].get_title("left").endswith(share)
