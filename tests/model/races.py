"""Finds accesses of two streams to the same bytes, one of them a write, that nothing in a rank's log orders.

Each stream and each thread has a vector clock: for each stream, how many of its operations are over before. Operations
of a stream, events, waits of the threads and handed-over jobs order; the moment of an entry in the log does not.
Memory that is freed while a stream other than the one that allocated it may use it is a race too, if something is
allocated on the latter then: torch's caching allocator gives it out again.
"""

from __future__ import annotations

from collections import Counter, defaultdict

Clock = dict[str, int]


def join(into: Clock, other: Clock) -> None:
    for stream, count in other.items():
        if into.get(stream, 0) < count:
            into[stream] = count


class Memory:
    def __init__(self, stream: str, place: str):
        self.stream, self.place = stream, place
        self.writes: dict[tuple[int, int], tuple] = {}  # area -> (stream, count, what)
        self.reads: dict[tuple[int, int], dict[str, tuple]] = {}

    def uses(self) -> list[tuple]:
        return [*self.writes.values(), *(use for by_stream in self.reads.values() for use in by_stream.values())]


class Races:
    def __init__(self, log: list[tuple]):
        self.found: Counter[tuple[str, str, str]] = Counter()
        self.accesses = 0
        self.streams: dict[str, Clock] = defaultdict(dict)
        self.threads: dict[str, Clock] = defaultdict(dict)
        self.events: dict[int, Clock] = {}
        self.jobs: dict[tuple[str, int], Clock] = {}
        self.memories: dict[int, Memory] = {}
        self.freed: dict[str, list[tuple]] = defaultdict(list)  # by the stream that the memory goes back to
        for thread, _, kind, *values in log:
            getattr(self, f"_{kind}")(self.threads[thread], thread, *values)

    def _K(self, host: Clock, thread: str, stream: str, accesses: tuple, what: str) -> None:
        clock = self.streams[stream]
        join(clock, host)
        clock[stream] = clock.get(stream, 0) + 1
        for memory, start, end, write in accesses:
            if memory in self.memories:
                self.accesses += 1
                self._touch(self.memories[memory], (start, end), write, stream, clock, what)

    def _C(self, host: Clock, thread: str, stream: str, operations, accesses: tuple, what: str) -> None:
        self._K(host, thread, stream, accesses, what)

    def _touch(self, memory: Memory, area, write: bool, stream: str, clock: Clock, what: str) -> None:
        def meets(other, use) -> bool:
            overlap = other[0] < area[1] and area[0] < other[1]
            return overlap and use[0] != stream and clock.get(use[0], 0) < use[1]

        earlier = [("write", other, use) for other, use in memory.writes.items()]
        if write:
            earlier += [("read", other, use) for other, uses in memory.reads.items() for use in uses.values()]
        for kind, other, use in earlier:
            if meets(other, use):
                self.found[
                    f"{kind}, then {'write' if write else 'read'}", f"{use[0]}: {use[2]}", f"{stream}: {what}"
                ] += 1
        use = stream, clock[stream], what
        if write:  # what it covers is ordered before it, or reported
            for areas in (memory.writes, memory.reads):
                for other in [o for o in areas if area[0] <= o[0] and o[1] <= area[1]]:
                    del areas[other]
            memory.writes[area] = use
        else:
            memory.reads.setdefault(area, {})[stream] = use

    def _R(self, host: Clock, thread: str, stream: str, event: int) -> None:
        self.events[event] = dict(self.streams[stream])
        join(self.events[event], host)

    def _W(self, host: Clock, thread: str, stream: str, event: int) -> None:
        join(self.streams[stream], self.events[event])

    def _S(self, host: Clock, thread: str, stream: str | None, place: str) -> None:
        for name in self.streams if stream is None else (stream,):
            join(host, self.streams[name])

    def _E(self, host: Clock, thread: str, event: int) -> None:
        join(host, self.events[event])

    def _G(self, host: Clock, thread: str, *operation) -> None:
        """Orders nothing on this rank."""

    _H = _G

    def _P(self, host: Clock, thread: str, job: int) -> None:
        self.jobs["P", job] = dict(host)

    def _D(self, host: Clock, thread: str, job: int) -> None:
        self.jobs["D", job] = dict(host)

    def _J(self, host: Clock, thread: str, job: int) -> None:
        join(host, self.jobs["P", job])

    def _T(self, host: Clock, thread: str, job: int) -> None:
        join(host, self.jobs.get(("D", job), {}))

    def _A(self, host: Clock, thread: str, memory: int, stream: str, place: str) -> None:
        self.memories[memory] = Memory(stream, place)
        known = dict(self.streams[stream])
        join(known, self._over())
        for first, uses in self.freed.pop(stream, ()):
            for name, count, what in uses:
                if known.get(name, 0) < count:
                    self.found["given out again", first, f"{name}: {what}"] += 1

    def _X(self, host: Clock, thread: str, memory: int, stream: None, place: str) -> None:
        gone, over = self.memories.pop(memory, None), self._over()
        if gone is not None:
            uses = [use for use in gone.uses() if use[0] != gone.stream and over.get(use[0], 0) < use[1]]
            if uses:
                self.freed[gone.stream].append((f"{gone.stream}: {gone.place}, freed by {thread} at {place}", uses))

    def _over(self) -> Clock:
        """What some thread has waited for is over, whoever knows."""
        known: Clock = {}
        for clock in self.threads.values():
            join(known, clock)
        return known
