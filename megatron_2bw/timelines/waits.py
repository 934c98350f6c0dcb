"""Why each action of a simulated timeline starts when it does, and the timeline's critical path. Pure Python.

Invariant: nothing is simulated again. Each cause is read from the starts and ends that `simulate` returned.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from megatron_2bw.schedules import REDUCE, STEP, Action, B, F, Schedule
from megatron_2bw.timelines.simulator import Event, Times, by_stage, prepared

SMALL = 1e-9  # of the timeline's length: differences below it are rounding


def drawn(schedule: Schedule, events: list[Event], stages: int, times: Times, **measured: Any) -> dict[str, Any]:
    """The timeline as the pages read it, by stage: actions as text, starts, ends, waits; and the critical path."""
    waits = Waits(schedule, events, stages, times, **measured)
    return {
        "actions": [" ".join(str(event.action) for event in own) for own in waits.lists],
        "starts": [[event.start for event in own] for own in waits.lists],
        "ends": [[event.end for event in own] for own in waits.lists],
        "waits": [[list(wait) for wait in own] for own in waits.by_stage],
        "critical": [list(place) for place in waits.critical_path()],
        "makespan": max(event.end for event in events),
        "late": schedule.late_step,
    }


def cut(events: Iterable[Event], begin: float, until: float = math.inf) -> list[Event]:
    """The events that end after `begin` and start before `until`; `begin` becomes 0."""
    return [
        event._replace(start=event.start - begin, end=event.end - begin)
        for event in events
        if event.end > begin and event.start < until
    ]


class Wait(NamedTuple):
    """A stage's idle time before an action, or during a late step, and the action that ended it.

    place    the action's index in its stage's list
    seconds  in the unit of the times
    stage, at  stage and index of the action whose message, or whose reduction, came last
    queued   the part of `seconds` at most for which that message waited for its link
    """

    place: int
    seconds: float
    stage: int
    at: int
    queued: float


Place = tuple[int, int]  # stage, and index in its list


class Waits:
    """The waits of each stage in `events`, and the critical path.

    lists: each stage's events, in the order of its actions
    small: the share of the timeline's length below which a wait does not count
    waited: of a measured timeline, whose gaps also have other causes: the seconds of each wait, by stage and action
    """

    def __init__(
        self,
        schedule: Schedule,
        events: list[Event],
        stages: int,
        times: Times,
        small: float = SMALL,
        waited: dict[tuple[int, Action], float] | None = None,
    ):
        self.schedule, self.stages, self.waited = schedule, stages, waited
        self.lists = by_stage(events, stages)
        self._small = small * max((event.end for event in events), default=0.0)
        self._reduced: dict[int, list[tuple[float, int, int]]] = {}  # batch -> end, stage and place of each reduction
        for stage, (own, seconds) in enumerate(zip(self.lists, times.of("reduce", stages))):
            for at, event in enumerate(own):
                if event.action.kind == REDUCE:
                    self._reduced.setdefault(event.action.batch, []).append((event.start + seconds, stage, at))
        chunks = schedule.chunks
        self._made = [prepared([e.action for e in own], s, stages, chunks) for s, own in enumerate(self.lists)]
        self._giver = {  # of each message
            made.gives: (stage, at)
            for stage, own in enumerate(self._made)
            for at, made in enumerate(own)
            if made.gives is not None
        }
        self._send(times)
        self.by_stage = [self._of_stage(stage) for stage in range(stages)]

    def _send(self, times: Times) -> None:
        """When each message is sent, the message before it on its link, and when its stage is free again."""
        occupied, sending = times.of("occupied", self.stages), times.of("sending", self.stages)
        self._sent: dict[Place, float] = {}
        self._before: dict[Place, Place] = {}
        self._free: dict[Place, float] = {}
        if not any(occupied) and not any(sending):
            return
        for stage, own in enumerate(self._made):
            last: dict[str, Place] = {}
            for at, (action, _, gives, boundary) in enumerate(own):
                if gives is None:
                    continue
                place, sent = (stage, at), self.lists[stage][at].end
                self._free[place] = sent + sending[boundary]
                if action.kind in last:
                    self._before[place] = last[action.kind]
                    sent = max(sent, self._sent[last[action.kind]] + occupied[boundary])
                self._sent[place] = sent
                last[action.kind] = place

    def _of_stage(self, stage: int) -> list[Wait]:
        found, free, late = [], 0.0, self.schedule.late_step
        for at, (_, action, start, end) in enumerate(self.lists[stage]):
            idle = end - start if late and action[0] == STEP else start - free
            if self.waited is not None:
                idle = min(idle, self.waited.get((stage, action), 0.0))
            if idle > self._small and (other := self._cause(stage, at)):
                queued = self._queued(other) if action.kind in (F, B) else 0.0
                found.append(Wait(at, idle, *other, queued if queued > self._small else 0.0))
            free = self._free.get((stage, at), end) if self._free else end
        return found

    def _queued(self, place: Place) -> float:
        """How long the action's message waits for its link."""
        return self._sent[place] - self.lists[place[0]][place[1]].end if place in self._sent else 0.0

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
        """The chain of actions, first to last, that determines the timeline's end: without one's time it ends earlier.

        A message that waits for its link follows the message before it on that link.
        """
        ends = [(own[-1].end, stage) for stage, own in enumerate(self.lists) if own]
        stage = max(ends)[1]
        place, path = (stage, len(self.lists[stage]) - 1), []
        causes = {(s, wait.place): (wait.stage, wait.at) for s, own in enumerate(self.by_stage) for wait in own}
        while True:
            path.append(place)
            if place in causes:
                by_message = self.lists[place[0]][place[1]].action.kind in (F, B)
                place = causes[place]
                while by_message and self._queued(place) > self._small:
                    place = self._before[place]
            elif place[1] == 0:
                return path[::-1]
            else:
                place = (place[0], place[1] - 1)
