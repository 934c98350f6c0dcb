"""The checks of `megatron-2bw gpu-check`: at most ten rows, and the functions that they
name.

A function takes the `Check` and returns figures. It raises `Failed` if what the row
claims does not hold. Without a GPU the rows run on the CPU with a tiny model: their
figures of time and memory mean nothing there.
"""

from __future__ import annotations

import faulthandler
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from megatron_2bw.base.argv import merged
from megatron_2bw.base.local_ranks import run_world
from megatron_2bw.mcore import cpu
from megatron_2bw.run.flags.plain_torch import PLAIN_TORCH
from megatron_2bw.run.flags.rule import installed
from megatron_2bw.tools.gpu_check import entry
from megatron_2bw.tools.gpu_check.entry import gpt_flags
from megatron_2bw.tools.planner.cost.memory import Memory
from megatron_2bw.tools.planner.descriptions.model import preset
from megatron_2bw.tools.planner.descriptions.plan import Plan

Figures = dict[str, Any]  # by name

# seconds before the time limit, at which a rank prints where its threads are
MARGIN = 10
FIRST = 4  # iterations that are not timed
ROUNDING = 1e-4  # of a GPU against the CPU, relative to a tensor's largest element
# Bytes per parameter (docs/design.md), and the plan's choice.
DESIGN = {
    "2bw": (24, {}),
    "2bw, one gradient slot": (20, {"memory": "one-slot"}),
    "2bw, host": (8, {"memory": "host"}),
}
BUFFERS = 160e6  # bytes at most, of cuBLAS and of Megatron's scores
# these are compiled: half a minute a run
NO_FUSION = ["--no-bias-gelu-fusion", "--no-bias-dropout-fusion"]


class Failed(Exception):
    """What a row claims does not hold; the message says by how much."""


@dataclass
class Check:
    """Where the rows run. deadline: of the row that runs, on the clock of
    time.monotonic()."""

    device: str
    gib: float = 0.0
    deadline: float = 0.0

    def train(
        self,
        size: int,
        argv: list[str],
        prepare: Callable[[], object] = entry.nothing,
        **variables: str,
    ) -> list[Observed]:
        """A training run on `size` ranks; each calls `prepare` before, and has the
        environment `variables`."""
        if self.device == "cpu":
            argv = merged(argv, ["--device", "cpu"])
        return run_world(
            size,
            train,
            argv,
            self.deadline,
            variables,
            prepare,
            timeout=self.deadline - time.monotonic(),
        )


@dataclass
class Observed:
    # one an iteration, on the last stage
    losses: list[float] = field(default_factory=list)
    # the final ones, on the CPU; none of a large model
    weights: list[torch.Tensor] = field(default_factory=list)
    parameters: int = 0
    static_bytes: int = 0  # allocated after training, with no microbatch in flight
    peak_bytes: int = 0
    seconds: float = 0.0  # of an iteration


def train(
    rank: int,
    argv: list[str],
    deadline: float,
    environment: dict[str, str],
    prepare: Callable[[], object],
) -> Observed:
    """Run pretrain_gpt_2bw.py with `argv`, for run_world. The time is that of one rank
    alone: it waits for the GPU after iteration FIRST and at the end; several ranks,
    whose messages a wait could delay, do not."""
    os.environ.update(environment)
    faulthandler.dump_traceback_later(max(deadline - time.monotonic() - MARGIN, 1))
    from megatron.training import get_args, training

    observed = Observed()
    losses = []
    params = []
    ends = []  # of the iterations
    show = training.print_datetime
    prepare()

    def after_setup(models, optimizer):
        for model in models:
            params.extend(model.parameters())

    def after_step(by_name):
        losses.extend(loss.detach().clone() for loss in by_name.values())
        waits = len(ends) + 1 in (FIRST, get_args().train_iters)
        if waits and os.environ["WORLD_SIZE"] == "1":
            torch.cuda.synchronize()
        ends.append(time.perf_counter())

    def observed_end(text, *args, **kwargs):
        if text.startswith("after training"):
            observed.static_bytes = torch.cuda.memory_allocated()
        return show(text, *args, **kwargs)

    training.print_datetime = observed_end
    entry.train(argv, after_setup, after_step)
    observed.parameters = sum(param.numel() for param in params)
    observed.peak_bytes = torch.cuda.max_memory_allocated()
    observed.losses = list(map(float, losses))
    seconds = ends[-1] - ends[FIRST - 1]
    observed.seconds = seconds / (len(ends) - FIRST)
    if observed.parameters < 10**7:
        observed.weights = [param.detach().cpu() for param in params]
    return observed


