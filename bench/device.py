"""What a run asks of GPUs, on the stand-in for CUDA (tests/device), whose kernels
compute nothing and take no time.

    python bench/device.py memory      # peak of torch's allocator, against the planner
    python bench/device.py launches    # launches, waits and host time of an iteration
    python bench/device.py host        # seconds of a step in host memory, by its parts

The first two need g++. `memory` trains each plan of device_plans.yaml for five
iterations without Transformer Engine or Apex, and has a row for each stage. `launches`
compares 2bw with Megatron's own schedule, which take turns. The time is the least of
the turns' medians: other programs on the machine only add to it. `host` runs on all
cores of this machine.
"""

import ctypes
import math
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch

from bench.tables import Row, new_parser, write_result
from megatron_2bw.base.files import read_yaml
from megatron_2bw.base.local_ranks import run_world
from megatron_2bw.run.flags.plain_torch import PLAIN_TORCH
from megatron_2bw.tools.gpu_check import entry, rows
from megatron_2bw.tools.planner.cost.memory import GIB, Memory
from megatron_2bw.tools.planner.descriptions.model import Model, preset
from megatron_2bw.tools.planner.descriptions.plan import Plan
from tests.device import build

SEQUENCE = 512
FIRST = 4  # iterations before the steady state
TURNS = 8  # of `launches`
# Of the planner's CONTEXT, what torch's allocator holds: workspaces of cuBLAS for two
# streams, and Megatron's buffer.
WORKSPACES = 2**27
COUNTERS = (
    "seconds",
    "cpu seconds",
    "training thread's cpu seconds",
    "launches",
    "waits",
)
PART = 1 << 24  # elements of a tensor of `host`


def command(model: Model, plan: Plan, iterations: int = 5) -> list[str]:
    text = f"""--device auto --bf16 --vocab-size 50256 --make-vocab-size-divisible-by 128 --log-interval 1
        --micro-batch-size {plan.microbatch} --global-batch-size {plan.global_batch} --train-iters {iterations}
        --no-check-for-nan-in-loss-and-grad"""
    if plan.corrected:
        text += " --two-bw-sync-iterations 0 --lr-warmup-iters 1"
    if model.adapter_rank:
        text += f" --lora-rank {model.adapter_rank}"
    words = (*PLAIN_TORCH, *plan.flags())
    return entry.gpt_flags(
        model.layers, model.hidden, model.heads, SEQUENCE, text, *words
    )


def model_of(name: str) -> Model:
    """A preset, or one with adapters: `gpt-355m lora 16`."""
    name, _, rank = name.partition(" lora ")
    return replace(preset(name, SEQUENCE), adapter_rank=int(rank or 0), dropout=False)


def show(row: Row, form: str) -> None:
    cells = []
    for value in row.values():
        cells.append(format(value, form) if isinstance(value, float) else str(value))
    print(" | ".join(cells))


def memory() -> list[Row]:
    found = []
    for fields in read_yaml(Path(__file__).with_name("device_plans.yaml")):
        name = fields.pop("model")
        model = model_of(name)
        plan = Plan(1, **fields)
        deadline = time.monotonic() + 900
        arguments = (command(model, plan), deadline, {}, entry.nothing)
        runs = run_world(plan.gpus, rows.train, *arguments, timeout=900)
        planner = Memory(model, "bf16", flash=False, torch_adam=True)
        for stage, planned in enumerate(planner.stages(plan)):
            run = runs[stage * plan.width]
            expected = planned.total + WORKSPACES
            row = {
                "model": name,
                "plan": described(plan),
                "stage": stage,
                "peak": run.peak_bytes / GIB,
                "planned": expected / GIB,
                "after": run.static_bytes / GIB,
                "ratio": run.peak_bytes / expected,
                "bytes a parameter": run.static_bytes / run.parameters,
            }
            show(row, ".3f")
            found.append(row)
    return found


