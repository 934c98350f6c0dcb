"""One rank of a check: a training run of the real entry path, and observers that read clocks, memory and calls.

An observer is called as observer(observed, hooks, ...) before the run; it writes `observed.figures`. Invariant: without
an observer nothing waits for the GPU but what the run itself waits for.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from megatron_2bw import cpu, run_log
from megatron_2bw.gpu_check import entry
from megatron_2bw.local_ranks import own_output

# Calls that can wait for the GPU, by the beginning of their names; the last is the reading of one number.
WAITS = ("cudaStreamSync", "cudaDeviceSync", "cudaEventSync", "cudaMemcpy", "cudaMalloc", "cudaFree", "cudaHost")
WAITS += ("cuModuleLoad", "cuLibraryLoad", "aten::_local_scalar_dense")
PR_SET_TIMERSLACK = 29  # from Linux' prctl.h
MARGIN = 10  # seconds before the time limit, at which a rank prints where its threads are


@dataclass
class Observed:
    losses: list[float] = field(default_factory=list)  # one an iteration, on the last stage
    weights: list[torch.Tensor] = field(default_factory=list)  # the final ones, on the CPU
    skipped: int = 0  # iterations without a step, on the last rank
    parameters: int = 0
    static_bytes: int = 0  # allocated after training, with no microbatch in flight
    peak_bytes: int = 0
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass
class Hooks:
    """after_step is called with the number of completed iterations."""

    after_step: list[Callable[[int], object]] = field(default_factory=list)
    at_end: list[Callable[[], object]] = field(default_factory=list)


def train(
    rank: int,
    argv: list[str],
    gpus: int,
    environment: dict[str, str],
    deadline: float,
    observers: Sequence[Callable] = (),
) -> Observed:
    """Run pretrain_gpt_2bw.py with `argv`. For run_world.

    gpus         of this machine; the ranks are spread over them
    environment  {rank} in a value stands for the rank
    deadline     of the world, on the clock of time.monotonic()
    """
    os.environ.update({name: value.format(rank=rank) for name, value in environment.items()})
    os.environ["LOCAL_RANK"] = str(rank % max(gpus, 1))
    faulthandler.dump_traceback_later(max(deadline - time.monotonic() - MARGIN, 1))
    from megatron.training import training

    observed, hooks, losses, models, show = Observed(), Hooks(), [], [], training.print_datetime

    def after_step(found):
        losses.append([loss.detach().clone() for loss in found.values()])
        for hook in hooks.after_step:
            hook(len(losses))

    def observed_end(text, *args, **kwargs):
        if text.startswith("after training"):
            observed.static_bytes = torch.cuda.memory_allocated()
        return show(text, *args, **kwargs)

    training.print_datetime = observed_end
    for observer in observers:
        observer(observed, hooks)
    entry.train(argv, lambda model, _optimizer: models.extend(model), after_step)
    for hook in hooks.at_end:
        hook()
    params = [param for model in models for param in model.parameters()]
    observed.parameters = sum(param.numel() for param in params)
    observed.peak_bytes = torch.cuda.max_memory_allocated()
    observed.losses = [float(loss) for each in losses for loss in each]
    observed.skipped = sum(line.skipped for line in run_log.training(own_output()))
    if observed.parameters < 10**7:
        observed.weights = [param.detach().cpu() for param in params]
    return observed


def on_cpu(rank: int, function: Callable, environment: dict[str, str], *args) -> Any:
    """`function` of tests/distributed, whose result holds tensors of the GPU."""
    os.environ.update(environment)
    run = function(rank, *args)
    run.losses = [loss.cpu() for loss in run.losses]
    run.weights = {name: value.detach().cpu() for name, value in run.weights.items()}
    return run


def delays(observed: Observed, hooks: Hooks, seed: int) -> None:
    """Random pauses of both threads on the CPU and on their streams, before each action and each step."""
    from megatron_2bw.core.pipeline import Pipeline
    from megatron_2bw.mcore.late_step import LateStep

    draw = random.Random(f"{seed} {os.environ['RANK']}")
    execute, run_job = Pipeline.execute, LateStep.run_job

    def pause() -> None:
        if draw.random() < 0.5:
            time.sleep(draw.choice([0, 0.001, 0.01]))
        if not cpu.installed() and draw.random() < 0.5:
            torch.cuda._sleep(draw.choice([10**5, 10**6, 10**7]))

    def paused_execute(self, action):
        pause()
        execute(self, action)

    def paused_job(self, job):
        with torch.cuda.stream(self.stream):
            pause()
        return run_job(self, job)

    Pipeline.execute, LateStep.run_job = paused_execute, paused_job


def killed(observed: Observed, hooks: Hooks, iteration: int) -> None:
    """SIGKILL to the last rank after `iteration`."""
    last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    hooks.after_step.append(lambda done: last and done == iteration and os.kill(os.getpid(), signal.SIGKILL))


def timed(observed: Observed, hooks: Hooks, first: int = 4) -> None:
    """Seconds an iteration between two waits for the GPU, after iteration `first` and after the last; TFLOP/s; the
    training thread's time in REDUCE and STEP; the time of a version change."""
    from megatron.training import get_args, training

    from megatron_2bw.core.pipeline import Pipeline

    execute, pipelines, ends, steps = Pipeline.execute, [], {}, Counter()

    def timed_execute(self, action):
        pipelines[:] = [self]
        took = seconds_of(lambda: execute(self, action))
        if action.kind in "RS":
            steps[len(ends)] += took

    def mark(done: int) -> None:
        if done in (first, get_args().train_iters):
            torch.cuda.synchronize()
        ends[done] = time.perf_counter()

    def summary() -> None:
        args = get_args()
        seconds = (ends[args.train_iters] - ends[first]) / (args.train_iters - first)
        flops = training.num_floating_point_operations(args, args.global_batch_size)
        observed.figures |= {"seconds": seconds, "tflops": flops / seconds / 1e12}
        if steps:
            observed.figures["late_step_ms"] = 1e3 * statistics.median(list(steps.values())[2:])
        stores = getattr(pipelines[0].update, "stores", None) if pipelines else None
        if stores is not None and len(stores.versions) > 1:
            flips = [seconds_of(partial(stores.bind, stores.versions[turn % 2])) for turn in range(20)]
            observed.figures["flip_ms"] = 1e3 * statistics.median(flips)

    Pipeline.execute = timed_execute
    hooks.after_step.append(mark)
    hooks.at_end.append(summary)


