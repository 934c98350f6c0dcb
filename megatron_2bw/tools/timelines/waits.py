"""Why each action of a timeline starts when it does, and the timeline's critical path.
Pure Python.

Invariant: nothing is simulated again. Each cause is read from the events that
`simulate` returned, or a run recorded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from megatron_2bw.schedules import REDUCE, STEP, B, F, Schedule
from megatron_2bw.tools.timelines.simulator import (
    Event,
    Times,
    by_stage,
    makespan,
    prepared,
)

SMALL = 1e-9  # of the timeline's length: differences below it are rounding


def drawn(
    schedule: Schedule,
    events: list[Event],
    stages: int,
    times: Times,
    small: float = SMALL,
) -> dict[str, Any]:
    """The timeline as the pages read it, by stage: actions as text, starts, ends,
    waits; and the critical path."""
    waits = Waits(schedule, events, stages, times, small)
    return {
        "actions": [
            " ".join(str(event.action) for event in own) for own in waits.lists
        ],
        "starts": [[event.start for event in own] for own in waits.lists],
        "ends": [[event.end for event in own] for own in waits.lists],
        "waits": [[list(wait) for wait in own] for own in waits.by_stage],
        "critical": [list(place) for place in waits.critical_path()],
        "makespan": makespan(events),
        "late": schedule.late_step,
    }


def cut(events: Iterable[Event], begin: float, until: float = math.inf) -> list[Event]:
    """The events that end after `begin` and start before `until`; `begin` becomes 0."""
    return [
        Event(
            stage,
            action,
            start - begin,
            end - begin,
            max(asked - begin, 0.0),
            sent - begin,
        )
        for stage, action, start, end, asked, sent in events
        if end > begin and start < until
    ]


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
        events: list[Event],
        stages: int,
        times: Times,
        small: float,
    ):
        self.schedule, self.lists = schedule, by_stage(events, stages)
        self._small = small * makespan(events)
        self._made = prepared(
            [[event.action for event in own] for own in self.lists], schedule.chunks
        )
        places = [
            (stage, at)
            for stage, own in enumerate(self.lists)
            for at in range(len(own))
        ]
        self._giver = {
            self._made[stage][at].gives: (stage, at)
            for stage, at in places
            if self._made[stage][at].gives
        }
        reduce = times.of("reduce", stages)
        # batch -> end, stage and place of each reduction
        self._reduced: dict[int, list[tuple[float, int, int]]] = {}
        for stage, at in places:
            event = self.lists[stage][at]
            if event.action.kind == REDUCE:
                self._reduced.setdefault(event.action.batch, []).append(
                    (event.start + reduce[stage], stage, at)
                )
        self.by_stage = [self._of_stage(stage) for stage in range(stages)]

    def _of_stage(self, stage: int) -> list[Wait]:
        found = []
        for at, event in enumerate(self.lists[stage]):
            late = self.schedule.late_step and event.action.kind == STEP
            idle = (event.end if late else event.start) - event.asked
            if idle > self._small and (cause := self._cause(stage, at)):
                found.append(Wait(at, idle, *cause, self._queued(cause)))
        return found

    def _queued(self, place: Place) -> float:
        """How long the action's message waited for its link."""
        event = self.lists[place[0]][place[1]]
        queued = event.sent - event.end if event.action.kind in (F, B) else 0.0
        return queued if queued > self._small else 0.0

    def _cause(self, stage: int, at: int) -> Place | None:
        action = self.lists[stage][at].action
        if action.kind in (F, B):
            return self._giver.get(self._made[stage][at].needs)
        if action.kind != STEP:
            return None
        reduced = self._reduced.get(action.batch, [])
        if not self.schedule.global_step:
            reduced = [one for one in reduced if one[1] == stage]
        return max(reduced)[1:] if reduced else None

    def critical_path(self) -> list[Place]:
        """The chain of actions, first to last, that determines the timeline's end:
        without one's time it ends earlier.

        A message that waits for its link follows the message before it on that link.
        """
        _, stage = max(
            (own[-1].end, stage) for stage, own in enumerate(self.lists) if own
        )
        place, path = (stage, len(self.lists[stage]) - 1), []
        causes = {
            (s, wait.place): (wait.stage, wait.at)
            for s, own in enumerate(self.by_stage)
            for wait in own
        }
        while True:
            path.append(place)
            if place in causes:
                place = causes[place]
                while self._queued(place) and (before := self._message_before(place)):
                    place = before
            elif place[1] == 0:
                return path[::-1]
            else:
                place = (place[0], place[1] - 1)

    def _message_before(self, place: Place) -> Place | None:
        """The action whose message left just before on the same link; None if the
        timeline begins later."""
        (stage, at), own = place, self._made[place[0]]
        before = (
            i
            for i in reversed(range(at))
            if own[i].gives and own[i].action.kind == own[at].action.kind
        )
        return next(((stage, i) for i in before), None)
