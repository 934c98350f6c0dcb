"""Draws events of a schedule like the paper's figures: a row per stage, time to the
right."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_2bw.base.files import new_figure, write_figure
from megatron_2bw.schedules import PREDICT, REDUCE, STEP, B, F, Schedule, Shape
from megatron_2bw.tools.timelines.simulator import (
    Event,
    Events,
    PerStage,
    Times,
    busy,
    by_stage,
    makespan,
    of_kind,
    simulate,
)
from megatron_2bw.tools.timelines.text import label

# The page's (page/timeline.js, page.css). One pair per batch, in turn; the backward is
# the darker of a pair.
FORWARD = ("#a6d3f2", "#fbd9a5", "#bfe5d9")
BACKWARD = ("#0072b2", "#b85c00", "#00664c")
IDLE = "#e9ebee"
UPDATE = "#8d959e"  # a stage's own time for an update
# inches (a page: 100 pixels each)
WIDTH = 8.5
ROW_HEIGHT = 0.27
MAX_HEIGHT = 9.0  # of all rows


def draw_shapes(
    panels: Sequence[tuple[Schedule, Shape]],
    path: Path,
    times: Times = Times(),
    until: float | None = None,
    versions: bool = False,
) -> None:
    """Write a picture (the kind by the ending of `path`) with the timelines stacked on
    one time axis.

    until     where the time axis ends; by default with the last action
    versions  write the weights W(v) below each microbatch; the time axis ends where
              they have no more room
    """
    timelines = [simulate(schedule, shape, times) for schedule, shape in panels]
    if until is None:
        until = max(map(makespan, timelines))
        if versions:
            forward = times.of("forward", panels[0][1].stages)
            until = min(34 * min(forward), until)
    stages = [shape.stages for _, shape in panels]
    figure, axes = _rows(stages, 1.5 if versions else 1)
    chunked = False
    for axis, events, (schedule, shape) in zip(axes, timelines, panels):
        chunked |= schedule.chunks > 1
        draw_rows(
            axis,
            events,
            shape,
            until,
            versions=versions,
            steps=not schedule.late_step,
        )
        share = busy(schedule, shape.stages, shape.microbatches, times)
        summary = schedule.summary
        if schedule.late not in (0, "all"):
            summary = f"{schedule.late} of {shape.microbatches} microbatches late"
        title = (
            f"{schedule.name}: {summary} — stages busy {share:.1%} in the steady state"
        )
        axis.set_title(title, loc="left", fontsize=8)
    axes[-1].set_xlabel(
        f"time (forward {_range(times.forward)}, backward {_range(times.backward)}); "
        f"numbers are microbatches, {'letters model chunks, ' if chunked else ''}colours batches, "
        "black lines weight updates"
    )
    write_figure(path, figure)


def _rows(stages: Sequence[int], tall: float = 1.0) -> tuple[Any, Any]:
    """A figure with a timeline of so many stages below the other, and their axes."""
    # so that the picture fits a screen
    heights = [tall * min(ROW_HEIGHT, MAX_HEIGHT / count) * count for count in stages]
    figure = new_figure(WIDTH, 0.5 + sum(heights) + 0.4 * len(stages))
    axes = figure.subplots(len(stages), 1, sharex=True, squeeze=False)
    return figure, axes[:, 0]


def _range(time: PerStage) -> str:
    """A duration, or the range of those of the stages."""
    if isinstance(time, (int, float)):
        return f"{time:g}"
    low, high = min(time), max(time)
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


def draw_events(
    events: Events, stages: int, microbatches: int, path: Path, title: str
) -> None:
    """Write a picture of a measured timeline, with times in seconds."""
    figure, (axis,) = _rows([stages])
    # of three batches: room for each
    shape = Shape(stages, microbatches)
    draw_rows(axis, events, shape, makespan(events), numbers=microbatches <= 5)
    axis.set_title(title, loc="left", fontsize=8)
    axis.set_xlabel(
        "time (s); light: forward, dark: backward, colours: batches, black lines: weight updates"
    )
    write_figure(path, figure)


def draw_rows(
    axis,
    events: Events,
    shape: Shape,
    until: float,
    numbers: bool = True,
    versions: bool = False,
    steps: bool = False,
) -> None:
    """Draw on an axis of a picture WIDTH inches wide, from time 0 on: a collection of
    bars per stage, and numbers where they fit."""
    shown = [event for event in events if event.end >= 0 and event.start <= until]
    chunks = 1 + max((event.action.chunk for event in shown), default=0)
    points = (WIDTH - 0.8) * 72 / until
    for row, own in enumerate(reversed(by_stage(shown, shape.stages))):
        bars = of_kind(own, F, B)
        kinds = (PREDICT, REDUCE, STEP) if steps else (PREDICT, REDUCE)
        updates = [event for event in of_kind(own, *kinds) if event.duration > 0]
        axis.broken_barh(_spans(updates), (row - 0.2, 0.4), facecolors=UPDATE)
        axis.broken_barh(
            _spans(bars),
            (row - 0.43, 0.86),
            facecolors=[_shade(bar, shape, chunks) for bar in bars],
            edgecolors="white",
            linewidths=0.6,
        )
        for event in of_kind(own, STEP):
            if 0 < event.end <= until:
                line = (row - 0.45, row + 0.45)
                axis.plot((event.end, event.end), line, color="black", linewidth=1.6)
        for bar in bars if numbers else ():
            if 0 <= bar.start and bar.end <= until * (1 + 1e-9):
                _number(axis, bar, row, points * bar.duration, chunks, versions)
    names = [f"stage {stage}" for stage in reversed(range(shape.stages))]
    size = 8 if shape.stages <= 32 else 5
    axis.set_yticks(range(shape.stages), names, fontsize=size)
    axis.set(facecolor=IDLE, xlim=(0, until))
    axis.set_ylim(-0.52, shape.stages - 0.48)
    axis.spines[["top", "right"]].set_visible(False)


def _spans(events: Events) -> list[tuple[float, float]]:
    """(start, length) of each."""
    return [(event.start, event.duration) for event in events]


def _shade(event: Event, shape: Shape, chunks: int) -> tuple[str, float]:
    """A colour by batch and kind; later chunks are drawn lighter."""
    colours = FORWARD if event.action.kind == F else BACKWARD
    batch = shape.batch(event.action.microbatch)
    opacity = 1 - event.action.chunk / chunks / 2
    return colours[batch % len(colours)], opacity


def _number(
    axis, event: Event, row: int, points: float, chunks: int, versions: bool
) -> None:
    """Write the microbatch's number if a bar of that many points has room for it."""
    text = label(event, chunks > 1)
    middle = (event.start + event.end) / 2
    colour = "black" if event.action.kind == F else "white"
    write = functools.partial(axis.text, middle, ha="center", va="center", color=colour)
    if points < 4.5 * len(text) + 1:
        return
    write(row + 0.14 * versions, text, fontsize=7)
    if versions and points >= 16:
        write(row - 0.24, f"W({event.action.version})", fontsize=6)
