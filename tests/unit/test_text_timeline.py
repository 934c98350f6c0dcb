"""Timelines as text against grids written by hand: forward 1, backward 2, where nothing
else is said."""

import re

from megatron_2bw.schedules import SCHEDULES, Shape
from megatron_2bw.schedules.interleaved import Interleaved
from megatron_2bw.tools.timelines.simulator import (
    Times,
    by_stage,
    simulate,
)
from megatron_2bw.tools.timelines.text import FILL, render


def rows(schedule, shape: Shape, times: Times = Times(), **options) -> list[str]:
    events = simulate(schedule, shape, times)
    return render(events, shape.stages, **options).splitlines()


def test_2bw():
    assert rows(SCHEDULES["2bw"], Shape(2, 2, 0, 3)) == [
        "stage 0  1 2 ....1bb 3 2bb 4 3bb|5 4bb 6 5bb|..6bb|",
        "stage 1  ..1 1bb 2 2bb 3 3bb 4|4bb 5 5bb 6|6bb ...|",
        "1 forward, 1b backward, . idle, | weight update",
        "2 characters take 1, the timeline 21",
    ]


def test_interleaved():
    """Two chunks a stage, forward and backward of a chunk 1: a step holds a number, its
    chunk and the backward's b."""
    assert rows(Interleaved(2), Shape(2, 2, 0, 1), Times(2, 2))[:2] == [
        "stage 0  1A  2A  1B  2B  ....1Bb ....2Bb 1Ab 2Ab|",
        "stage 1  ....1A  2A  1B  1Bb 2B  2Bb 1Ab 2Ab ...|",
    ]


def test_long_lines_are_cut():
    text = rows(SCHEDULES["gpipe"], Shape(2, 2, 0, 1), columns=19)
    assert text[:2] == ["stage 0  1 2 ......", "stage 1  ..1 2 1bb "]


def test_times_without_a_common_step_keep_their_numbers():
    times = Times([0.0131, 0.0122], [0.0271, 0.0253], transfer=0.0007)
    events = simulate(SCHEDULES["pipedream-flush"], Shape(2, 3, 0, 1), times)
    for row, own in zip(render(events, 2).splitlines(), by_stage(events, 2)):
        shown = re.findall(r"\d+b?", row)[1:]
        expected = []
        for event in own:
            if event.action.kind in FILL:
                mark = FILL[event.action.kind].strip()
                expected.append(f"{event.action.microbatch + 1}{mark}")
        assert shown == expected