def described(plan: Plan) -> str:
    words = [plan.name]
    if plan.recompute == "full":
        words.append("recompute")
    if plan.corrected:
        words.append("correction")
    if plan.grad_reduce_in_bf16:
        words.append("16-bit gradients")
    return " ".join(words)


def counted(rank: int, argv: list[str]) -> dict[str, float]:
    """Seconds of the host, launches and waits of all threads, in an iteration after the
    FIRST."""
    device = ctypes.CDLL(None)
    ends = []

    def after_step(losses) -> None:
        times = (time.perf_counter(), time.process_time(), time.thread_time())
        ends.append((*times, device.device_launches(), device.device_waits()))

    entry.train(argv, after_step=after_step)
    medians = np.median(np.diff(ends[FIRST:], axis=0), axis=0)
    return dict(zip(COUNTERS, medians.tolist()))


def launches() -> list[Row]:
    found = []
    model = model_of("gpt-355m")
    for depth in (1, 2):
        runs = {"megatron": [], "2bw": []}
        for turn in range(TURNS):
            order = list(runs) if turn % 2 else reversed(runs)
            for schedule in order:
                plan = Plan(1, depth, 1, 1, 8, schedule=schedule)
                argv = command(model, plan, iterations=16)
                runs[schedule].append(run_world(depth, counted, argv, timeout=900))
        for stage in range(depth):
            for schedule in runs:
                row = {"stages": depth, "stage": stage, "schedule": schedule}
                row |= dict.fromkeys(COUNTERS, math.inf)
                seconds = []
                for run in runs[schedule]:
                    seconds.append(run[stage]["seconds"])
                    for name in COUNTERS:
                        row[name] = min(row[name], run[stage][name])
                if schedule == "megatron":
                    base = row["seconds"]
                row["turns"] = seconds
                row["microseconds an action"] = 1e6 * row["seconds"] / 16
                row["over megatron"] = row["seconds"] / base - 1
                show(row, ".4g")
                found.append(row)
    return found


def host(parameters: int) -> Row:
    """The parts of a step in host memory (mcore/host_memory.py) of so many parameters,
    apart from the copies.

    In Megatron's order: the norm of each gradient, clipping, Adam, and the conversion
    of the new weights.
    """
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    mains = torch.rand(parameters).split(PART)
    gradients = torch.rand(parameters).split(PART)
    model = torch.empty(parameters, dtype=torch.bfloat16).split(PART)
    for main, gradient in zip(mains, gradients):
        main.requires_grad_()
        main.grad = gradient
    adam = torch.optim.AdamW(mains, lr=1e-4, fused=True)

    def norm() -> None:
        for gradient in gradients:
            torch.norm(gradient)

    def clip() -> None:
        for gradient in gradients:
            gradient.mul_(0.999)

    def convert() -> None:
        for weights, main in zip(model, mains):
            weights.copy_(main.detach())

    row = {"parameters": parameters, "threads": torch.get_num_threads()}
    parts = {"norm": norm, "clipping": clip, "Adam": adam.step, "conversion": convert}
    for _ in range(3):  # the first time takes memory
        for name, part in parts.items():
            begin = time.perf_counter()
            part()
            row[name] = min(row.get(name, math.inf), time.perf_counter() - begin)
    row["seconds"] = sum(row[name] for name in parts)
    row["nanoseconds a parameter"] = 1e9 * row["seconds"] / parameters
    return row


def main() -> None:
    parser = new_parser(__doc__, "device")
    parser.add_argument("what", choices=("memory", "launches", "host"))
    options = parser.parse_args()
    if options.what == "host":
        found = [host(10**8), host(10**9)]
        print(*found, sep="\n")
    else:
        if why := build.missing():
            parser.error(f"the stand-in cannot be built: {why}")
        os.environ |= build.environment()
        os.environ |= {"DEVICE_MOST": "4096", "MEGATRON_2BW_WORLD_DEVICE": "cuda"}
        if options.what == "memory":
            found = memory()
        else:
            found = launches()
    again = " ".join(["python", *sys.argv])
    write_result(options.json, {"again": again, "rows": found})


if __name__ == "__main__":
    main()
