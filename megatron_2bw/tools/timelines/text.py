"""Writes events of a schedule as text, like the paper's figures: a row per stage, time
to the right. Pure Python.

A forward is the microbatch's number, from 1, and blanks; a backward is the number and
b's. Each ends in a space. A dot is time in which the stage waits, | a weight update, u
the stage's time for an update that overlaps its batches. If stages hold several model
chunks, a capital letter names the chunk.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from megatron_2bw.schedules import REDUCE, STEP, B, F
from megatron_2bw.tools.timelines.simulator import Event, by_stage, makespan

FILL = {F: " ", B: "b"}
UPDATE = "u"  # a stage's own time for an update that overlaps its batches
LEGEND = {F: "1 forward", B: "1b backward"}


class _Scale(NamedTuple):
    """`width` characters for each `unit` of time."""

    unit: float
    width: int

    def column(self, time: float) -> int:
        return round(time / self.unit * self.width)


def render(
    events: list[Event], stages: int, columns: int = 160, versions: bool = False
) -> str:
    """The timeline of `events` (simulator.simulate) and a line with its length and the
    busy share of the stages.

    columns   maximum length of a line; the rest is cut, and a line says so
    versions  write the weights W(v) of each action below its stage
    """
    chunked = any(event.action.chunk for event in events)
    work = [event for event in events if event.action.kind in FILL]
    scale = _scale(work, chunked)
    head = len(f"stage {stages - 1}  ")
    end = scale.column(makespan(events))
    room = max(columns - head, scale.width)
    length = min(end, room)
    lines = [("time".ljust(head) + _ruler(scale, length)).rstrip()]
    for stage, own in enumerate(by_stage(events, stages)):
        lines.append(
            f"stage {stage}".ljust(head) + _row(own, scale, end, chunked)[:length]
        )
        if versions:
            lines.append(
                ("   W(v)".ljust(head) + _versions(own, scale, end)[:length]).rstrip()
            )
    if end > room:
        shown = room / scale.width * scale.unit
        lines.append(
            f"cut at {columns} columns: time 0 to {shown:.4g} of {makespan(events):.4g} is shown"
        )
    kinds = {event.action.kind for event in work}
    legend = [text for kind, text in LEGEND.items() if kind in kinds]
    slow = any(
        event.action.kind == REDUCE and event.end > event.start for event in events
    )
    legend += (
        ["A, B, ... model chunk"] * chunked
        + [". idle", "| weight update"]
        + [f"{UPDATE} its time"] * slow
    )
    return "\n".join(
        [
            *lines,
            ", ".join(legend),
            f"makespan {makespan(events):.6g}; {busy_words(events, stages)}",
        ]
    )


def busy_words(events: list[Event], stages: int) -> str:
    share, steady = busy(events, stages)
    return f"stages busy {share:.1%} {'in the steady state' if steady else 'of the whole run'}"


def busy(events: list[Event], stages: int) -> tuple[float, bool]:
    """(share of time in which the stages run forwards and backwards, whether it is of
    the steady state).

    The steady state is the batches, from one reduction's start to the next, in which a
    stage runs as many forwards as backwards. If a stage has no such batch, as in a run
    of one batch, the share is of the whole run.
    """
    windows = [_windows(own) for own in by_stage(events, stages)]
    steady = all(windows)
    if steady:
        spans = [span for own in windows for span in own]
        return sum(work for work, _ in spans) / sum(length for _, length in spans), True
    work = sum(event.end - event.start for event in events if event.action.kind in FILL)
    return work / (stages * makespan(events)), False


def _windows(events: list[Event]) -> list[tuple[float, float]]:
    """(work, length) of the steady batches of one stage."""
    found, begin, work, ahead = [], None, 0.0, 0
    for event in events:
        kind = event.action.kind
        if kind in FILL:
            work += event.end - event.start
            ahead += {F: 1, B: -1}[kind]
        elif kind == REDUCE:
            if begin is not None and ahead == 0 and work:
                found.append((work, event.end - begin))
            begin, work, ahead = event.end, 0.0, 0
    return found


def _scale(work: list[Event], chunked: bool) -> _Scale:
    """The unit is the largest step that divides the times of all actions, or without
    one the shortest action. Wide enough for the label of every action, a backward's
    mark and a space."""
    timed = [event for event in work if event.end > event.start]
    unit = min((event.end - event.start for event in timed), default=1.0)
    parts = next((k for k in range(1, 5) if _divides(unit / k, timed)), None)
    # a rounded place may cost one character
    unit, spare = unit / (parts or 1), 0 if parts else 1
    needs = [
        ceil(
            (len(label(event, chunked)) + (event.action.kind != F) + 1 + spare) / cells
        )
        for event in timed
        if (cells := round((event.end - event.start) / unit, 6)) >= 1
    ]
    return _Scale(unit, max(needs, default=2))


def _divides(unit: float, events: list[Event]) -> bool:
    times = {time / unit for event in events for time in (event.start, event.end)}
    return all(abs(time - round(time)) < 1e-6 * max(time, 1) for time in times)


def label(event: Event, chunked: bool) -> str:
    """The microbatch's number, from 1, and its chunk's letter."""
    return str(event.action.microbatch + 1) + (
        chr(ord("A") + event.action.chunk) if chunked else ""
    )


def _row(events: list[Event], scale: _Scale, columns: int, chunked: bool) -> str:
    row = ["."] * columns
    for event in events:
        first, last = scale.column(event.start), scale.column(event.end)
        if event.action.kind == REDUCE:
            row[first:last] = UPDATE * (last - first)
        elif event.action.kind in FILL and event.end > event.start:
            bar = _bar(event, max(last - first, 1), chunked)
            row[first : first + len(bar)] = bar
    for event in events:
        if event.action.kind == STEP and scale.column(event.end):
            row[scale.column(event.end) - 1] = "|"
    return "".join(row)


def _bar(event: Event, length: int, chunked: bool) -> str:
    """The characters of an action: its number, its kind's mark, and a space; without
    room for these, marks."""
    number, fill = label(event, chunked), FILL[event.action.kind]
    if length <= len(number + fill.strip()):
        return (fill.strip() or "f") * length
    return number + fill * (length - 1 - len(number)) + " "


def _versions(events: list[Event], scale: _Scale, columns: int) -> str:
    row = [" "] * columns
    for event in events:
        text, first = str(event.action.version), scale.column(event.start)
        if event.action.kind in FILL and scale.column(event.end) - first > len(text):
            row[first : first + len(text)] = text
    return "".join(row)


def _ruler(scale: _Scale, length: int) -> str:
    """Times at round multiples of the unit, at least ten characters apart."""
    apart = next(
        step
        for power in range(12)
        for k in (1, 2, 5)
        if (step := k * 10**power) * scale.width >= 10
    )
    row = ""
    for place in range(0, -(-length // scale.width), apart):
        text = f"{place * scale.unit:.4g}"
        if place * scale.width + len(text) <= length:
            row = row.ljust(place * scale.width) + text
    return row
