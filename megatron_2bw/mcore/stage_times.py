"""How long a stage waited and computed: from the recorder's marks to the numbers of a
log line and the trace's file."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch

from megatron_2bw.engine.process_groups import new_group
from megatron_2bw.engine.recorder import Marks, Recorder
from megatron_2bw.engine.trace_file import Record, TraceWriter
from megatron_2bw.engine.worker import Worker
from megatron_2bw.mcore.step_groups import gather
from megatron_2bw.schedules import B


@dataclass(frozen=True)
class StageStats:
    """A stage's timing and memory since the last report."""

    waited: float  # seconds without work
    elapsed: float  # seconds
    memory: float  # peak bytes so far


class StageTimes(NamedTuple):
    """Seconds of one stage in batches at whose end all stages synchronise.

    waited   for messages, before the end of a batch's last backward
    elapsed  until then, waiting included
    tail     from there until all stages have synchronised: its update, and waiting for
             stages that still compute
    """

    waited: float = 0.0
    elapsed: float = 0.0
    tail: float = 0.0


def stage_stats(stages: Sequence[tuple[StageTimes, float]]) -> tuple[StageStats, ...]:
    """From the times of each stage, and its peak memory in bytes.

    The last stage to finish its backwards (the first of the pipeline) synchronises
    without waiting, so the extra time of another stage's tail is waiting. No clock of
    one host is compared with another's.
    """
    least = min(times.tail for times, _ in stages)
    return tuple(
        StageStats(
            times.waited + times.tail - least, times.elapsed + times.tail, memory
        )
        for times, memory in stages
    )


@dataclass
class StageClock:
    """Turns a stage's marks into its stats, and into the records of --pipeline-trace.

    recorder  of the pipeline's actions
    writer    of the trace's file, if there is one
    worker    the thread of the late step, if there is one: it writes the file after the
              step
    """

    recorder: Recorder
    writer: TraceWriter | None
    worker: Worker | None

    def marks(self) -> Marks:
        """What happened since the last call; `stats` reads it later."""
        return self.recorder.cut()

    def stats(self, marks: Marks) -> StageStats:
        """In the late step's thread, which may wait for the GPU."""
        records = self.recorder.resolve(marks)
        if self.writer is not None:
            self.worker.submit(partial(self.writer.write, records))
        # Without evaluation, saving and the training loop itself.
        waited, elapsed = _spent(records)
        return StageStats(waited, elapsed, torch.cuda.max_memory_allocated())

    def times(self) -> StageTimes:
        """What happened since the last call, where no step is late: at the end of a
        batch, when all stages have synchronised.

        Megatron's loop has waited for the GPU by then, so this need not wait.
        """
        marks = self.recorder.cut()
        if not marks:
            return StageTimes()
        now = self.recorder.mark()
        *records, end = self.recorder.resolve([*marks, (marks[-1][0], now, now, now)])
        if self.writer is not None:
            self.writer.write(records)
        last = 0
        for index, record in enumerate(records):
            if record.action.kind == B:
                last = index
        waited, elapsed = _spent(records[: last + 1])
        return StageTimes(waited, elapsed, end.end - records[last].end)

    def close(self) -> None:
        """Write the rest of the trace."""
        if self.worker is not None:
            # after what the step's thread writes
            self.worker.submit(self._write_rest).result()
        else:
            self._write_rest()

    def _write_rest(self) -> None:
        if self.writer is not None:
            self.writer.write(self.recorder.resolve(self.recorder.cut()))


class Meeting:
    """Exchanges the stats of stages that have synchronised, over gloo: no kernel waits
    on the GPU for another stage.

    times  of this stage since the last call; ranks: the pipeline's, first stage to last
    """

    def __init__(
        self,
        times: Callable[[], StageTimes],
        ranks: Sequence[int],
        timeout: timedelta | None = None,
    ):
        self._times = times
        self._group = new_group(ranks, "reports", "gloo", timeout)
        self._own = []  # since the last exchange

    def stats(self, exchange: bool) -> tuple[StageStats, ...]:
        """After each batch. With `exchange` the stats of all stages since the last one,
        else nothing."""
        self._own.append(self._times())
        if not exchange:
            return ()
        sums = [sum(column) for column in zip(*self._own)]
        self._own.clear()
        rows = gather([*sums, torch.cuda.max_memory_allocated()], self._group)
        return stage_stats([(StageTimes(*times), memory) for *times, memory in rows])


def _spent(records: Sequence[Record]) -> tuple[float, float]:
    """Seconds waited, and in all."""
    waited = sum(record.start - record.asked for record in records)
    elapsed = sum(record.end - record.asked for record in records)
    return waited, elapsed
