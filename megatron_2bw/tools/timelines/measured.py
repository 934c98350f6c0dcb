"""The page of a measured run: its last batches, and the same lists simulated with the
medians of its times.

Invariant: the simulated lists are those that the run executed. Only durations differ:
they are each stage's medians.
"""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import Any, NamedTuple

from megatron_2bw.schedules import REDUCE, STEP, B, F, PipeDreamFlush, Schedule, TwoBW
from megatron_2bw.tools.timelines.page import HERE, whole
from megatron_2bw.tools.timelines.simulator import (
    Event,
    Times,
    by_stage,
    scaled,
    simulate_lists,
)
from megatron_2bw.tools.timelines.waits import cut, drawn

SMALL = 1e-3  # of the timeline's length; shorter waits are left out
Lists = list[list[Event]]


class Batches(NamedTuple):
    """The last whole batches of a run, and all of its actions. Times in seconds since
    the epoch."""

    events: list[Event]
    stages: int
    begin: float  # of the batches
    first: int  # of the batches
    microbatches: int
    title: str


def last_batches(events: list[Event], batches: int) -> Batches | None:
    """The last `batches` batches, at most, that all stages of a pipeline have reduced;
    None if there is none."""
    stages = 1 + max(event.stage for event in events)
    reduces = [
        {e.action.batch: e.start for e in own if e.action.kind == REDUCE}
        for own in by_stage(events, stages)
    ]
    last = min(max(own, default=-1) for own in reduces)
    if last < 0:  # a stage's file ends before its first reduction
        return None
    first = max(last - batches + 1, min(min(own) for own in reduces))
    begin = reduces[0].get(first - 1, min(event.start for event in events))
    count = sum(event.action.kind == B and event.stage == 0 for event in events)
    return Batches(
        events,
        stages,
        begin,
        first,
        max(count // len(reduces[0]), 1),
        f"batches {first} to {last}",
    )


def html(batches: Batches) -> str:
    return whole(HERE / "trace.html", {"trace": timelines(batches)})


def timelines(batches: Batches) -> dict[str, Any]:
    """What the page shows: both timelines, in milliseconds, and the medians."""
    events, stages = scaled(batches.events, 1e3), batches.stages
    lists = by_stage(events, stages)
    # for the rule of its step only
    schedule: Schedule = TwoBW() if has_late_step(lists) else PipeDreamFlush()
    times = medians(lists, schedule.late_step)
    found = simulate_lists(
        schedule,
        [[event.action for event in own] for own in lists],
        times,
        partial=True,
    )
    before = (0, REDUCE, batches.first - 1)
    begin = next(
        (e.start for e in found if (e.stage, e.action.kind, e.action.number) == before),
        0.0,
    )
    # a measured step begins where its stage begins to wait for it, as in a simulation
    if schedule.late_step:
        events = [
            e._replace(start=e.asked) if e.action.kind == STEP else e for e in events
        ]
    return {
        "title": batches.title,
        "microbatches": batches.microbatches,
        "medians": {
            "forward": times.forward,
            "backward": times.backward,
            "message": times.transfer,
        },
        "timelines": {
            "measured": drawn(
                schedule, cut(events, 1e3 * batches.begin), stages, times, SMALL
            ),
            "simulated": drawn(schedule, cut(found, begin), stages, times),
        },
    }


def has_late_step(lists: Lists) -> bool:
    """Whether other actions stand between a batch's reduction and its step."""
    return any(
        after.action.kind != STEP
        for own in lists
        for before, after in pairwise(own)
        if before.action.kind == REDUCE
    )


def medians(lists: Lists, late: bool) -> Times:
    """Each stage's median times of a forward and a backward; the least time of a
    message, of both directions' mean.

    The step of a schedule with a flush is the least time that a stage spends in R and
    S: the other stages wait in them.
    """

    def median(kind: str) -> list[float]:
        """Of each stage."""
        durations = [
            [e.end - e.start for e in own if e.action.kind == kind] for own in lists
        ]
        return [statistics.median(own or [0.0]) for own in durations]

    ends = {(e.stage, e.action.kind, e.action.number): e for own in lists for e in own}

    def least(kind: str, giver: int, taker: int) -> float:
        pairs = [
            (e, ends.get((taker, kind, e.action.number)))
            for e in lists[giver]
            if e.action.kind == kind
        ]
        return min((other.start - e.end for e, other in pairs if other), default=0.0)

    transfer = [
        max(least(F, s, s + 1) + least(B, s + 1, s), 0.0) / 2
        for s in range(len(lists) - 1)
    ] + [0.0]
    reduce = median(REDUCE)
    step = 0.0 if late else min(map(sum, zip(reduce, median(STEP))))
    overlap = reduce if late else 0.0
    return Times(
        median(F),
        median(B),
        transfer=transfer,
        step=step,
        joint_step=True,
        overlap_cost=overlap,
    )
