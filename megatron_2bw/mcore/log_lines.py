"""Megatron's log lines with tokens per second, ETA, share of the GPUs' peak (MFU), the
stages' waits and peak memory.

The same values go to TensorBoard and to Weights & Biases.

Invariants: the line of an iteration holds the loss, gradient norm, loss scale, learning
rate and skipped flag of the same batch. With a late step it is written when the step is
complete, before all that the training loop prints or writes about later iterations (and
after "exiting program" if a run leaves in its middle); no stage waits for another.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable
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
from megatron_2bw.mcore.stage_times import Meeting, StageStats

# Peak of the matrix units in 16-bit floats, by torch's names of GPUs (NVIDIA's data
# sheets). Their PCIe and NVL versions have other peaks, but not A100's.
TFLOPS = {
    r"Tesla V100-SXM\d-": 125,
    r"NVIDIA A100[- ]": 312,
    r"NVIDIA H100 80GB HBM3$": 989,
    r"NVIDIA H200$": 989,
}


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
        self._stages: list[tuple[StageStats, ...]] = []  # since the last line
        self._printed: int | None = None  # the iteration whose line Megatron is writing
        self._progress = Progress()
        # of `add`; of torch's allocator, as far as they are reported
        self._calls = self._retries = 0
        # Calls of `training_log` that wait for their steps, the seconds of their
        # iterations, their samples, and when their losses are computed.
        self._entries: deque[
            tuple[dict[str, Any], float, tuple[int, int], torch.cuda.Event]
        ] = deque()
        # By batch: its values in place of Megatron's, its stages' stats, and its
        # auxiliary losses.
        self._results: dict[
            int, tuple[dict[str, Any], tuple[StageStats, ...], Any]
        ] = {}
        # how often the heads of --mtp-num-layers were right so far
        self._rates: dict[str, torch.Tensor] = {}
        self._report_memory = True
        self._stream = own_stream(torch.device("cuda"))
        self._write: Callable[..., bool] = lambda **values: True
        # seconds of the iterations written since Megatron last reset its timer
        self._unread: list[float] = []
        timer = get_timers()("interval-time", log_level=0)
        _wait_for_nobody(timer)
        self._read = timer.elapsed
        timer.elapsed = self._interval

    def add(self, write: Callable[..., bool], values: dict[str, Any]) -> bool:
        """Take one call of `training_log` (`write`); returns what that does, whether
        memory is still to be reported."""
        self._warn_of_retries(values)
        args, self._write = get_args(), write
        samples = args.consumed_train_samples, args.skipped_train_samples
        self._entries.append(
            (values, self._read(), samples, torch.cuda.current_stream().record_event())
        )
        if self._meeting is not None:
            self._results[values["iteration"] - 1] = (
                {},
                self._meeting.stats(_has_line(values)),
                None,
            )
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
        self._results[result.batch] = values, result.stages, result.losses

    def flush(self) -> None:
        """Write all lines whose steps are complete."""
        while self._entries and self._entries[0][0]["iteration"] - 1 in self._results:
            values, seconds, *more = self._entries.popleft()
            changes, stages, losses = self._results.pop(values["iteration"] - 1)
            if stages:
                self._stages.append(stages)
            self._unread.append(seconds)
            self._write_one(
                values | changes | {"report_memory_flag": self._report_memory},
                losses,
                *more,
            )

    def _write_one(
        self,
        values: dict,
        losses: Any,
        samples: tuple[int, int],
        computed: torch.cuda.Event,
    ) -> None:
        args = get_args()
        self._printed = values["iteration"] if _has_line(values) else None
        now = args.consumed_train_samples, args.skipped_train_samples
        args.consumed_train_samples, args.skipped_train_samples = samples
        # for the batch that runs
        counted, heads = (
            moe_logging.get_moe_metrics_tracker(),
            MTPLossLoggingHelper.tracker,
        )
        if losses:
            moe_logging.set_moe_metrics_tracker(losses.tracker)
            MTPLossLoggingHelper.tracker = losses.heads | self._rates
        self._stream.wait_event(computed)
        try:
            # Megatron sums losses and waits: for them, not for the next batch
            with torch.cuda.stream(self._stream):
                self._report_memory = self._write(**values)
            torch.cuda.current_stream().wait_stream(self._stream)
        finally:
            args.consumed_train_samples, args.skipped_train_samples = now
            if losses:
                written, MTPLossLoggingHelper.tracker = (
                    MTPLossLoggingHelper.tracker,
                    heads,
                )
                self._rates = {
                    name: value
                    for name, value in written.items()
                    if name.startswith("cumulative")
                }
                moe_logging.set_moe_metrics_tracker(counted)
            self._printed = None

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
        count, self._retries = (
            self._retries,
            torch.cuda.memory_stats().get("num_alloc_retries", 0),
        )
        if warm and self._retries > count:
            print(
                f"> rank {dist.get_rank()}, before the end of iteration "
                f"{values['iteration']}: GPU memory ran out, "
                f"allocator retries: {self._retries - count}. A retry waits for "
                "the whole GPU and can hang the run: "
                "leave more of it free (docs/late_step.md#limits)",
                flush=True,
            )

    def line(self, text: str) -> str:
        """What Megatron prints; if it is an iteration's line, with this project's
        part."""
        return (
            text
            if self._printed is None
            else self._progress.line(text) + self._describe(self._printed)
        )

    def _describe(self, iteration: int) -> str:
        """The part of the line on the stages, which also goes to TensorBoard and
        Weights & Biases."""
        stages = list(zip(*self._stages))
        shares = [
            sum(each.waited for each in own)
            / max(sum(each.elapsed for each in own), 1e-9)
            for own in stages
        ]
        memory = [own[-1].memory / 2**30 for own in stages]
        self._stages.clear()
        mean, most, each = (
            sum(shares) / len(shares),
            max(shares),
            " ".join(f"{value:.2f}" for value in memory),
        )
        scalars = {"bubble/mean": mean, "bubble/max": most}
        scalars |= {
            f"bubble/stage {stage}": share for stage, share in enumerate(shares)
        }
        scalars |= {
            f"peak memory (GiB)/stage {stage}": value
            for stage, value in enumerate(memory)
        }
        _send(scalars, iteration)
        return f" bubble: {mean:.1%}/{most:.1%} | peak memory by stage (GiB): {each} |"


class Progress:
    """How far the run is and how fast. Evaluation and saving count in the ETA, not in
    the other values.

    Batches may differ in size. So the speed counts the samples since the line before,
    and the ETA counts samples.
    """

    def __init__(self):
        # when the first line was written, and its samples
        self._first: tuple[float, int] | None = None
        self._planned = 0  # samples of the whole run
        self._before = (0, 0)  # iteration and samples of the line before

    def line(self, text: str) -> str:
        """What Megatron prints; to an iteration's line the progress is added, which
        also goes to the dashboards."""
        for found in run_log.training(text):
            args = get_args()
            now = time.perf_counter()
            samples = args.consumed_train_samples
            seconds = max(found.milliseconds or 0, 0.1) / 1000
            if self._first is None:
                self._first = (now, samples)
                _, self._planned = planned(args, found.iteration, samples)
                size = get_current_running_global_batch_size()
            else:
                size = (samples - self._before[1]) / (found.iteration - self._before[0])
            self._before = (found.iteration, samples)
            began, first = self._first
            pace = (
                (now - began) / (samples - first) if samples > first else seconds / size
            )
            left = pace * (self._planned - samples)
            speed = size * args.seq_length / seconds
            tokens = samples * args.seq_length
            used = mfu(args, size, seconds)
            values = {
                "tokens per second": speed,
                "tokens": tokens,
                "ETA (hours)": left / 3600,
            }
            _send(values if used is None else values | {"MFU": used}, found.iteration)
            text += (
                f" tokens/s: {speed:.0f} | tokens: {tokens} | ETA: "
                f"{timedelta(seconds=round(left))} |"
            )
            text += "" if used is None else f" MFU: {used:.1%} |"
        return text


def with_progress(print_rank_last: Callable[[str], object]) -> Callable[[str], object]:
    """For Megatron's own schedule."""
    progress = Progress()
    return lambda message: print_rank_last(progress.line(message))


