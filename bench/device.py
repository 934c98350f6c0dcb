"""What a run asks of GPUs, on the stand-in for CUDA (tests/device), whose kernels
compute nothing and take no time.

    python bench/device.py memory      peak of torch's allocator on each stage, against
    the planner
    python bench/device.py launches    launches, waits and the host's time of an
    iteration: 2bw against Megatron's own
    python bench/device.py host        seconds of a step in host memory on all cores of
    this machine, by its parts

The first two need g++. `memory` trains each plan for five iterations without
Transformer Engine or Apex. In `launches` the schedules take turns. The time is the
least of the turns' medians: other programs on the machine only add to it.
"""

from __future__ import annotations

import ctypes
import math
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.tables import new_parser, write_result
from megatron_2bw.base.local_ranks import run_world
from megatron_2bw.run.flags.plain_torch import PLAIN_TORCH
from megatron_2bw.tools.gpu_check import entry, rows
from megatron_2bw.tools.gpu_check.entry import gpt_flags
from megatron_2bw.tools.planner.cost.memory import GIB, Memory
from megatron_2bw.tools.planner.descriptions.model import Model, preset
from megatron_2bw.tools.planner.descriptions.plan import Plan
from tests.device import build

SEQUENCE, FIRST = 512, 4
# Of the planner's CONTEXT, what torch's allocator holds: workspaces of cuBLAS for two
# streams, and Megatron's buffer.
WORKSPACES = 2**27
FLUSH, IN_BF16, ONE = (
    dict(schedule="megatron"),
    dict(grad_reduce_in_bf16=True),
    dict(gradient_slots=1),
)
PLANS = [
    *(("gpt-355m", Plan(1, 1, 1, 8, 8, **more)) for more in (FLUSH, {}, ONE)),
    *(("gpt-355m", Plan(1, 2, 1, 4, 8, **more)) for more in (FLUSH, {})),
    *(
        ("gpt-355m", Plan(1, 4, 1, 4, 8, **more))
        for more in (FLUSH, {}, dict(recompute="full"), dict(extrapolate=True))
    ),
    *(("gpt-2.2b", Plan(1, 4, 1, 2, 8, **more)) for more in (FLUSH, {}, ONE)),
    *(
        ("gpt-2.2b", Plan(1, 4, 1, 2, 8, **more))
        for more in (dict(recompute="full"), dict(extrapolate=True))
    ),
    ("gpt-2.2b", Plan(1, 2, 2, 1, 4, distributed_optimizer=True)),
    *(
        ("gpt-8.3b", Plan(1, 4, 1, 1, 4, **more))
        for more in (FLUSH, {}, dict(recompute="full"), ONE)
    ),
    # larger ones take too much host memory
    *(("gpt-355m", Plan(1, depth, 1, 4, 8, host=True)) for depth in (1, 4)),
    *(("gpt-355m lora 16", Plan(1, 2, 1, 4, 8, **more)) for more in (FLUSH, {})),
    *(
        ("gpt-355m", Plan(1, 2, 2, 2, 4, host=True, distributed_optimizer=True, **more))
        for more in ({}, IN_BF16)
    ),
]


def command(name: str, plan: Plan, *more: str) -> list[str]:
    model = described(name)
    text = f"""--device auto --bf16 --vocab-size 50256 --make-vocab-size-divisible-by 128 --log-interval 1
        --micro-batch-size {plan.microbatch} --global-batch-size {plan.global_batch} --train-iters 5
        --no-check-for-nan-in-loss-and-grad"""
    shape = model.layers, model.hidden, model.heads, SEQUENCE
    correction = (
        "--two-bw-correction auto --two-bw-sync-iterations 0 --lr-warmup-iters 1".split()
        * plan.extrapolate
    )
    adapters = ["--lora-rank", str(model.adapter_rank)] * bool(model.adapter_rank)
    return gpt_flags(
        *shape, text, *PLAIN_TORCH, *plan.flags(), *correction, *adapters, *more
    )


def described(name: str) -> Model:
    """A preset, or one with adapters: `gpt-355m lora 16`."""
    name, _, rank = name.partition(" lora ")
    return replace(preset(name, SEQUENCE), adapter_rank=int(rank or 0), dropout=False)


def memory() -> list[dict[str, Any]]:
    found = []
    for name, plan in PLANS:
        model = described(name)
        words = command(name, plan), time.monotonic() + 900, {}, entry.nothing
        runs = run_world(plan.gpus, rows.train, *words, timeout=900)
        for stage, planned in enumerate(
            Memory(model, "bf16", flash=False, torch_adam=True).stages(plan)
        ):
            run = runs[stage * plan.width]
            more = (
                " recompute" * (plan.recompute == "full")
                + " correction" * plan.extrapolate
            )
            more += " 16-bit gradients" * plan.grad_reduce_in_bf16
            row = {"model": name, "plan": plan.name + more, "stage": stage}
            row |= {
                "peak": run.peak_bytes / GIB,
                "planned": (planned.total + WORKSPACES) / GIB,
                "after": run.static_bytes / GIB,
            }
            row |= {
                "ratio": run.peak_bytes / (planned.total + WORKSPACES),
                "bytes a parameter": run.static_bytes / run.parameters,
            }
            print(
                " | ".join(
                    f"{value:.3f}" if isinstance(value, float) else str(value)
                    for value in row.values()
                )
            )
            found.append(row)
    return found


