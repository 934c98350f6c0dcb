"""The checks of `megatron-2bw gpu-check`: a list of rows, and the functions that they name.

A function takes the `Check` and returns figures. It raises `Failed` if what the row claims does not hold. Without a GPU
the rows run on a tiny model on the CPU: their figures mean nothing there.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from megatron_2bw.gpu_check import observe, probes
from megatron_2bw.local_ranks import WorldError, WorldTimeout, run_world
from megatron_2bw.planner.cost.memory import Memory
from megatron_2bw.planner.describe.model import preset
from megatron_2bw.planner.describe.plan import Plan
from megatron_2bw.processes import free_port, stop_tree
from megatron_2bw.schedules import SCHEDULE_NAMES
from megatron_2bw.start.torchrun import PLAIN_TORCH, ROOT, environment, start

UNTIED = "--untie-embeddings-and-output-weights"
NO_FUSION = ["--no-bias-gelu-fusion", "--no-bias-dropout-fusion"]  # these are compiled: half a minute a run
# A rank that calls itself another host passes NCCL's test for two ranks on one GPU: the test compares host and GPU
# (init.cc of NCCL 2.28 and 2.30). Traffic then goes through sockets.
SHARED_GPU = {
    "NCCL_HOSTID": "rank{rank}",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
}
REPEATABLE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # else cuBLAS may add in another order on another stream
DESIGN = {"pipedream-flush": 18, "2bw, 1 slot": 20, "2bw": 24}  # bytes per parameter, docs/design.md


class Failed(Exception):
    """What a row claims does not hold; the message says by how much."""


class Skipped(Exception):
    """A row cannot run here; the message says why."""


@dataclass
class Check:
    """Where the rows run. deadline: of the row that runs, on the clock of time.monotonic()."""

    device: str
    gpus: int = 0
    gib: float = 0.0
    deadline: float = 0.0
    baselines: dict[str, list[observe.Observed]] = field(default_factory=dict)

    def world(self, size: int, function: Callable, *args: Any) -> list:
        return run_world(size, function, *args, timeout=self.deadline - time.monotonic())

    def train(self, argv: list[str], size: int, transport: str = "gloo", observers: Sequence = (), **variables: str):
        """`observe.train` on `size` ranks, spread over the GPUs. On the CPU always over gloo."""
        if self.device == "cpu":
            argv = [*argv, "--device", "cpu"]
        else:
            argv = [*argv, "--distributed-backend", transport]
            variables = REPEATABLE | (SHARED_GPU if size > self.gpus and transport == "nccl" else {}) | variables
        return self.world(size, observe.train, argv, self.gpus, variables, self.deadline, observers)


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


SMALL_GPT = {
    "micro_batch_size": 1,
    "lr": 1e-4,
    "lr_decay_style": "constant",
    "clip_grad": 1.0,
    "tokenizer_type": "NullTokenizer",
    "make_vocab_size_divisible_by": 32,
    "attention_dropout": 0,
    "hidden_dropout": 0,
    "num_workers": 0,
    "eval_iters": 0,
    "eval_interval": 1000,
    "split": "98,1,1",
    "device": "cpu",
}


def gpt_flags(layers: int, hidden: int, heads: int, sequence: int, *flags: object, **more: object) -> list[str]:
    """Flags of a GPT on mock data with a fixed learning rate; `more` are flags in snake case, None leaves one out."""
    shape = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "seq_length": sequence}
    found = SMALL_GPT | shape | {"max_position_embeddings": sequence} | more
    words = [("--" + name.replace("_", "-"), value) for name, value in found.items() if value is not None]
    return [str(word) for word in (*(word for pair in words for word in pair), "--mock-data", *flags)]


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
    shape = dict(pipeline_schedule="2bw", pipeline_model_parallel_size=stages, micro_batch_size=2, train_iters=8)
    shape |= dict(global_batch_size=2 * microbatches * width, lr=1e-2, vocab_size=127, log_interval=1, device=None)
    flags = [*(PLAIN_TORCH if plain else ()), *NO_FUSION, *words.split(), *more]
    return stages * width, gpt_flags(4, 64, 4, 32, *flags, **shape)


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


def same_bits(check: Check, model: Model, queues: int, transport: str = "nccl") -> dict[str, Any]:
    """Over `transport`, with random delays, against gloo without delays."""
    expected = baseline(check, model)
    if OVERFLOW in model[3] and not expected[-1].skipped:
        raise Failed("no step was skipped: the loss scale did not overflow")
    ranks, argv = tiny(model)
    delays = partial(observe.delays, seed=queues)
    return compared(check.train(argv, ranks, transport, [delays], CUDA_DEVICE_MAX_CONNECTIONS=str(queues)), expected)


def stress(check: Check, queues: int) -> dict[str, Any]:
    """Many iterations with evaluations, saves and random delays."""
    many = 200 if check.device == "cuda" else 24
    model = (2, 1, 3, f"--bf16 {EVALUATION} 20 --train-iters {many}")
    expected = baseline(check, model)
    with tempfile.TemporaryDirectory() as folder:
        ranks, argv = tiny(model, "--save", folder, "--save-interval", many // 4)
        delays = partial(observe.delays, seed=queues)
        runs = check.train(argv, ranks, "nccl", [delays], CUDA_DEVICE_MAX_CONNECTIONS=str(queues))
    return compared(runs, expected)


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
    port = str(free_port())
    rank = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    tool = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"]
    process = start([*tool, *script], env=environment(**rank))
    try:
        output, _ = process.communicate(timeout=check.deadline - time.monotonic())
    except subprocess.TimeoutExpired:
        raise WorldTimeout("compute-sanitizer ran out of time") from None
    finally:
        stop_tree(process)
    if process.returncode:
        raise Failed(f"exit status {process.returncode}\n{output[-3000:]}")
    return {"errors": 0}


def fused_gradients(check: Check, words: str) -> dict[str, Any]:
    """Weight gradients that a package adds to the slot itself, against those that autograd adds."""
    model = (2, 1, 3, f"{UNTIED} --bf16")
    expected = baseline(check, model, *words.split(), UNFUSED, plain=False)
    ranks, argv = tiny(model, *words.split(), plain=False)
    return compared(check.train(argv, ranks, "nccl"), expected, 0.05)


def _large(check: Check, schedule: str, *more: str, stages: int = 1, iterations: int = 20) -> list[str]:
    """GPT 355M in bf16, the paper's measure of a GPU; on the CPU a tiny model. One rank runs it over NCCL: gloo would
    copy all gradients to the host, also to add up those of one rank."""
    on_cpu = check.device == "cpu"
    size = (8, 32, 4, 16) if on_cpu else (24, 1024, 16, 512)
    microbatch = 1 if on_cpu else 2 if stages > 1 or check.gib < 24 else 8
    shape = dict(pipeline_schedule=schedule, pipeline_model_parallel_size=stages, micro_batch_size=microbatch)
    shape |= dict(global_batch_size=8 * microbatch, train_iters=8 if on_cpu else iterations, log_interval=1000)
    shape |= dict(vocab_size=1023 if on_cpu else 50256, make_vocab_size_divisible_by=128, device=None)
    untied = [UNTIED] * (schedule == "pipedream")
    return gpt_flags(*size, "--bf16", *PLAIN_TORCH, *untied, *more, **shape)


def overhead(check: Check) -> dict[str, Any]:
    """2bw between two runs of Megatron's own schedule, whose difference is the noise."""
    before, run, after = (
        check.train(_large(check, schedule), 1, "nccl", [observe.timed])[0].figures
        for schedule in ("megatron", "2bw", "megatron")
    )
    seconds = [figures["seconds"] for figures in (before, after)]
    mean, noise = sum(seconds) / 2, abs(seconds[0] - seconds[1]) / min(seconds)
    figures = run | {"overhead": run["seconds"] / mean - 1, "noise": noise, "goal": 0.005}
    if check.device == "cuda" and figures["overhead"] > 0.005 + noise:
        raise Failed(f"2bw takes {figures['overhead']:.2%} more time, of which {noise:.2%} may be noise")
    return figures