def _send(values: dict[str, float], iteration: int) -> None:
    if (writer := get_tensorboard_writer()) is not None:
        for name, value in values.items():
            writer.add_scalar(name, value, iteration)
    if (wandb := get_wandb_writer()) is not None:
        wandb.log(values, iteration)


def mfu(args: Any, size: float, seconds: float) -> float | None:
    """Share of the GPUs' peak that an iteration of `size` samples used, by Megatron's
    count of its operations.

    None where the peak is not known: on other GPUs, on the CPU, and without bfloat16 or
    float16.
    """
    name = torch.cuda.get_device_name()
    peak = None
    for pattern, tflops in TFLOPS.items():
        if re.match(pattern, name):
            peak = tflops * 1e12
    if peak is None or args.params_dtype is torch.float32 or args.fp8:
        return None
    return training.num_floating_point_operations(args, size) / (
        seconds * args.world_size * peak
    )


def _has_line(values: dict[str, Any]) -> bool:
    """Whether Megatron prints a line at this call of `training_log`."""
    return (
        values["iteration"] % get_args().log_interval == 0
        or values["is_first_iteration"]
    )


def _wait_for_nobody(timer: Any) -> None:
    """Let one of Megatron's timers wait for no rank and no GPU."""

    def start(barrier: bool = False) -> None:
        timer._start_time, timer._started = time.perf_counter(), True

    def stop(barrier: bool = False) -> None:
        elapsed = time.perf_counter() - timer._start_time
        timer._elapsed += elapsed
        timer._active_time += elapsed
        timer._started = False

    if timer._started:  # by Megatron's loop, before its first iteration
        timer._start_time = time.perf_counter() - max(
            time.time() - timer._start_time, 0
        )
    timer.start, timer.stop = start, stop