def delays() -> None:
    """Random pauses of both threads on the CPU and on their streams, before each action
    and each step."""
    from megatron_2bw.engine.pipeline import Pipeline
    from megatron_2bw.mcore.late_step import LateStep

    draw = random.Random(f"delays {os.environ['RANK']}")
    execute = Pipeline.execute
    run_job = LateStep.run_job

    def pause() -> None:
        if draw.random() < 0.5:
            time.sleep(draw.choice([0, 0.001, 0.01]))
        if not cpu.installed() and draw.random() < 0.5:
            torch.cuda._sleep(draw.choice([10**5, 10**6, 10**7]))

    def paused_execute(self, action):
        pause()
        execute(self, action)

    def paused_job(self, job):
        pause()
        return run_job(self, job)

    Pipeline.execute = paused_execute
    LateStep.run_job = paused_job


def sanitized() -> None:
    """torch's CUDA stream sanitizer, in the step's thread too: its mode is per thread.
    It compares start addresses."""
    from torch.cuda import _sanitizer

    from megatron_2bw.mcore.late_step import LateStep

    mode = _sanitizer.cuda_sanitizer.dispatch
    handler = mode.event_handler
    registry = _sanitizer.gpu_trace.CallbackRegistry
    run_job = LateStep.run_job
    # else a thread may undo what the other one has just noted as ordered
    lock = threading.RLock()

    def one_at_a_time(function):
        def call(*args):
            with lock:
                return function(*args)

        return call

    def watched_job(self, job):
        with mode:
            return run_job(self, job)

    handler._handle_kernel_launch = one_at_a_time(handler._handle_kernel_launch)
    registry.fire_callbacks = one_at_a_time(registry.fire_callbacks)
    LateStep.run_job = watched_job
    _sanitizer.enable_cuda_sanitizer()


def tiny(stages: int, width: int, text: str, *more: str) -> tuple[int, list[str]]:
    """(ranks, command line) of a tiny GPT."""
    flags = f"""--device auto --pipeline-schedule 2bw --pipeline-model-parallel-size {stages} --micro-batch-size 2
        --global-batch-size {6 * width} --train-iters 8 --lr 1e-2 --vocab-size 127 --log-interval 1"""
    words = [*NO_FUSION, *text.split(), *more]
    return stages * width, gpt_flags(4, 64, 4, 32, flags, *words)


def compared(
    runs: list[Observed], others: list[Observed], tolerance: float = 0.0
) -> Figures:
    """Failed if losses or final weights differ by more than `tolerance` of a tensor's
    largest element."""

    ours = _tensors(runs)
    theirs = _tensors(others)
    same_shapes = [a.shape for a in ours] == [b.shape for b in theirs]
    if not runs[-1].losses or not same_shapes:
        raise Failed("the runs have other numbers of losses or other weights")
    apart = []
    for a, b in zip(ours, theirs):
        largest = b.abs().max().clamp(min=1e-20)
        apart.append(float((a - b).abs().max() / largest))
    if not all(each <= tolerance for each in apart):  # NaN is not
        raise Failed(
            f"losses differ by {apart[0]:.1e}, weights by {max(apart[1:]):.1e}, relative"
        )
    return {"iterations": len(runs[-1].losses), "differences": max(apart)}


def _tensors(runs: list[Observed]) -> list[torch.Tensor]:
    """The losses of the last rank, and the weights of all."""
    tensors = [torch.tensor(runs[-1].losses).double()]
    for run in runs:
        tensors += [weight.double() for weight in run.weights]
    return tensors


def drawn_on_the_host() -> None:
    """GPUs draw other initial weights than the CPU."""
    generator = torch.Generator("cpu").manual_seed(7)

    def normal(
        tensor: torch.Tensor, mean: float = 0.0, std: float = 1.0
    ) -> torch.Tensor:
        drawn = torch.randn(tensor.shape, generator=generator, device="cpu")
        with torch.no_grad():
            return tensor.copy_(mean + std * drawn)

    torch.nn.init.normal_ = normal


def against_cpu(check: Check) -> Figures:
    """SGD: Adam makes a step of the learning rate of a gradient that is only
    rounding."""
    ranks, argv = tiny(1, 1, "--optimizer sgd --lr 0.1", *PLAIN_TORCH)
    on_the_cpu = merged(argv, ["--device", "cpu"])
    expected = check.train(ranks, on_the_cpu, drawn_on_the_host)
    found = check.train(ranks, argv, drawn_on_the_host)
    return compared(found, expected, ROUNDING)


def same_bits(
    check: Check, width: int = 1, more: str = "", queues: int = 32
) -> Figures:
    """Messages over NCCL and random delays, against messages over gloo."""
    ranks, argv = tiny(2, width, f"--bf16 {more}", *PLAIN_TORCH)
    expected = check.train(ranks, [*argv, "--pipeline-exchange", "gloo"])
    delayed = check.train(ranks, argv, delays, CUDA_DEVICE_MAX_CONNECTIONS=str(queues))
    return compared(delayed, expected)