def memory(check: Check, variant: str, more: tuple[str, ...] = ()) -> dict[str, Any]:
    """Bytes per parameter between iterations against the design, and the peak against the planner."""
    schedule = variant.split(",")[0]
    (run,) = check.train(_large(check, schedule, *more), 1, "nccl", [observe.timed])
    model = replace(preset("gpt-355m", 512), dropout=False)
    plan = Plan(1, 1, 1, 8 if check.gib >= 24 else 2, 8, schedule=schedule, gradient_slots=1 if more else 2)
    predicted = Memory(model, "bf16", flash=False).stages(plan)[0].total
    figures = run.figures | {"bytes_a_parameter": run.static_bytes / run.parameters, "design": DESIGN[variant]}
    figures |= {"peak_gib": run.peak_bytes / 2**30, "planner_gib": predicted / 2**30}
    if check.device == "cuda" and figures["bytes_a_parameter"] > 1.02 * DESIGN[variant]:
        raise Failed(f"{figures['bytes_a_parameter']:.2f} bytes a parameter, not {DESIGN[variant]}")
    if check.device == "cuda" and run.peak_bytes > 1.1 * predicted:
        raise Failed(f"peak {figures['peak_gib']:.2f} GiB; the planner predicts {figures['planner_gib']:.2f} GiB")
    return figures


