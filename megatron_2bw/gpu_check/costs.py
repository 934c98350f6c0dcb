"""The checks of `megatron-2bw gpu-check` that measure time and memory, also those of the planner's `profile`.
Without a GPU their figures mean nothing."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_2bw.gpu_check import observe, probes
from megatron_2bw.gpu_check.check import UNTIED, Check, Failed, command, gpt_flags
from megatron_2bw.models.inputs import flag as flag_of
from megatron_2bw.models.model import preset
from megatron_2bw.models.plan import Plan
from megatron_2bw.planner.cost.memory import Memory
from megatron_2bw.start.torchrun import PLAIN_TORCH

# Bytes per parameter (docs/design.md), and flags.
DESIGN = {"pipedream-flush": (18, ()), "2bw, 1 slot": (20, ("--two-bw-gradient-slots", "1")), "2bw": (24, ())}


def _size(check: Check, stages: int = 1) -> tuple[dict[str, int], int]:
    """GPT 355M, the paper's measure of a GPU, on the CPU a tiny model: Megatron's size flags, and the microbatch."""
    names = "num_layers", "hidden_size", "num_attention_heads", "seq_length", "vocab_size"
    if check.device == "cpu":
        return dict(zip(names, (8, 32, 4, 16, 1023))), 1
    return dict(zip(names, (24, 1024, 16, 512, 50256))), 2 if stages > 1 or check.gib < 24 else 8


def _large(check: Check, schedule: str, *more: str, stages: int = 1, iterations: int = 20) -> list[str]:
    """A run of `_size` in bf16. One rank runs it over NCCL: gloo would copy all gradients to the host, also to add up
    those of one rank."""
    size, microbatch = _size(check, stages)
    *shape, vocabulary = size.values()
    text = f"""--device auto --bf16 --pipeline-schedule {schedule} --pipeline-model-parallel-size {stages}
        --micro-batch-size {microbatch} --global-batch-size {8 * microbatch} --vocab-size {vocabulary}
        --train-iters {8 if check.device == "cpu" else iterations} --make-vocab-size-divisible-by 128
        --log-interval 1000 {UNTIED if schedule == "pipedream" else ""}"""
    return gpt_flags(*shape, text, *PLAIN_TORCH, *more)


def planner(check: Check, name: str, folder: str, words: str) -> Path:
    """Run a command of megatron-2bw-plan on `_size`. Returns `folder`."""
    size = [str(word) for flag, number in _size(check)[0].items() for word in (flag_of(flag), number)]
    script = [sys.executable, "-m", "megatron_2bw.planner.cli", name]
    command(check, *script, *size, "--device", check.device, *words.format(folder=folder).split())
    return Path(folder)


def profile(check: Check) -> dict[str, Any]:
    """The planner's measurement of a layer, the output layer and the step."""
    with tempfile.TemporaryDirectory() as folder:
        words = f"--microbatches {_size(check)[1]} --repeats 3 --json {{folder}}/profile.json"
        check.profile = json.loads((planner(check, "profile", folder, words) / "profile.json").read_text())
    parts = ((name, check.profile[name][0]) for name in ("blocks", "output"))
    figures = {f"{name}_{way}_ms": 1e3 * part[way] for name, part in parts for way in ("forward", "backward")}
    return figures | {"step_ns_a_parameter": 1e9 * check.profile["optimizer_seconds_per_parameter"]}


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


def memory(check: Check, variant: str) -> dict[str, Any]:
    """Bytes per parameter between iterations against the design, and the peak against the planner."""
    schedule, (design, more) = variant.split(",")[0], DESIGN[variant]
    (run,) = check.train(_large(check, schedule, *more), 1, "nccl", [observe.timed])
    model = replace(preset("gpt-355m", 512), dropout=False)
    plan = Plan(1, 1, 1, 8 if check.gib >= 24 else 2, 8, schedule=schedule, gradient_slots=1 if more else 2)
    predicted = Memory(model, "bf16", flash=False).stages(plan)[0].total
    figures = run.figures | {"bytes_a_parameter": run.static_bytes / run.parameters, "design": design}
    figures |= {"peak_gib": run.peak_bytes / 2**30, "planner_gib": predicted / 2**30}
    if check.device == "cuda" and figures["bytes_a_parameter"] > 1.02 * design:
        raise Failed(f"{figures['bytes_a_parameter']:.2f} bytes a parameter, not {design}")
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
