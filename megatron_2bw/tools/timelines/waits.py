"""Why each action of a timeline starts when it does, and the timeline's critical path.
Pure Python.

Invariant: nothing is simulated again. Each cause is read from the events that
`simulate` returned, or a run recorded.
"""

import collections
import math
from typing import Any, NamedTuple

from megatron_2bw.schedules import REDUCE, STEP, B, F, Schedule
from megatron_2bw.tools.timelines.simulator import (
    Events,
    Times,
    actions_of,
    by_stage,
    makespan,
    prepared,
)

SMALL = 1e-9  # of the timeline's length: differences below it are rounding


def drawn(
    schedule: Schedule,
    events: Events,
    stages: int,
    times: Times,
    small: float = SMALL,
) -> dict[str, Any]:
    """The timeline as the pages read it, by stage: actions as text, starts, ends,
    waits; and the critical path."""
    waits = Waits(schedule, events, stages, times, small)
    actions = actions_of(waits.lists)
    return {
        "actions": [" ".join(map(str, own)) for own in actions],
        "starts": [[event.start for event in own] for own in waits.lists],
        "ends": [[event.end for event in own] for own in waits.lists],
        "waits": [list(map(list, own)) for own in waits.by_stage],
        "critical": list(map(list, waits.critical_path())),
        "makespan": makespan(events),
        "late": schedule.late_step,
    }


def cut(events: Events, begin: float, until: float = math.inf) -> Events:
    """The events that end after `begin` and start before `until`; `begin` becomes 0."""
    kept = []
    for event in events:
        if event.end > begin and event.start < until:
            moved = event._replace(
                start=event.start - begin,
                end=event.end - begin,
                asked=max(event.asked - begin, 0.0),
                sent=event.sent - begin,
            )
            kept.append(moved)
    return kept


class Wait(NamedTuple):
    """A stage's idle time before an action, or during a late step, and the action that
    ended it."""

    place: int  # the action's index in its stage's list
    seconds: float  # in the unit of the times
    stage: int  # of the action whose message, or whose reduction, came last
    at: int  # its index in the list of that stage
    # the part of `seconds` at most for which that message waited for its link
    queued: float


Place = tuple[int, int]  # stage, and index in its list


class Waits:
    """The waits of each stage in `events`, and the critical path.

    lists: each stage's events, in the order of its actions
    small: the share of the timeline's length below which a wait does not count
    """

    def __init__(
        self,
        schedule: Schedule,
        events: Events,
        stages: int,
        times: Times,
        small: float,
    ):
        self.schedule = schedule
        self.lists = by_stage(events, stages)
        self._small = small * makespan(events)
        self._prepared = prepared(actions_of(self.lists), schedule.chunks)
        self._sender = {}  # of each message, its place
        # batch -> end, stage and index of each reduction
        self._reduced = collections.defaultdict(list)
        reduce = times.of("reduce", stages)
        for stage, own in enumerate(self.lists):
            for at, event in enumerate(own):
                message = self._prepared[stage][at].gives
                if message:
                    self._sender[message] = (stage, at)
                if event.action.kind == REDUCE:
                    end = event.start + reduce[stage]
                    self._reduced[event.action.batch].append((end, stage, at))
        self.by_stage = [self._waits(stage) for stage in range(stages)]

    def _waits(self, stage: int) -> list[Wait]:
        waits = []
        for at, event in enumerate(self.lists[stage]):
            late = self.schedule.late_step and event.action.kind == STEP
            idle = (event.end if late else event.start) - event.asked
            cause = self._cause(stage, at)
            if idle > self._small and cause:
                waits.append(Wait(at, idle, *cause, self._queued(cause)))
        return waits

    def _queued(self, place: Place) -> float:
        """How long the action's message waited for its link."""
        event = self.lists[place[0]][place[1]]
        if event.action.kind not in (F, B):
            return 0.0
        queued = event.sent - event.end
        return queued if queued > self._small else 0.0

    def _cause(self, stage: int, at: int) -> Place | None:
        action = self.lists[stage][at].action
        if action.kind in (F, B):
            return self._sender.get(self._prepared[stage][at].needs)
        if action.kind != STEP:
            return None
        reduced = self._reduced[action.batch]
        if not self.schedule.global_step:
            reduced = [entry for entry in reduced if entry[1] == stage]
        return max(reduced)[1:] if reduced else None

    def critical_path(self) -> list[Place]:
        """The chain of actions, first to last, that determines the timeline's end:
        without one's time it ends earlier.

        A message that waits for its link follows the message before it on that link.
        """
        causes = {}
        for stage, waits in enumerate(self.by_stage):
            for wait in waits:
                causes[stage, wait.place] = (wait.stage, wait.at)
        ends = []
        for stage, own in enumerate(self.lists):
            if own:
                ends.append((own[-1].end, stage))
        _, stage = max(ends)
        place = (stage, len(self.lists[stage]) - 1)
        path = [place]
        while place in causes or place[1]:
            if place in causes:
                place = self._first_queued(causes[place])
            else:
                place = (place[0], place[1] - 1)
            path.append(place)
        return path[::-1]

    def _first_queued(self, place: Place) -> Place:
        """The action, `place` or one before it, whose message did not wait for the link
        that the message of `place` waited for."""
        while self._queued(place):
            before = self._message_before(place)
            if before is None:
                break
            place = before
        return place

    def _message_before(self, place: Place) -> Place | None:
        """The action whose message left just before on the same link; None if the
        timeline begins later."""
        stage, at = place
        own = self._prepared[stage]
        kind = own[at].action.kind
        for before in reversed(range(at)):
            if own[before].gives and own[before].action.kind == kind:
                return stage, before
        return None
