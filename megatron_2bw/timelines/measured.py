"""The page of a measured run: its last batches, and the same lists simulated with the medians of its times.

Invariant: the simulated lists are those that the run executed. Only durations differ: they are each stage's medians.
"""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import Any, NamedTuple

from megatron_2bw.schedules import REDUCE, STEP, Action, B, F, PipeDreamFlush, Schedule, TwoBW, parse
from megatron_2bw.timelines.page import HERE, whole
from megatron_2bw.timelines.simulator import Event, Times, by_stage, simulate_lists
from megatron_2bw.timelines.waits import cut, drawn

SMALL = 1e-3  # of the timeline's length; shorter waits are left out
Lists = list[list[Event]]


class Batches(NamedTuple):
    """The last whole batches of a run, and all of its actions. Times in seconds since the epoch.

    begin   where the batches start
    first   the first of the batches
    waited  the wait before each action, by stage and action
    """

    events: list[Event]
    begin: float
    first: int
    microbatches: int
    waited: dict[tuple[int, Action], float]
    title: str

    @property
    def stages(self) -> int:
        return 1 + max(event.stage for event in self.events)


def last_batches(events: list[dict[str, Any]], batches: int) -> Batches | None:
    """The last `batches` batches, at most, that all stages of a pipeline have reduced; None if there is none."""
    timed = [event for event in events if event["ph"] == "X" and event["cat"] != "wait"]
    reduces = [event for event in timed if event["cat"] == "R"]
    if not reduces:
        return None
    stages = range(1 + max(event["tid"] for event in timed))
    last = min(max((e["args"]["batch"] for e in reduces if e["tid"] == stage), default=-1) for stage in stages)
    if last < 0:  # a stage's file ends before its first reduction
        return None
    first = max(last - batches + 1, min(event["args"]["batch"] for event in reduces))
    ends = {e["args"]["batch"]: e["ts"] for e in reduces if e["tid"] == 0}
    begin = ends.get(first - 1, min(event["ts"] for event in timed))
    made = [Event(e["tid"], parse(e["name"])[0], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in timed]
    count = sum(e["cat"] == "B" and e["tid"] == 0 for e in timed)
    microbatches = count // max(1, len(ends))
    waited = {(own.stage, own.action): e["args"]["waited_ms"] / 1e3 for own, e in zip(made, timed)}
    return Batches(made, begin / 1e6, first, max(microbatches, 1), waited, f"batches {first} to {last}")


def html(batches: Batches) -> str:
    return whole(HERE / "trace.html", {"trace": timelines(batches)})


def timelines(batches: Batches) -> dict[str, Any]:
    """What the page shows: both timelines, in milliseconds, and the medians."""
    events = [event._replace(start=1e3 * event.start, end=1e3 * event.end) for event in batches.events]
    waited = {place: 1e3 * seconds for place, seconds in batches.waited.items()}
    lists = by_stage(events, batches.stages)
    schedule: Schedule = TwoBW() if has_late_step(lists) else PipeDreamFlush()  # for the rule of its step only
    times = medians(lists, schedule.late_step)
    found = simulate_lists(schedule, [[event.action for event in own] for own in lists], times, partial=True)
    before = (0, REDUCE, batches.first - 1)
    begin = next((e.start for e in found if (e.stage, e.action.kind, e.action.number) == before), 0.0)
    if schedule.late_step:  # a measured step begins where its stage begins to wait for it, as in a simulation
        events = [
            event._replace(start=event.start - waited[event.stage, event.action])
            if event.action.kind == STEP
            else event
            for event in events
        ]
    measured = drawn(schedule, cut(events, 1e3 * batches.begin), batches.stages, times, small=SMALL, waited=waited)
    return {
        "title": batches.title,
        "microbatches": batches.microbatches,
        "medians": {"forward": times.forward, "backward": times.backward, "message": times.transfer},
        "timelines": {"measured": measured, "simulated": drawn(schedule, cut(found, begin), batches.stages, times)},
    }


def has_late_step(lists: Lists) -> bool:
    """Whether other actions stand between a batch's reduction and its step."""
    return any(
        after.action.kind != STEP for own in lists for before, after in pairwise(own) if before.action.kind == REDUCE
    )


def medians(lists: Lists, late: bool) -> Times:
    """Each stage's median times of a forward and a backward; the least time of a message, of both directions' mean.

    The step of a schedule with a flush is the least time that a stage spends in R and S: the other stages wait in them.
    """

    def median(stage: int, kinds: str) -> float:
        return statistics.median([e.end - e.start for e in lists[stage] if e.action.kind in kinds] or [0.0])

    stages = range(len(lists))
    took = {kind: [median(stage, kind) for stage in stages] for kind in (F, B, REDUCE)}
    ends = {(e.stage, e.action.kind, e.action.number): e for own in lists for e in own}

    def least(kind: str, giver: int, taker: int) -> float:
        pairs = [(e, ends.get((taker, kind, e.action.microbatch))) for e in lists[giver] if e.action.kind == kind]
        return min((other.start - e.end for e, other in pairs if other), default=0.0)

    transfer = [max(least(F, s, s + 1) + least(B, s + 1, s), 0.0) / 2 for s in stages[:-1]] + [0.0]
    step = 0.0 if late else min(took[REDUCE][stage] + median(stage, STEP) for stage in stages)
    overlap = took[REDUCE] if late else 0.0
    return Times(took[F], took[B], transfer=transfer, step=step, joint_step=True, overlap_cost=overlap)