def counted(rank: int, argv: list[str]) -> dict[str, float]:
    """Of an iteration after the FIRST: seconds of the host, launches and waits of all
    threads."""
    device = ctypes.CDLL(None)
    ends: list[tuple[float, ...]] = []

    def after_step(losses) -> None:
        now = time.perf_counter(), time.process_time(), time.thread_time()
        ends.append((*now, device.device_launches(), device.device_waits()))

    entry.train(argv, after_step=after_step)
    steady = [
        [after - before for before, after in zip(one, two)]
        for one, two in zip(ends[FIRST:], ends[FIRST + 1 :])
    ]
    names = "seconds,cpu seconds,training thread's cpu seconds,launches,waits".split(
        ","
    )
    return dict(zip(names, map(statistics.median, zip(*steady))))


def launches(turns: int, iterations: int) -> list[dict[str, Any]]:
    found = []
    for depth in (1, 2):
        runs: dict[str, list[list[dict[str, float]]]] = {"megatron": [], "2bw": []}
        for turn in range(turns):
            for schedule in list(runs)[:: 1 if turn % 2 else -1]:
                argv = command(
                    "gpt-355m",
                    Plan(1, depth, 1, 1, 8, schedule=schedule),
                    "--train-iters",
                    str(iterations),
                )
                runs[schedule].append(run_world(depth, counted, argv, timeout=900))
        for stage in range(depth):
            of = {
                name: {key: [run[stage][key] for run in all_] for key in all_[0][0]}
                for name, all_ in runs.items()
            }
            for schedule, values in of.items():
                row: dict[str, Any] = {
                    "stages": depth,
                    "stage": stage,
                    "schedule": schedule,
                }
                row |= {key: min(each) for key, each in values.items()} | {
                    "turns": values["seconds"]
                }
                row["microseconds an action"] = 1e6 * row["seconds"] / 16
                row["over megatron"] = (
                    row["seconds"] / min(of["megatron"]["seconds"]) - 1
                )
                print(
                    " | ".join(
                        f"{value:.4g}" if isinstance(value, float) else str(value)
                        for value in row.values()
                    )
                )
                found.append(row)
    return found


def host(parameters: int) -> dict[str, Any]:
    """The parts of a step in host memory (mcore/host_memory.py) of so many parameters,
    apart from the copies.

    In Megatron's order: the norm of each gradient, clipping, Adam, and the conversion
    of the new weights.
    """
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    sizes = [
        min(1 << 24, parameters - start) for start in range(0, parameters, 1 << 24)
    ]
    mains = [torch.rand(size, requires_grad=True) for size in sizes]
    model = [torch.empty(size, dtype=torch.bfloat16) for size in sizes]
    for main in mains:
        main.grad = torch.rand_like(main)
    gradients, adam = (
        [main.grad for main in mains],
        torch.optim.AdamW(mains, lr=1e-4, fused=True),
    )
    parts = {
        "norm": lambda: [torch.norm(gradient) for gradient in gradients],
        "clipping": lambda: [gradient.mul_(0.999) for gradient in gradients],
        "Adam": adam.step,
        "conversion": lambda: [
            there.copy_(main.detach()) for there, main in zip(model, mains)
        ],
    }
    row: dict[str, Any] = {"parameters": parameters, "threads": torch.get_num_threads()}
    for part in (*parts, *parts, *parts):  # the first time takes memory
        begin = time.perf_counter()
        parts[part]()
        row[part] = min(row.get(part, math.inf), time.perf_counter() - begin)
    row["seconds"] = sum(row[part] for part in parts)
    return row | {"nanoseconds a parameter": 1e9 * row["seconds"] / parameters}


def main() -> None:
    parser = new_parser(__doc__, "device")
    parser.add_argument("what", choices=("memory", "launches", "host"))
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=16)
    chosen = parser.parse_args()
    if chosen.what == "host":
        found = [host(parameters) for parameters in (10**8, 10**9)]
        print(*found, sep="\n")
    elif why := build.missing():
        parser.error(f"the stand-in cannot be built: {why}")
    else:
        os.environ |= build.environment() | {
            "DEVICE_MOST": "4096",
            "MEGATRON_2BW_WORLD_DEVICE": "cuda",
        }
        found = (
            memory()
            if chosen.what == "memory"
            else launches(chosen.turns, chosen.iterations)
        )
    write_result(chosen.json, {"again": " ".join(["python", *sys.argv]), "rows": found})


if __name__ == "__main__":
    main()
