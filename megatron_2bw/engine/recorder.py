"""When each action of a stage ran, and how long it waited before.

A mark costs a reading of the clock on the CPU and an event on the GPU. `resolve` turns
marks into times later: in the late step's thread, or at the end of a batch, when the
GPU has finished its work.
"""

import time
from typing import Any

import torch

from megatron_2bw.engine.trace_file import Record
from megatron_2bw.schedules import Action

Marks = list[tuple[Action, Any, Any, Any]]


class NoRecorder:
    """Records nothing."""

    def mark(self) -> Any:
        return None

    def add(self, *marks: Any) -> None:
        pass


class Recorder:
    """Collects the marks of a stage's actions; `resolve` turns them into records."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._marks: Marks = []
        base = self.mark()
        if self._cuda:
            base.synchronize()
        self._base = (base, time.time())

    def mark(self) -> Any:
        """Now: on the CPU's clock, or in the current stream of the GPU."""
        if not self._cuda:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(
        self,
        action: Action,
        asked: Any,
        start: Any,
        end: Any,
    ) -> None:
        """Note an action by its three marks (see `Record`)."""
        self._marks.append((action, asked, start, end))

    def cut(self) -> Marks:
        """The marks since the last cut, for `resolve`."""
        marks = self._marks
        self._marks = []
        return marks

    def resolve(self, marks: Marks) -> list[Record]:
        """Times of marks that `cut` returned, in order.

        On the GPU it waits until the last one has passed. The training thread must not
        do that while work is queued.
        """
        if self._cuda and marks:
            marks[-1][3].synchronize()
        records = []
        for action, asked, start, end in marks:
            times = (self._time(asked), self._time(start), self._time(end))
            records.append(Record(action, *times))
        if marks:
            last = marks[-1][3]
            # a near one: CUDA gives the time between two events in 32 bits
            self._base = (last, self._time(last))
        return records

    def _time(self, mark: Any) -> float:
        base, at = self._base
        return float(
            at + (base.elapsed_time(mark) / 1e3 if self._cuda else (mark - base) / 1e9)
        )
