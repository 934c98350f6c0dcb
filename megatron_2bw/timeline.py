"""Draws events of a schedule as the paper's figures do: a row a stage, time to the right."""

from __future__ import annotations

from pathlib import Path

from megatron_2bw.schedules import B, F, STEP, Schedule, Shape
from megatron_2bw.simulator import Event, Times, iteration_time, simulate

# By batch, so that the eye finds where one batch ends and the next begins; the backward is the darker of a pair.
FORWARD = ("#9ecae1", "#fdd0a2", "#c7e9c0")
BACKWARD = ("#4292c6", "#fd8d3c", "#41ab5d")


def draw(
    schedules: list[Schedule], stages: int, microbatches: int, iterations: int, path: Path, times: Times = Times()
) -> None:
    """Write a picture (the kind by the ending of `path`) with one timeline below the other, on one time axis."""
    from matplotlib.figure import Figure

    shape = Shape(stages, microbatches, 0, iterations)
    figure = Figure(figsize=(13, 0.62 + 0.30 * stages * len(schedules) + 0.55 * len(schedules)), layout="constrained")
    axes = figure.subplots(len(schedules), 1, sharex=True, squeeze=False)[:, 0]
    for axis, schedule in zip(axes, schedules):
        ideal = microbatches * (times.forward + times.backward)
        busy = ideal / iteration_time(schedule, stages, microbatches, times)
        _draw_one(axis, simulate(schedule, shape, times), shape)
        title = f"{schedule.name}: {schedule.summary} — stages busy {busy:.0%} of the time"
        axis.set_title(title, loc="left", fontsize=10)
    axes[-1].set_xlabel(
        f"time (forward {times.forward:g}, backward {times.backward:g}); "
        "numbers are microbatches, colours batches, black lines weight updates"
    )
    figure.savefig(path, dpi=150)


def draw_events(events: list[Event], stages: int, microbatches: int, path: Path, title: str) -> None:
    """Write a picture of one timeline, measured or simulated, with times in seconds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 1.2 + 0.30 * stages), layout="constrained")
    axis = figure.subplots()
    _draw_one(axis, events, Shape(stages, microbatches), numbers=microbatches * stages <= 64)
    axis.set_title(title, loc="left", fontsize=10)
    axis.set_xlabel("time (s); light: forward, dark: backward, colours: batches, black lines: weight updates")
    figure.savefig(path, dpi=150)


def _draw_one(axis, events: list[Event], shape: Shape, numbers: bool = True) -> None:
    for event in events:
        kind, microbatch = event.action.kind, event.action.microbatch
        row = shape.stages - 1 - event.stage
        if kind == STEP:
            axis.plot([event.end, event.end], [row - 0.45, row + 0.45], color="black", linewidth=1.6)
        if kind not in (F, B):
            continue
        colours = FORWARD if kind == F else BACKWARD
        colour = colours[shape.batch(microbatch) % len(colours)]
        width, middle = event.end - event.start, (event.start + event.end) / 2
        axis.barh(row, width, left=event.start, height=0.86, color=colour, edgecolor="white", linewidth=0.6)
        if numbers:
            ink = "black" if kind == F else "white"
            axis.text(middle, row, str(microbatch + 1), ha="center", va="center", fontsize=6.5, color=ink)
    axis.set_yticks(range(shape.stages), [f"stage {stage}" for stage in reversed(range(shape.stages))], fontsize=8)
    axis.set_facecolor("#eeeeee")
    axis.margins(x=0, y=0.02)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
