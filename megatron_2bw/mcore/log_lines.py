"""Megatron's log lines with tokens per second, ETA, share of the GPUs' peak (MFU), the
stages' waits and peak memory.

The same values go to TensorBoard and to Weights & Biases.

Invariants: the line of an iteration holds the loss, gradient norm, loss scale, learning
rate and skipped flag of the same batch. With a late step it is written when the step is
complete, before all that the training loop prints or writes about later iterations (and
after "exiting program" if a run leaves in its middle); no stage waits for another.
"""

import contextlib
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import (
    get_current_running_global_batch_size,
)
from megatron.core.transformer.moe import moe_logging
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.training import (
    get_args,
    get_tensorboard_writer,
    get_timers,
    get_wandb_writer,
    training,
)

from megatron_2bw.base import run_log
from megatron_2bw.engine.pipeline import warmed_up
from megatron_2bw.engine.streams import own_stream
from megatron_2bw.mcore.batch_sizes import planned
from megatron_2bw.mcore.late_step import StepResult
from megatron_2bw.mcore.rebinding import around, replaced
from megatron_2bw.mcore.stage_times import Meeting

# Peak of the matrix units in 16-bit floats, by torch's names of GPUs (NVIDIA's data
# sheets). Their PCIe and NVL versions have other peaks, but not A100's.
TFLOPS = {
    r"Tesla V100-SXM\d-": 125,
    r"NVIDIA A100[- ]": 312,
    r"NVIDIA H100 80GB HBM3$": 989,
    r"NVIDIA H200$": 989,
}


# of Megatron's arguments
SAMPLES = ("consumed_train_samples", "skipped_train_samples")


@dataclass(frozen=True)
class Entry:
    """A call of `training_log` that waits for its step.

    seconds   of its iteration
    samples   SAMPLES of Megatron's arguments by then
    computed  when its losses are
    """

    values: dict[str, Any]
    seconds: float
    samples: dict[str, int]
    computed: torch.cuda.Event