def stages(check: Check, schedule: str) -> dict[str, Any]:
    """Peak memory by stage, as in the paper's Figure 8: all stages share the GPUs."""
    count = 8 if check.device == "cuda" else 2
    runs = check.train(_large(check, schedule, stages=count, iterations=4), count)
    return {"peak_gib": [round(run.peak_bytes / 2**30, 2) for run in runs]}


def observed(check: Check, observer: Callable) -> dict[str, Any]:
    """The figures of an observer on one stage."""
    return check.train(_large(check, "2bw"), 1, "nccl", [observer])[0].figures


def waiting_calls(check: Check, **variables: str) -> dict[str, Any]:
    """Calls that last as long as another stream's kernel; those that delay another thread's launches meanwhile."""
    found = {name: check.world(1, probes.call, name, variables)[0] for name in probes.CALLS}
    if max(found["launch"]) > 0.5:
        raise Failed("a plain launch waits for another stream")
    waits = [name for name, (seconds, _) in found.items() if seconds > 0.5]
    return {"wait": waits, "delay_other_threads": [name for name, (_, other) in found.items() if other > 0.5]}


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
SLOTS = {"pipedream-flush": (), "2bw, 1 slot": ("--two-bw-gradient-slots", "1"), "2bw": ()}

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
    _row("cost", "overhead", "time of 2bw over Megatron's own schedule, d = 1", overhead, seconds=300.0),
    *(
        _row("cost", f"memory, {name}", "bytes per parameter, peak", memory, seconds=150.0, variant=name, more=more)
        for name, more in SLOTS.items()
    ),
    *(
        _row("cost", f"stages, {name}", "peak memory by stage", stages, seconds=200.0, schedule=name)
        for name in SCHEDULE_NAMES
        if name != "megatron"
    ),
    _row("cost", "hidden waits", "calls that can wait for the GPU", observed, seconds=150.0, observer=observe.profiled),
    _row("thread", "launches", "latency of launches", observed, seconds=150.0, observer=observe.launches),
    *(
        _row("thread", f"waiting calls, {kind}", WAITING, waiting_calls, "cuda", CUDA_MODULE_LOADING=kind)
        for kind in ("LAZY", "EAGER")
    ),
]
