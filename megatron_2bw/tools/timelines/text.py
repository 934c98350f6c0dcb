"""Writes events of a schedule as text, like the paper's figures: a row per stage, time
to the right. Pure Python.

A forward is the microbatch's number, from 1, and blanks; a backward is the number and
b's. Each ends in a space. A dot is time in which the stage waits, | a weight update. If
stages hold several model chunks, a capital letter names the chunk.
"""

from math import ceil
from typing import NamedTuple

from megatron_2bw.schedules import STEP, B, F
from megatron_2bw.tools.timelines.simulator import (
    Event,
    Events,
    by_stage,
    makespan,
    of_kind,
)

FILL = {F: " ", B: "b"}


class _Scale(NamedTuple):
    """`width` characters for each `unit` of time."""

    unit: float
    width: int

    def column(self, time: float) -> int:
        return round(time / self.unit * self.width)


def render(events: Events, stages: int, columns: int = 140) -> str:
    """The timeline of `events` (simulator.simulate), and a line with its scale.

    columns   maximum length of a line; the rest is cut
    """
    chunked = any(event.action.chunk for event in events)
    scale = _scale(events, chunked)
    head = len(f"stage {stages - 1}  ")
    span = makespan(events)
    lines = []
    for stage, own in enumerate(by_stage(events, stages)):
        row = _row(own, scale, scale.column(span), chunked)
        lines.append((f"stage {stage}".ljust(head) + row)[:columns])
    letters = "A, B, ... model chunk, " if chunked else ""
    lines.append(f"1 forward, 1b backward, {letters}. idle, | weight update")
    lines.append(
        f"{scale.width} characters take {scale.unit:.4g}, the timeline {span:.6g}"
    )
    return "\n".join(lines)


def _scale(events: Events, chunked: bool) -> _Scale:
    """The unit is the shortest action. Wide enough for the label of every action, a
    backward's mark and a space."""
    bars = [event for event in of_kind(events, *FILL) if event.duration]
    unit = min((bar.duration for bar in bars), default=1.0)
    # a rounded place may cost one character
    spare = 0 if _divides(unit, bars) else 1
    widths = []
    for event in bars:
        letters = len(label(event, chunked) + FILL[event.action.kind].strip())
        cells = round(event.duration / unit, 6)
        widths.append(ceil((letters + 1 + spare) / cells))
    return _Scale(unit, max(widths, default=2))


def _divides(unit: float, events: Events) -> bool:
    for event in events:
        for time in (event.start / unit, event.end / unit):
            if abs(time - round(time)) >= 1e-6 * max(time, 1):
                return False
    return True


def label(event: Event, chunked: bool) -> str:
    """The microbatch's number, from 1, and its chunk's letter."""
    letter = chr(ord("A") + event.action.chunk) if chunked else ""
    return f"{event.action.microbatch + 1}{letter}"


def _row(events: Events, scale: _Scale, columns: int, chunked: bool) -> str:
    row = ["."] * columns
    for event in of_kind(events, *FILL):
        first = scale.column(event.start)
        last = scale.column(event.end)
        if event.duration:
            bar = _bar(event, max(last - first, 1), chunked)
            row[first : first + len(bar)] = bar
    for event in of_kind(events, STEP):
        last = scale.column(event.end)
        if last:
            row[last - 1] = "|"
    return "".join(row)


def _bar(event: Event, length: int, chunked: bool) -> str:
    """The characters of an action: its number, its kind's mark, and a space; without
    room for these, marks."""
    number = label(event, chunked)
    fill = FILL[event.action.kind]
    if length <= len(number + fill.strip()):
        return (fill.strip() or "f") * length
    return number.ljust(length - 1, fill) + " "
