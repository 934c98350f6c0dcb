"""Megatron's log lines under a late step: written when the step they describe is made, and without a barrier.

Invariant: the line of an iteration holds the loss, gradient norm, loss scale, learning rate and skipped flag of one
and the same batch; every line comes before whatever the training loop prints or writes about later iterations
(after "exiting program", if a run leaves in its middle).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.training import get_args, get_tensorboard_writer, get_timers, get_wandb_writer

from megatron_2bw.optimizer import Outcome, StageReport


@dataclass
class _Entry:
    """A call of Megatron's `training_log` that waits for its batch's step."""

    values: dict[str, Any]
    seconds: float  # that its iteration took
    consumed_samples: int
    skipped_samples: int


class Logbook:
    """Calls Megatron's `training_log` (`write`), later.

    Waiting times and peak memory of the stages are added to the line, to TensorBoard and to Weights & Biases.
    """

    def __init__(self):
        self._entries: deque[_Entry] = deque()
        self._outcomes: dict[int, Outcome] = {}
        self._stages: list[tuple[StageReport, ...]] = []  # one a batch since the last line
        self._report_memory = True
        self._write: Callable | None = None
        self._suffix = ""
        self._seconds = 0.0  # of the iterations written since Megatron last read the interval timer
        self._timer = get_timers()("interval-time", log_level=0)
        self._read = self._timer.elapsed
        self._timer.elapsed = self._interval
        _without_barriers(self._timer)

    def _interval(self, reset: bool = True, barrier: bool = False) -> float:
        seconds = self._seconds
        if reset:
            self._seconds = 0.0
        return seconds

    def add(self, write: Callable, values: dict[str, Any]) -> bool:
        """Keep one call of `training_log`; returns what it would, whether memory is still to be reported."""
        args = get_args()
        self._write = write
        self._entries.append(_Entry(values, self._read(), args.consumed_train_samples, args.skipped_train_samples))
        self.flush()
        return self._report_memory

    def settled(self, outcome: Outcome) -> None:
        """The step of a batch is made."""
        self._outcomes[outcome.batch] = outcome

    def flush(self) -> None:
        """Write all lines whose steps are made."""
        while self._entries and self._entries[0].values["iteration"] - 1 in self._outcomes:
            entry = self._entries.popleft()
            self._write_one(entry, self._outcomes.pop(entry.values["iteration"] - 1))

    def line(self, text: str) -> str:
        """Megatron's line with this project's part."""
        return text + self._suffix

    def _write_one(self, entry: _Entry, outcome: Outcome) -> None:
        args, iteration = get_args(), entry.values["iteration"]
        values = entry.values | {
            "learning_rate": outcome.learning_rate, "loss_scale": outcome.loss_scale,
            "grad_norm": outcome.grad_norm, "num_zeros_in_grad": outcome.zeros,
            "skipped_iter": 0 if outcome.stepped else 1, "report_memory_flag": self._report_memory,
        }
        self._stages.append(outcome.stages)
        if iteration % args.log_interval == 0 or values["is_first_iteration"]:
            self._suffix = self._describe(iteration)
        self._seconds += entry.seconds
        now = args.consumed_train_samples, args.skipped_train_samples
        args.consumed_train_samples, args.skipped_train_samples = entry.consumed_samples, entry.skipped_samples
        try:
            self._report_memory = self._write(**values)
        finally:
            args.consumed_train_samples, args.skipped_train_samples = now
            self._suffix = ""

    def _describe(self, iteration: int) -> str:
        """The part of the line on the stages, which also goes to TensorBoard and Weights & Biases."""
        shares, memory = [], []
        for stage in zip(*self._stages):
            shares.append(sum(report.waited for report in stage) / max(sum(r.elapsed for r in stage), 1e-9))
            memory.append(stage[-1].memory / 2**30)
        self._stages.clear()
        mean, most = sum(shares) / len(shares), max(shares)
        scalars = {"bubble/mean": mean, "bubble/max": most}
        scalars |= {f"bubble/stage {stage}": share for stage, share in enumerate(shares)}
        scalars |= {f"peak memory (GiB)/stage {stage}": value for stage, value in enumerate(memory)}
        writer, wandb = get_tensorboard_writer(), get_wandb_writer()
        for name, value in scalars.items():
            if writer:
                writer.add_scalar(name, value, iteration)
        if wandb:
            wandb.log(scalars, iteration)
        each = " ".join(f"{value:.2f}" for value in memory)
        return f" bubble: {mean:.1%}/{most:.1%} | peak memory by stage (GiB): {each} |"


def _without_barriers(timer: Any) -> None:
    """Let one of Megatron's timers wait for no rank and for no GPU."""

    def start(barrier: bool = False) -> None:
        timer._start_time, timer._started = time.time(), True

    def stop(barrier: bool = False) -> None:
        elapsed = time.time() - timer._start_time
        timer._elapsed += elapsed
        timer._active_time += elapsed
        timer._started = False

    timer.start, timer.stop = start, stop
