"""The checks of `megatron-2bw gpu-check`: a list of rows, and the functions that they name.

A function takes the `Check` and returns figures. It raises `Failed` if what the row claims does not hold. Without a GPU
the rows run on a tiny model on the CPU: their figures mean nothing there.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megatron_2bw.gpu_check import costs, observe
from megatron_2bw.gpu_check.check import REPEATABLE, UNTIED, Check, Failed, command, gpt_flags
from megatron_2bw.local_ranks import WorldError
from megatron_2bw.processes import free_port
from megatron_2bw.schedules import SCHEDULE_NAMES
from megatron_2bw.start.torchrun import PLAIN_TORCH, ROOT

NO_FUSION = ["--no-bias-gelu-fusion", "--no-bias-dropout-fusion"]  # these are compiled: half a minute a run


@dataclass(frozen=True)
class Row:
    """what: the claim, or what is measured. needs: of NEEDS. seconds: the time limit."""

    part: str
    name: str
    what: str
    run: Callable[[Check], dict[str, Any]]
    needs: tuple[str, ...] = ()
    seconds: float = 100.0


def _found(name: str) -> Callable[[Check], bool]:
    return lambda check: importlib.util.find_spec(name) is not None


NEEDS: dict[str, tuple[Callable[[Check], bool], str]] = {
    "cuda": (lambda check: check.device == "cuda", "needs a GPU"),
    "checkout": (lambda check: (ROOT / "tests/distributed/reference.py").exists(), "needs tests/: run in a checkout"),
    "te": (_found("transformer_engine"), "Transformer Engine is not installed"),
    "apex": (_found("amp_C"), "Apex with its CUDA extensions is not installed"),
    "compute-sanitizer": (lambda check: bool(shutil.which("compute-sanitizer")), "compute-sanitizer is not in PATH"),
}


# Tiny GPTs: stages, width, microbatches, flags.
Model = tuple[int, int, int, str]
EVALUATION = "--eval-iters 2 --split 90,10,0 --eval-interval"
OVERFLOW = "--train-iters 30 --initial-loss-scale 16384 --loss-scale-window 2 --hysteresis 1"
MODELS: dict[str, Model] = {
    "untied": (2, 1, 3, UNTIED),
    "tied, bf16": (2, 1, 3, "--bf16"),
    "four stages": (4, 1, 4, ""),
    "fp16, late overflow": (2, 1, 2, f"{UNTIED} --fp16 {OVERFLOW}"),
    "width 2, distributed optimizer": (2, 2, 2, "--bf16 --use-distributed-optimizer"),
    "extra warm-up": (2, 1, 6, f"{UNTIED} --two-bw-extra-warmup 2"),
    "evaluation": (2, 1, 2, f"{UNTIED} {EVALUATION} 3"),
}


def tiny(model: Model, *more: object, plain: bool = True) -> tuple[int, list[str]]:
    """(ranks, command line) of a model. plain: without Apex and Transformer Engine."""
    stages, width, microbatches, words = model
    text = f"""--device auto --pipeline-schedule 2bw --pipeline-model-parallel-size {stages} --micro-batch-size 2
        --global-batch-size {2 * microbatches * width} --train-iters 8 --lr 1e-2 --vocab-size 127 --log-interval 1"""
    flags = [*(PLAIN_TORCH if plain else ()), *NO_FUSION, *words.split(), *more]
    return stages * width, gpt_flags(4, 64, 4, 32, text, *flags)


def compared(runs: list[observe.Observed], others: list[observe.Observed], tolerance: float = 0.0) -> dict[str, Any]:
    """Failed if losses or final weights differ by more than `tolerance` of a tensor's largest element."""

    def tensors(each: list[observe.Observed]) -> list[torch.Tensor]:
        found = [torch.tensor(each[-1].losses), *(tensor for run in each for tensor in run.weights)]
        return [tensor.double() for tensor in found]

    mine, theirs = tensors(runs), tensors(others)
    if not runs[-1].losses or [each.shape for each in mine] != [each.shape for each in theirs]:
        raise Failed("the runs have other numbers of losses or other weights")
    apart = [float((a - b).abs().max() / b.abs().max().clamp(min=1e-20)) for a, b in zip(mine, theirs)]
    if not all(each <= tolerance for each in apart):  # NaN is not
        raise Failed(f"losses differ by {apart[0]:.1e}, weights by {max(apart[1:]):.1e}, relative")
    return {"iterations": len(runs[-1].losses), "differences": max(apart)}


