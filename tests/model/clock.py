"""python -m tests.model.clock [WORDS]: what the mends cost in time, on recorded runs with assumed durations.

Every stream has a hardware queue of its own: with fewer, the runs without a mend deadlock. An operation starts when its
thread has issued it and its stream has ended the one before; an NCCL kernel, when all its ranks have started theirs. A
thread that has waited for the GPU continues `wake` later. Streams do not slow each other down, nor do threads.

Held-back receives are posted as late as they can be, at the end of the wait for the step: the log is of the latest.
WORDS: only the cases whose name has them.
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter, defaultdict, deque

from tests.model import cases
from tests.model.table import MENDS

# Milliseconds of a stage's forward and backward, of all kernels of a step, of a message, an NCCL and a gloo collective;
# of a launch, and until a thread that has waited for the GPU continues.
MS = {"F": 10.0, "B": 20.0, "step": 5.0, "message": 1.0, "nccl": 2.0, "gloo": 0.2, "launch": 0.005, "wake": 0.02}
STEPS = 5.0, 40.0  # one that is complete before the next needs it, and one that is not
CASES = "tied", "width", "sharded", "four-stages", "more-extra-warmup", "uneven-extra-warmup"
LABELS = {"F": "F", "B": "B", "a": "step"}  # "F3@1", "B3@1", "after R1@1": see `record`


class Clock:
    """The times of a run. marks: by rank and kind (first W, D, T: see `record`), the time at each label."""

    def __init__(self, logs: list[list[tuple]], ms: dict[str, float] = MS):
        self.ms, self.marks = ms, defaultdict(dict)
        self.host: dict[tuple, float] = defaultdict(float)  # by thread
        self.end: dict[tuple, float] = defaultdict(float)  # by stream, of what it has ended
        self.issued: dict[tuple, deque] = defaultdict(deque)  # by stream, what it has not ended: (time, entry)
        self.known: dict[tuple, float] = {}  # times of events and jobs
        self.met: dict[tuple, dict[int, float]] = defaultdict(dict)  # by operation of several ranks, their starts
        self.kernels = Counter((rank, e[1], e[3]) for rank, log in enumerate(logs) for e in log if e[2] == "K")
        self.recorded = {(rank, "R", e[4]) for rank, log in enumerate(logs) for e in log if e[2] == "R"}
        threads: dict[tuple, deque] = defaultdict(deque)
        for rank, log in enumerate(logs):
            for thread, *entry in log:
                threads[rank, thread].append(entry)
        again = True
        while again:
            again = False
            for key, entries in threads.items():
                while entries and self._advance(key, *entries[0]):
                    again = bool(entries.popleft())
            for key, queue in self.issued.items():
                while queue and self._end(key, *queue[0]):
                    again = bool(queue.popleft())
        assert not any(threads.values()) and not any(self.issued.values()), "a deadlock"

    def _advance(self, key: tuple, label: str, kind: str, *values) -> bool:
        """A thread's next entry, unless it waits for a time that is not yet known."""
        rank, now = key[0], self.host[key]
        if kind in "KRWC":
            self.host[key] += self.ms["launch"] * (kind in "KC")
            self.issued[rank, values[0]].append((self.host[key], label, kind, values[1:]))
        elif kind == "S":
            streams = [s for s in list(self.issued) if s[0] == rank and values[0] in (None, s[1])]
            if any(self.issued[stream] for stream in streams):
                return False
            over = max((self.end[stream] for stream in streams), default=0.0)
            self.host[key] = over + self.ms["wake"] if over > now else now
        elif kind == "G":
            self.met[values[0], values[1]][rank] = now
        elif kind == "H":
            if len(self.met[values[0], values[1]]) < len(values[1]):
                return False
            self.host[key] = max(now, max(self.met[values[0], values[1]].values()) + self.ms["gloo"])
        elif kind in "EJT":
            what = rank, {"E": "R", "J": "P", "T": "D"}[kind], values[0]
            if what not in self.known and (kind != "E" or what in self.recorded):
                return False
            self.host[key] = max(now, self.known.get(what, 0.0))
        elif kind in "PD":
            self.known[rank, kind, values[0]] = now
        if kind in "DT":
            self.marks[rank, kind][label] = self.host[key]
        return True

    def _end(self, key: tuple, issued: float, label: str, kind: str, values: tuple) -> bool:
        """A stream's next operation, unless it waits for a time that is not yet known."""
        rank, start = key[0], max(issued, self.end[key])
        if kind == "K":
            start += self.ms.get(LABELS.get(label[0]), 0.0) / self.kernels[rank, label, key[1]]
        elif kind == "R":
            self.known[rank, "R", values[0]] = start
        elif kind == "W":
            if (rank, "R", values[0]) in self.recorded and (rank, "R", values[0]) not in self.known:
                return False
            start = max(start, self.known.get((rank, "R", values[0]), 0.0))
            self.marks[rank, kind].setdefault(label, start)
        else:
            starts = self.met[values[0]]
            starts[rank] = start
            if len(starts) < len(values[0][1]):
                return False
            start = max(starts.values()) + self.ms["message" if ">" in values[0][0] else "nccl"]
        self.end[key] = start
        return True

    def figures(self) -> tuple[float, float]:
        """Milliseconds of an iteration in the steady state, and of the first stage's step after its last backward."""
        waits, begun = list(self.marks[0, "T"].values()), self.marks[0, "W"]
        steps = [end - begun[job] for job, end in self.marks[0, "D"].items()]
        return (waits[-2] - waits[2]) / (len(waits) - 4), statistics.median(steps)


def main() -> None:
    print("| ms of an iteration (of a step) |", " | ".join(MENDS), "|")
    print("| --- |" + " --- |" * len(MENDS))
    for name in CASES:
        for step in STEPS if " ".join(sys.argv[1:]) in name else ():
            times = [Clock(cases.logs_of(name, *plants), MS | {"step": step}).figures() for plants in MENDS.values()]
            cells = [f"{whole:.2f} ({late:.2f})" for whole, late in times]
            print("|", " | ".join([f"{name}, kernels of a step {step:g}", *cells]), "|", flush=True)


if __name__ == "__main__":
    main()