def seconds_of(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def spread(values: list[float]) -> dict[str, float]:
    """Median, 99th percentile and maximum; NaN without values."""
    values = sorted(values) or [float("nan")]
    return {"median": values[len(values) // 2], "p99": values[99 * len(values) // 100], "max": values[-1]}


def launches(observed: Observed, hooks: Hooks) -> None:
    """Microseconds of a small launch of the training thread after each action, while a step is pending and while none
    is; wall time and CPU time of the step's thread. The CPU time bounds the time for which it holds Python's lock."""
    from megatron_2bw.core.pipeline import Pipeline
    from megatron_2bw.mcore.late_step import LateStep

    run_job, times, walls = LateStep.run_job, {"pending": [], "idle": []}, []

    def launch(pipeline, action) -> None:
        pending = pipeline.update.pending
        key = "idle" if pending is None or pending.future.done() else "pending"
        tensor = torch.zeros(1, device="cpu" if cpu.installed() else "cuda")
        for _ in range(20):
            begun = time.perf_counter()
            tensor.add_(1)
            times[key].append(1e6 * (time.perf_counter() - begun))

    def timed_job(self, job):
        begun = time.perf_counter(), time.thread_time()
        result = run_job(self, job)
        walls.append((time.perf_counter() - begun[0], time.thread_time() - begun[1]))
        return result

    def summary() -> None:
        for key, found in times.items():
            warm = spread(found[len(found) // 4 :])  # the first ones load kernels
            observed.figures |= {f"{key}_{name}_us": value for name, value in warm.items()}
        wall, work = (1e3 * statistics.median(column) for column in zip(*walls[2:]))
        observed.figures |= {"step_wall_ms": wall, "step_cpu_ms": work}

    Pipeline.observe, LateStep.run_job = launch, timed_job
    hooks.at_end.append(summary)


def lock(observed: Observed, hooks: Hooks, interval: float = 2e-4) -> None:
    """Microseconds until a thread that asks for Python's lock has it, when nothing else runs, only the training thread,
    only a step, or both. At every second batch the training thread waits for the step, without the lock.

    The thread asks after each sleep of `interval`; what the sleep takes longer is the wait for the lock, and the time
    that the system needs to wake the thread up, which `quiet` has too. Python code gives the lock up after the switch
    interval, a call into a library when it returns, or before if it chooses to.
    """
    from megatron_2bw.mcore.late_step import LateStep

    reduce, run_job, waits = LateStep.reduce, LateStep.run_job, defaultdict(list)
    running = {"training": True, "step": False}

    def state() -> str:
        return " and ".join(name for name, runs in running.items() if runs) or "quiet"

    def ask() -> None:
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1)  # nanoseconds; else a sleep takes 50 µs longer
        while True:
            begun = time.perf_counter()
            time.sleep(interval)
            waits[state()].append(1e6 * (time.perf_counter() - begun - interval))

    def marked(name: str, runs: bool, work: Callable) -> Callable:
        def call(*args):
            running[name] = runs
            try:
                return work(*args)
            finally:
                running[name] = not runs

        return call

    def waiting_reduce(self, action, still_read):
        reduce(self, action, still_read)
        if action.batch % 2:
            marked("training", False, wait)([self.pending.future])

    def summary() -> None:
        marked("training", False, time.sleep)(0.5)
        observed.figures["switch_interval_us"] = 1e6 * sys.getswitchinterval()
        for name, found in list(waits.items()):
            observed.figures[f"{name}, us"] = spread(found) | {"mean": sum(found) / len(found), "waits": len(found)}

    LateStep.reduce, LateStep.run_job = waiting_reduce, marked("step", True, run_job)
    threading.Thread(target=ask, daemon=True).start()
    hooks.at_end.append(summary)


def profiled(observed: Observed, hooks: Hooks, first: int = 4, last: int = 8) -> None:
    """Of the iterations after `first` up to `last`: the calls that can wait for the GPU, per iteration and thread, and
    the gaps between kernels."""
    from torch.profiler import ProfilerActivity, profile

    everything = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (not cpu.installed())
    tool = profile(activities=kinds, experimental_config=everything)

    def switch(done: int) -> None:
        if done == first:
            tool.start()
        elif done == last:
            tool.stop()
            threads = {thread.native_id: thread.name for thread in threading.enumerate()}
            events = tool.profiler.kineto_results.events()
            calls: Counter = Counter()
            for event in events:
                if event.name().startswith(WAITS):
                    calls[f"{event.name()} in {threads.get(event.device_resource_id(), 'another thread')}"] += 1
            observed.figures["waits_an_iteration"] = {name: n / (last - first) for name, n in calls.most_common()}
            kernels = [event for event in events if event.device_type() == torch.autograd.DeviceType.CUDA]
            observed.figures |= gaps([(event.start_ns(), event.end_ns()) for event in kernels])

    hooks.after_step.append(switch)


def gaps(spans: list[tuple[int, int]]) -> dict[str, float]:
    """Of kernels (start, end) in nanoseconds, on any streams: the share of the time in which one runs, and the longest
    time in ms in which none does. Nothing without kernels."""
    if not spans:
        return {}
    spans = sorted(spans)
    end, idle, longest = spans[0][1], 0, 0
    for start, stop in spans:
        gap = max(start - end, 0)
        idle, longest, end = idle + gap, max(longest, gap), max(end, stop)
    return {"gpu_busy_share": 1 - idle / max(end - spans[0][0], 1), "longest_gap_ms": longest / 1e6}


def sanitized(observed: Observed, hooks: Hooks) -> None:
    """torch's CUDA stream sanitizer, in the step's thread too: its mode is per thread. It compares start addresses."""
    from torch.cuda import _sanitizer

    from megatron_2bw.mcore.late_step import LateStep

    mode, lock, run_job = _sanitizer.cuda_sanitizer.dispatch, threading.Lock(), LateStep.run_job
    handle = mode.event_handler._handle_kernel_launch

    def one_at_a_time(*args):
        with lock:
            return handle(*args)

    def watched_job(self, job):
        with mode:
            return run_job(self, job)

    mode.event_handler._handle_kernel_launch, LateStep.run_job = one_at_a_time, watched_job
    _sanitizer.enable_cuda_sanitizer()
