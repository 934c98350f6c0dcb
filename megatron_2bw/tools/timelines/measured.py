"""The page of a measured run: its last batches, and the same lists simulated with the
medians of its times.

Invariant: the simulated lists are those that the run executed. Only durations differ:
they are each stage's medians.
"""

import collections
import statistics
from itertools import pairwise
from typing import Any, NamedTuple

from megatron_2bw.schedules import (
    PREDICT,
    REDUCE,
    STEP,
    B,
    F,
    PipeDreamFlush,
    Shape,
    TwoBW,
)
from megatron_2bw.tools.timelines.simulator import (
    Event,
    Events,
    Times,
    actions_of,
    by_stage,
    of_kind,
    scaled,
    simulate,
    simulate_lists,
)
from megatron_2bw.tools.timelines.waits import cut, drawn

SMALL = 1e-3  # of the timeline's length; shorter waits are left out
Lists = list[Events]


class Batches(NamedTuple):
    """The last whole batches of a run, and all of its actions. Times in seconds since
    the epoch."""

    events: Events
    stages: int
    begin: float  # of the batches
    first: int  # of the batches
    microbatches: int
    title: str


def last_batches(events: Events, batches: int) -> Batches | None:
    """The last `batches` batches, at most, that all stages of a pipeline have reduced;
    None if there is none."""
    stages = 1 + max(event.stage for event in events)
    lists = by_stage(events, stages)
    reductions = [_starts(own, REDUCE) for own in lists]
    if not all(reductions):  # a stage's file ends before its first reduction
        return None
    last = min(map(max, reductions))
    first = max(last - batches + 1, min(map(min, reductions)))
    start = min(event.start for event in events)
    begin = reductions[0].get(first - 1, start)
    backwards = len(of_kind(lists[0], B))
    return Batches(
        events,
        stages,
        begin,
        first,
        microbatches=max(backwards // len(reductions[0]), 1),
        title=f"batches {first} to {last}",
    )


def timelines(batches: Batches) -> dict[str, Any]:
    """What the page shows: both timelines, in milliseconds, and the medians."""
    events = scaled(batches.events, 1e3)
    stages = batches.stages
    lists = by_stage(events, stages)
    # for the rule of its step only
    schedule = TwoBW() if has_late_step(lists) else PipeDreamFlush()
    times = medians(lists, schedule.late_step)
    simulated = simulate_lists(schedule, actions_of(lists), times, partial=True)
    reductions = _starts(by_stage(simulated, stages)[0], REDUCE)
    begin = reductions.get(batches.first - 1, 0.0)
    # a measured step begins where its stage begins to wait for it, as in a simulation
    if schedule.late_step:
        for place, event in enumerate(events):
            if event.action.kind == STEP:
                events[place] = event._replace(start=event.asked)
    measured = cut(events, 1e3 * batches.begin)
    return {
        "title": batches.title,
        "microbatches": batches.microbatches,
        "medians": {
            "forward": times.forward,
            "backward": times.backward,
            "message": times.transfer,
        },
        "timelines": {
            "measured": drawn(schedule, measured, stages, times, SMALL),
            "simulated": drawn(schedule, cut(simulated, begin), stages, times),
        },
    }


def _starts(own: Events, kind: str) -> dict[int, float]:
    """When a stage starts the actions of this kind, by their numbers."""
    return {event.action.number: event.start for event in of_kind(own, kind)}


def has_late_step(lists: Lists) -> bool:
    """Whether other actions stand between a batch's reduction and its step."""
    for own in lists:
        for before, after in pairwise(own):
            if before.action.kind == REDUCE and after.action.kind != STEP:
                return True
    return False


def medians(lists: Lists, late: bool) -> Times:
    """Each stage's median times of a forward and a backward; the least time of a
    message, of both directions' mean.

    The step of a schedule with a flush is the least time that a stage spends in R and
    S: the other stages wait in them.
    """
    transfer = []
    for above, below in pairwise(lists):
        both = _least_delay(F, above, below) + _least_delay(B, below, above)
        transfer.append(max(both, 0.0) / 2)
    reduce = _medians(lists, REDUCE)
    step = _medians(lists, STEP)
    return Times(
        _medians(lists, F),
        _medians(lists, B),
        transfer=[*transfer, 0.0],
        predict=_medians(lists, PREDICT),
        step=0.0 if late else min(map(sum, zip(reduce, step))),
        joint_step=True,
        overlap_cost=reduce if late else 0.0,
    )


def _medians(lists: Lists, kind: str) -> list[float]:
    """Each stage's median time of the actions of this kind."""
    times = []
    for own in lists:
        durations = [event.duration for event in of_kind(own, kind)]
        times.append(statistics.median(durations or [0.0]))
    return times


def _least_delay(kind: str, sender: Events, receiver: Events) -> float:
    """The least time from the end of an action to the start of the receiver's."""
    starts = _starts(receiver, kind)
    delays = []
    for event in of_kind(sender, kind):
        if event.action.number in starts:
            delays.append(starts[event.action.number] - event.end)
    return min(delays, default=0.0)


def as_1f1b(events: Events, shape: Shape) -> Events:
    """The batches of a run in the order of 1F1B: each action takes as long as it did,
    and a message takes no time.

    In 1F1B the first stage is the last one to end a batch, and all stages continue
    after its step. In the run, too, that step follows its reduction at once.
    """
    first = by_stage(events, shape.stages)[0]
    durations = {}
    for event in of_kind(events, F, B, REDUCE):
        durations[event.stage, *event.action[:2]] = event.duration
    for reduction, step in zip(of_kind(first, REDUCE), of_kind(first, STEP)):
        durations[0, STEP, step.action.batch] = step.end - reduction.end
    simulated = []
    ends = collections.defaultdict(float)  # of each action, and of each stage's last
    # in this order each action stands after those that it waits for
    for stage, action, *_ in simulate(PipeDreamFlush(), shape, Times(step=1.0)):
        kind, number, *_ = action
        before = stage - 1 if kind in (F, STEP) else stage + 1
        start = max(ends[stage], ends[before, kind, number])
        end = start + durations.get((stage, kind, number), 0.0)
        ends[stage] = ends[stage, kind, number] = end
        simulated.append(Event(stage, action, start, end))
    return simulated