def reference(check: Check, precision: Sequence[str] = ()) -> dict[str, Any]:
    """One stage against the single-process reference. Apex and Transformer Engine round in another order."""
    sys.path[:0] = [str(ROOT)] * (str(ROOT) not in sys.path)
    from tests.distributed import reference as single
    from tests.distributed.training import command, train

    device = dict(device="cpu") if check.device == "cpu" else dict(device=None, distributed_backend="gloo")
    argv = command(1, 3, "2bw", UNTIED, *precision, *PLAIN_TORCH, *NO_FUSION, **device)
    (run,) = check.world(1, observe.on_cpu, train, REPEATABLE, argv)
    rule = single.Rule(3, norm_order=[run.names])
    (expected,) = check.world(1, observe.on_cpu, single.reference, REPEATABLE, argv, rule)
    found, wanted = (
        observe.Observed([float(loss) for loss in each.losses], [each.weights[name] for name in sorted(each.weights)])
        for each in (run, expected)
    )
    fused = any(NEEDS[name][0](check) for name in ("te", "apex"))  # their FusedAdam and norms
    return compared([found], [wanted], 1e-4 if fused else 0.0)


def baseline(check: Check, model: Model, *more: object, plain: bool = True) -> list[observe.Observed]:
    """The run over gloo without delays, once for several rows."""
    ranks, argv = tiny(model, *more, plain=plain)
    key = " ".join(argv)
    if key not in check.baselines:
        check.baselines[key] = check.train(argv, ranks)
    return check.baselines[key]


def same_bits(check: Check, model: Model, queues: int, transport: str = "nccl", saves: int = 0) -> dict[str, Any]:
    """Over `transport`, with random delays, and every `saves` iterations a checkpoint, against gloo without delays."""
    expected = baseline(check, model)
    if OVERFLOW in model[3] and not expected[-1].skipped:
        raise Failed("no step was skipped: the loss scale did not overflow")
    with tempfile.TemporaryDirectory() as folder:
        ranks, argv = tiny(model, *(("--save", folder, "--save-interval", saves) if saves else ()))
        delays = partial(observe.delays, seed=queues)
        runs = check.train(argv, ranks, transport, [delays], CUDA_DEVICE_MAX_CONNECTIONS=str(queues))
    return compared(runs, expected)


