"""The pictures of docs/: what is written on them is whole and can be read."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from bench import tables

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