def stream_sanitizer(check: Check) -> Figures:
    """torch's sanitizer raises at the first access without an order; its report is in
    the ranks' logs."""
    check.train(*tiny(2, 1, "", *PLAIN_TORCH), sanitized)
    return {"hazards": 0}


def fused_gradients(check: Check, more: str = "") -> Figures:
    """Weight gradients that a package adds to the slot itself, against those that
    autograd adds."""
    ranks, argv = tiny(2, 1, f"--bf16 {more}")
    fused = check.train(ranks, argv)
    plain = check.train(ranks, [*argv, "--no-gradient-accumulation-fusion"])
    return compared(fused, plain, tolerance=0.05)


def microbatch(check: Check) -> int:
    return 8 if check.gib >= 24 else 2


def large(check: Check, schedule: str, *more: str) -> Observed:
    """One stage of GPT 355M in bf16; on the CPU of a tiny model."""
    shape = (24, 1024, 16, 512)
    vocabulary = 50256
    samples = microbatch(check)
    iterations = 20
    if check.device == "cpu":
        shape = (8, 32, 4, 16)
        vocabulary = 1023
        samples = 1
        iterations = 8
    text = f"""--device auto --bf16 --pipeline-schedule {schedule} --micro-batch-size {samples} --log-interval 1000
        --global-batch-size {8 * samples} --vocab-size {vocabulary} --train-iters {iterations}
        --make-vocab-size-divisible-by 128"""
    argv = gpt_flags(*shape, text, *PLAIN_TORCH, *more)
    return check.train(1, argv)[0]


def overhead(check: Check) -> Figures:
    """2bw between two runs of Megatron's own schedule, whose difference is the noise.
    The goal is half a per cent."""
    before = large(check, "megatron").seconds
    run = large(check, "2bw").seconds
    after = large(check, "megatron").seconds
    overhead_share = 2 * run / (before + after) - 1
    noise = abs(before - after) / after
    if check.device == "cuda" and overhead_share > 0.03 + noise:
        raise Failed(
            f"2bw takes {overhead_share:.2%} more time, of which {noise:.2%} may be noise"
        )
    return {"seconds": run, "overhead": overhead_share, "noise": noise}


def memory(check: Check, variant: str) -> Figures:
    """Bytes per parameter between iterations against the design, and the peak against
    the planner."""
    design, choice = DESIGN[variant]
    plan = Plan(1, 1, 1, microbatch(check), 8, schedule="2bw", **choice)
    run = large(check, "2bw", "--train-iters", "6", *plan.flags())
    model = replace(preset("gpt-355m", 512), dropout=False)
    fused = installed("transformer_engine") or installed("apex")
    planner = Memory(model, "bf16", flash=False, torch_adam=not fused)
    predicted = planner.stages(plan)[0].total / 2**30
    each = run.static_bytes / run.parameters
    peak = run.peak_bytes / 2**30
    if check.device == "cuda" and run.static_bytes > design * run.parameters + BUFFERS:
        raise Failed(f"{each:.2f} bytes a parameter, not {design}")
    if check.device == "cuda" and peak > 1.1 * predicted:
        raise Failed(f"peak {peak:.2f} GiB; the planner predicts {predicted:.2f} GiB")
    return {
        "bytes_a_parameter": each,
        "design": design,
        "peak_gib": peak,
        "planner_gib": predicted,
    }


@dataclass(frozen=True)
class Row:
    """what: the claim, or what is measured. needs: "cuda", or a module's name. seconds:
    the time limit."""

    name: str
    what: str
    run: Callable[[Check], Figures]
    needs: tuple[str, ...] = ()
    seconds: float = 200.0


BITS = "messages over NCCL, with random delays: the bits of a run over gloo"
FUSED = "fused weight gradients land in the right slot: equal losses and weights, within rounding"
LOCAL = (
    "--transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion "
    "--no-rope-fusion"
)
ROWS = [
    Row("CPU", "losses and weights are those of the CPU, within rounding", against_cpu),
    Row("NCCL, two stages", BITS, same_bits),
    Row("NCCL, one queue", BITS, partial(same_bits, queues=1)),
    Row(
        "NCCL, width 2",
        BITS,
        partial(same_bits, width=2, more="--use-distributed-optimizer"),
    ),
    Row(
        "sanitizer",
        "torch's stream sanitizer finds no access without an order",
        stream_sanitizer,
        ("cuda",),
    ),
    Row("Transformer Engine", FUSED, fused_gradients, ("cuda", "transformer_engine")),
    Row("Apex", FUSED, partial(fused_gradients, more=LOCAL), ("cuda", "apex")),
    Row(
        "overhead",
        "time of 2bw over Megatron's own schedule, d = 1, GPT 355M",
        overhead,
        seconds=300.0,
    ),
]
for variant in DESIGN:
    run = partial(memory, variant=variant)
    ROWS.append(Row(f"memory, {variant}", "bytes per parameter, peak", run))