class LogLines:
    """Calls Megatron's `training_log`, and adds the stages' part to its line and to the
    dashboards.

    meeting  of the stages, for their stats, in a schedule whose stages synchronise
             after each batch: Megatron's loop does that, under `pipedream` too, for the
             skipped steps and the norm. None with a late step, whose results come
             later, with the stats.
    """

    def __init__(self, meeting: Meeting | None = None):
        self._meeting = meeting
        self._stages = []  # since the last line
        self._printed = None  # the iteration whose line Megatron is writing
        self._progress = Progress()
        self._calls = 0  # of `add`
        self._retries = 0  # of torch's allocator, as far as they are reported
        self._entries = deque()
        # By batch: its values in place of Megatron's, its stages' stats, and its
        # auxiliary losses.
        self._results = {}
        # how often the heads of --mtp-num-layers were right so far
        self._rates = {}
        self._report_memory = True
        self._stream = own_stream(torch.device("cuda"))
        # seconds of the iterations written since Megatron last reset its timer
        self._unread = []
        timer = get_timers()("interval-time", log_level=0)
        _wait_for_nobody(timer)
        self._read = timer.elapsed
        timer.elapsed = self._interval

    def add(self, write: Callable, values: dict[str, Any]) -> bool:
        """Take one call of `training_log` (`write`); returns what that does, whether
        memory is still to be reported."""
        self._warn_of_retries(values)
        self._write = write
        computed = torch.cuda.current_stream().record_event()
        samples = {name: getattr(get_args(), name) for name in SAMPLES}
        self._entries.append(Entry(values, self._read(), samples, computed))
        if self._meeting is not None:
            stages = self._meeting.stats(_has_line(values))
            self._results[values["iteration"] - 1] = ({}, stages, None)
        self.flush()
        return self._report_memory

    def completed(self, result: StepResult) -> None:
        """The step of a batch is complete."""
        values = {
            "learning_rate": result.learning_rate,
            "loss_scale": result.loss_scale,
            "grad_norm": result.grad_norm,
            "num_zeros_in_grad": result.zeros,
            "skipped_iter": 0 if result.stepped else 1,
        }
        self._results[result.batch] = (values, result.stages, result.losses)

    def flush(self) -> None:
        """Write all lines whose steps are complete."""
        while self._entries:
            iteration = self._entries[0].values["iteration"]
            result = self._results.pop(iteration - 1, None)
            if result is None:
                return
            changes, stages, losses = result
            if stages:
                self._stages.append(stages)
            entry = self._entries.popleft()
            self._unread.append(entry.seconds)
            self._write_one(entry, changes, losses)

    def _write_one(self, entry: Entry, changes: dict, losses: Any) -> None:
        changes["report_memory_flag"] = self._report_memory
        printed = entry.values["iteration"] if _has_line(entry.values) else None
        self._stream.wait_event(entry.computed)
        with (
            replaced(get_args(), **entry.samples),
            replaced(self, _printed=printed),
            self._trackers_of(losses),
            # Megatron sums losses and waits: for them, not for the next batch
            torch.cuda.stream(self._stream),
        ):
            self._report_memory = self._write(**entry.values | changes)
        torch.cuda.current_stream().wait_stream(self._stream)

    @contextlib.contextmanager
    def _trackers_of(self, losses: Any) -> Iterator[None]:
        """Inside, Megatron's trackers have the auxiliary losses of a batch, if it has
        any, not those of the batch that runs."""
        if not losses:
            yield
            return
        counted = moe_logging.get_moe_metrics_tracker()
        heads = MTPLossLoggingHelper.tracker
        moe_logging.set_moe_metrics_tracker(losses.tracker)
        MTPLossLoggingHelper.tracker = losses.heads | self._rates
        try:
            yield
        finally:
            for name, value in MTPLossLoggingHelper.tracker.items():
                if name.startswith("cumulative"):
                    self._rates[name] = value
            MTPLossLoggingHelper.tracker = heads
            moe_logging.set_moe_metrics_tracker(counted)

    def _interval(self, reset: bool = True, barrier: bool = False) -> float:
        seconds = sum(self._unread)
        if reset:
            self._unread.clear()
        return seconds

    def _warn_of_retries(self, values: dict[str, Any]) -> None:
        """Report that this rank's GPU ran out of memory after the warm-up.

        torch then frees its cache. That waits for the whole GPU, and so for receives
        that are posted.
        """
        self._calls += 1
        # the first iteration that posts receives early needs their memory
        warm = warmed_up(self._calls - 2)
        if warm and not _has_line(values):
            return
        retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
        if warm and retries > self._retries:
            print(
                f"> rank {dist.get_rank()}, before the end of iteration "
                f"{values['iteration']}: GPU memory ran out, allocator retries: "
                f"{retries - self._retries}. A retry waits for the whole GPU and can "
                "hang the run: leave more of it free (docs/design.md#limits-of-the-late-step)",
                flush=True,
            )
        self._retries = retries

    def line(self, text: str) -> str:
        """What Megatron prints; if it is an iteration's line, with this project's
        part."""
        if self._printed is None:
            return text
        return self._progress.line(text) + self._describe(self._printed)

    def _describe(self, iteration: int) -> str:
        """The part of the line on the stages, which also goes to TensorBoard and
        Weights & Biases."""
        scalars = {}
        shares = []
        sizes = []
        for stage, stats in enumerate(zip(*self._stages)):
            waited = sum(each.waited for each in stats)
            elapsed = sum(each.elapsed for each in stats)
            shares.append(waited / max(elapsed, 1e-9))
            memory = stats[-1].memory / 2**30
            sizes.append(f"{memory:.2f}")
            scalars[f"bubble/stage {stage}"] = shares[-1]
            scalars[f"peak memory (GiB)/stage {stage}"] = memory
        self._stages.clear()
        mean = scalars["bubble/mean"] = sum(shares) / len(shares)
        most = scalars["bubble/max"] = max(shares)
        _send(scalars, iteration)
        text = f" bubble: {mean:.1%}/{most:.1%} | peak memory by stage (GiB): "
        return text + " ".join(sizes) + " |"