def stress(check: Check, queues: int) -> dict[str, Any]:
    """Many iterations with evaluations, saves and random delays."""
    many = 200 if check.device == "cuda" else 24
    return same_bits(check, (2, 1, 3, f"--bf16 {EVALUATION} 20 --train-iters {many}"), queues, saves=many // 4)


def killed(check: Check) -> dict[str, Any]:
    """A rank is killed; the run that resumes ends with the weights of an undisturbed one."""
    expected = baseline(check, MODELS["tied, bf16"])
    with tempfile.TemporaryDirectory() as folder:
        ranks, argv = tiny(MODELS["tied, bf16"], "--save", folder, "--load", folder, "--save-interval", 3)
        try:
            check.train(argv, ranks, "nccl", [partial(observe.killed, iteration=5)])
            raise Failed("the kill did not end the run")
        except WorldError as error:
            if "exit code -9" not in str(error):
                raise
        runs = check.train(argv, ranks, "nccl")
    return compared(runs, [observe.Observed(run.losses[-len(runs[-1].losses) :], run.weights) for run in expected])


def stream_sanitizer(check: Check, transport: str, precision: str = "") -> dict[str, Any]:
    """torch's sanitizer raises at the first access without an order; its report is in the ranks' logs."""
    ranks, argv = tiny((2, 1, 3, f"{UNTIED} {precision}"))
    check.train(argv, ranks, transport, [observe.sanitized], CUDA_DEVICE_MAX_CONNECTIONS="32")
    return {"hazards": 0}


def memcheck(check: Check) -> dict[str, Any]:
    """A run of one stage under compute-sanitizer."""
    script = [sys.executable, str(ROOT / "pretrain_gpt_2bw.py"), *tiny((1, 1, 2, "--distributed-backend gloo"))[1]]
    rank = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    command(check, "compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", *script, **rank)
    return {"errors": 0}


def fused_gradients(check: Check, words: str) -> dict[str, Any]:
    """Weight gradients that a package adds to the slot itself, against those that autograd adds."""
    model = (2, 1, 3, f"{UNTIED} --bf16")
    expected = baseline(check, model, *words.split(), UNFUSED, plain=False)
    ranks, argv = tiny(model, *words.split(), plain=False)
    return compared(check.train(argv, ranks, "nccl"), expected, 0.05)


def _row(
    part: str, name: str, what: str, function: Callable, /, *needs: str, seconds: float = 100.0, **options: Any
) -> Row:
    return Row(part, name, what, partial(function, **options), needs, seconds)


BITS = "losses and weights have the bits of a run over gloo, with random delays"
LONG = "many iterations with evaluations, saves and delays have the bits of a quiet run"
SANITIZER = "torch's stream sanitizer finds no access without an order"
WAITING = "calls that last as long as a kernel of another stream"
FUSED = "fused weight gradients land in the right slot: equal losses and weights, within rounding"
TE = "--transformer-impl transformer_engine"
LOCAL = "--transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion --no-rope-fusion"
UNFUSED = "--no-gradient-accumulation-fusion"

ROWS = [
    _row("reference", "fp32", "d = 1 has the reference's bits", reference, "checkout"),
    _row("reference", "bf16", "d = 1 has the reference's bits", reference, "checkout", precision=("--bf16",)),
    *(_row("ranks", f"{name}, 1 queue", BITS, same_bits, model=model, queues=1) for name, model in MODELS.items()),
    *(
        _row("ranks", f"{name}, {queues} queues", BITS, same_bits, "cuda", model=MODELS[name], queues=queues)
        for name in ("tied, bf16", "width 2, distributed optimizer")
        for queues in (8, 32)
    ),
    _row("ranks", "host staging", BITS, same_bits, "cuda", model=MODELS["four stages"], queues=8, transport="gloo"),
    _row("ranks", "long, 1 queue", LONG, stress, seconds=200.0, queues=1),
    *(_row("ranks", f"long, {q} queues", LONG, stress, "cuda", seconds=200.0, queues=q) for q in (8, 32)),
    _row("ranks", "kill and resume", "a killed run resumes with the bits of an undisturbed one", killed, seconds=150.0),
    _row("hazards", "streams, gloo", SANITIZER, stream_sanitizer, "cuda", transport="gloo"),
    _row("hazards", "streams, NCCL", SANITIZER, stream_sanitizer, "cuda", transport="nccl"),
    _row("hazards", "streams, fp16", SANITIZER, stream_sanitizer, "cuda", transport="nccl", precision="--fp16"),
    _row("hazards", "memcheck", "compute-sanitizer", memcheck, "cuda", "compute-sanitizer", seconds=300.0),
    _row("packages", "Transformer Engine", FUSED, fused_gradients, "cuda", "te", words=TE),
    _row("packages", "Apex", FUSED, fused_gradients, "cuda", "apex", words=LOCAL),
    _row("cost", "overhead", "time of 2bw over Megatron's own schedule, d = 1", costs.overhead, seconds=300.0),
    *(
        _row("cost", f"memory, {name}", "bytes per parameter, peak", costs.memory, seconds=150.0, variant=name)
        for name in costs.DESIGN
    ),
    *(
        _row("cost", f"stages, {name}", "peak memory by stage", costs.stages, seconds=200.0, schedule=name)
        for name in SCHEDULE_NAMES
        if name != "megatron"
    ),
    _row("cost", "profile", "the planner's times of a layer, the output layer and the step", costs.profile),
    *(
        _row(part, name, what, costs.observed, seconds=150.0, observer=observer)
        for part, name, what, observer in (
            ("cost", "hidden waits", "calls that can wait for the GPU", observe.profiled),
            ("thread", "launches", "latency of launches", observe.launches),
            ("thread", "lock", "time until another thread has Python's lock", observe.lock),
        )
    ),
    *(
        _row("thread", f"waiting calls, {kind}", WAITING, costs.waiting_calls, "cuda", CUDA_MODULE_LOADING=kind)
        for kind in ("LAZY", "EAGER")
    ),
]
