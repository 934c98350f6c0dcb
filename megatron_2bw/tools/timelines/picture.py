"""Draws events of a schedule like the paper's figures: a row per stage, time to the
right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_2bw.base.files import new_figure, write_figure
from megatron_2bw.schedules import REDUCE, STEP, B, F, Schedule, Shape
from megatron_2bw.tools.timelines.simulator import (
    Event,
    PerStage,
    Times,
    by_stage,
    makespan,
    simulate,
)
from megatron_2bw.tools.timelines.text import busy_words, label

# The page's (page/timeline.js, page.css). One pair per batch, in turn; the backward is
# the darker of a pair.
FORWARD = ("#a6d3f2", "#fbd9a5", "#bfe5d9")
BACKWARD = ("#0072b2", "#b85c00", "#00664c")
IDLE, UPDATE = "#e9ebee", "#8d959e"  # UPDATE: a stage's own time for an update
# inches (a page: 100 pixels each): a picture, a row, all rows
WIDTH, ROW, HIGHEST = 8.5, 0.27, 9.0


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
    room = (
        34 * min(times.of("forward", panels[0][1].stages)) if versions else float("inf")
    )
    span = 0.0, until or min(room, max(map(makespan, timelines)))
    tall = 1.5 if versions else 1.0
    figure, axes = _rows([shape.stages for _, shape in panels], tall)
    for axis, events, (schedule, shape) in zip(axes, timelines, panels):
        draw_rows(
            axis,
            events,
            shape,
            span=span,
            versions=versions,
            steps=not schedule.late_step,
        )
        title = (
            f"{schedule.name}: {schedule.summary} — {busy_words(events, shape.stages)}"
        )
        axis.set_title(title, loc="left", fontsize=8)
    chunked = any(schedule.chunks > 1 for schedule, _ in panels)
    axes[-1].set_xlabel(
        f"time (forward {_of(times.forward)}, backward {_of(times.backward)}); "
        f"numbers are microbatches, {'letters model chunks, ' if chunked else ''}colours batches, "
        "black lines weight updates"
    )
    write_figure(path, figure)


def _rows(stages: Sequence[int], tall: float = 1.0) -> tuple[Any, Any]:
    """A figure with a timeline of so many stages below the other, and their axes."""
    # so that the picture fits a screen
    heights = [tall * min(ROW, HIGHEST / count) * count for count in stages]
    figure = new_figure(WIDTH, 0.5 + sum(heights) + 0.4 * len(stages))
    return figure, figure.subplots(len(stages), 1, sharex=True, squeeze=False)[:, 0]


def _of(time: PerStage) -> str:
    """A duration, or the range of those of the stages."""
    if isinstance(time, (int, float)):
        return f"{time:g}"
    low, high = min(time), max(time)
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


def draw_events(
    events: list[Event], stages: int, microbatches: int, path: Path, title: str
) -> None:
    """Write a picture of a measured timeline, with times in seconds."""
    figure, (axis,) = _rows([stages])
    # of three batches: room for each
    draw_rows(axis, events, Shape(stages, microbatches), numbers=microbatches <= 5)
    axis.set_title(title, loc="left", fontsize=8)
    axis.set_xlabel(
        "time (s); light: forward, dark: backward, colours: batches, black lines: weight updates"
    )
    write_figure(path, figure)


def draw_rows(
    axis,
    events: list[Event],
    shape: Shape,
    numbers: bool = True,
    span: tuple[float, float] | None = None,
    versions: bool = False,
    steps: bool = False,
) -> None:
    """Draw on an axis of a picture WIDTH inches wide: a collection of bars per stage,
    and numbers where they fit."""
    begin, end = span or (
        min(event.start for event in events),
        max(event.end for event in events),
    )
    events = [event for event in events if event.end >= begin and event.start <= end]
    chunks = 1 + max((event.action.chunk for event in events), default=0)
    for row, own in enumerate(reversed(by_stage(events, shape.stages))):
        kinds = (REDUCE, STEP) if steps else (REDUCE,)
        updates = [
            event
            for event in own
            if event.action.kind in kinds and event.end > event.start
        ]
        bars = [event for event in own if event.action.kind in (F, B)]
        colours = [_colour(event, shape) for event in bars]
        shades = [
            (colour, 1 - event.action.chunk / chunks / 2)
            for event, colour in zip(bars, colours)
        ]
        axis.broken_barh(_spans(updates), (row - 0.2, 0.4), facecolors=UPDATE)
        axis.broken_barh(
            _spans(bars),
            (row - 0.43, 0.86),
            facecolors=shades,
            edgecolors="white",
            linewidths=0.6,
        )
        for event in own:
            if event.action.kind == STEP and begin < event.end <= end:
                axis.plot(
                    [event.end, event.end],
                    [row - 0.45, row + 0.45],
                    color="black",
                    linewidth=1.6,
                )
        for event, colour in zip(bars, colours) if numbers else ():
            points = (event.end - event.start) / (end - begin) * (WIDTH - 0.8) * 72
            if begin <= event.start and event.end <= end * (1 + 1e-9):
                _number(axis, event, row, points, chunks, colour, versions)
    names = [f"stage {stage}" for stage in reversed(range(shape.stages))]
    axis.set_yticks(range(shape.stages), names, fontsize=8 if shape.stages <= 32 else 5)
    axis.set(facecolor=IDLE, xlim=(begin, end), ylim=(-0.52, shape.stages - 0.48))
    axis.spines[["top", "right"]].set_visible(False)


def _spans(events: list[Event]) -> list[tuple[float, float]]:
    """(start, length) of each."""
    return [(event.start, event.end - event.start) for event in events]


def _colour(event: Event, shape: Shape) -> str:
    """By batch and kind; those of later chunks are drawn lighter."""
    colours = FORWARD if event.action.kind == F else BACKWARD
    return colours[shape.batch(event.action.microbatch) % len(colours)]


def _number(
    axis,
    event: Event,
    row: int,
    points: float,
    chunks: int,
    colour: str,
    versions: bool,
) -> None:
    """Write the microbatch's number if a bar of that many points has room for it."""
    text, middle = label(event, chunks > 1), (event.start + event.end) / 2
    style = {
        "ha": "center",
        "va": "center",
        "color": "white" if colour in BACKWARD else "black",
    }
    if points >= 4.5 * len(text) + 1:
        axis.text(middle, row + 0.14 * versions, text, fontsize=7, **style)
        if versions and points >= 16:
            axis.text(
                middle, row - 0.24, f"W({event.action.version})", fontsize=6, **style
            )