class Progress:
    """How far the run is and how fast. Evaluation and saving count in the ETA, not in
    the other values.

    Batches may differ in size. So the speed counts the samples since the line before,
    and the ETA counts samples.
    """

    # when the first line was written, and its samples
    _first = None
    _planned = 0  # samples of the whole run
    _before = (0, 0)  # iteration and samples of the line before

    @around
    def print_line(self, print_rank_last: Callable, message: str) -> None:
        """For Megatron's own schedule."""
        print_rank_last(self.line(message))

    def line(self, text: str) -> str:
        """What Megatron prints; to an iteration's line the progress is added, which
        also goes to the dashboards."""
        for record in run_log.training(text):
            seconds = max(record.milliseconds or 0, 0.1) / 1000
            text += self._describe(get_args(), record.iteration, seconds)
        return text

    def _describe(self, args: Any, iteration: int, seconds: float) -> str:
        """The part of the line on an iteration that took `seconds`."""
        samples = args.consumed_train_samples
        size = self._batch_size(args, iteration)
        left = self._pace(samples, seconds / size) * (self._planned - samples)
        speed = size * args.seq_length / seconds
        tokens = samples * args.seq_length
        values = {"tokens per second": speed, "tokens": tokens}
        values["ETA (hours)"] = left / 3600
        eta = timedelta(seconds=round(left))
        text = f" tokens/s: {speed:.0f} | tokens: {tokens} | ETA: {eta} |"
        used = mfu(args, size, seconds)
        if used is not None:
            values["MFU"] = used
            text += f" MFU: {used:.1%} |"
        _send(values, iteration)
        return text

    def _batch_size(self, args: Any, iteration: int) -> float:
        """The mean of the batches since the line before."""
        samples = args.consumed_train_samples
        before, samples_before = self._before
        self._before = (iteration, samples)
        if self._first is None:
            _, self._planned = planned(args, iteration, samples)
            return get_current_running_global_batch_size()
        return (samples - samples_before) / (iteration - before)

    def _pace(self, samples: int, pace: float) -> float:
        """Seconds a sample since the first line; there `pace`."""
        now = time.perf_counter()
        if self._first is None:
            self._first = (now, samples)
        start, first = self._first
        if samples == first:
            return pace
        return (now - start) / (samples - first)


def _send(values: dict[str, float], iteration: int) -> None:
    writer = get_tensorboard_writer()
    if writer is not None:
        for name, value in values.items():
            writer.add_scalar(name, value, iteration)
    wandb = get_wandb_writer()
    if wandb is not None:
        wandb.log(values, iteration)


def mfu(args: Any, size: float, seconds: float) -> float | None:
    """Share of the GPUs' peak that an iteration of `size` samples used, by Megatron's
    count of its operations.

    None where the peak is not known: on other GPUs, on the CPU, and without bfloat16 or
    float16.
    """
    if args.params_dtype is torch.float32 or args.fp8:
        return None
    for pattern, tflops in TFLOPS.items():
        if re.match(pattern, torch.cuda.get_device_name()):
            operations = training.num_floating_point_operations(args, size)
            return operations / (seconds * args.world_size * tflops * 1e12)
    return None


def _has_line(values: dict[str, Any]) -> bool:
    """Whether Megatron prints a line at this call of `training_log`."""
    due = values["iteration"] % get_args().log_interval == 0
    return due or values["is_first_iteration"]


def _wait_for_nobody(timer: Any) -> None:
    """Let one of Megatron's timers wait for no rank and no GPU."""

    def start(barrier: bool = False) -> None:
        timer._start_time = time.perf_counter()
        timer._started = True

    def stop(barrier: bool = False) -> None:
        elapsed = time.perf_counter() - timer._start_time
        timer._elapsed += elapsed
        timer._active_time += elapsed
        timer._started = False

    if timer._started:  # by Megatron's loop, before its first iteration
        elapsed = max(time.time() - timer._start_time, 0)
        timer._start_time = time.perf_counter() - elapsed
    timer.start = start
    timer.stop = stop
