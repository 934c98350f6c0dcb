"""The share of time in which the stages of a pipeline compute: every schedule in one
run, on stages that sleep.

    python bench/schedule_efficiency.py --stages 8 --microbatches 8

Each row trains a tiny real GPT (one layer per stage, fp16 with dynamic loss scaling,
tied embeddings, clipping) through the code path of pretrain_gpt_2bw.py; a stage's
forward and backward also sleep for the given times. ideal_ms is microbatches x (forward
+ backward), efficiency is ideal_ms / iteration_ms of the median steady-state iteration.

    python bench/schedule_efficiency.py --real --stages 2 --microbatches 4

With --real nothing sleeps, and a larger GPT (8 layers of 256) computes on one thread a
stage. ideal_ms is the row "limit" of the same run: all stages compute at the same time
without communication. Busy cores share caches and memory, so this is the machine's
limit, not a part of the time of one process.

Writes the JSON and a picture of the same name.
"""

import itertools
import math
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.emulated import PEERS, iteration_seconds, train, train_with_torch
from bench.tables import Row, bar_chart, new_parser, write_result
from megatron_2bw.base.argv import merged
from megatron_2bw.base.errors import comma_separated, list_of, whole_number
from megatron_2bw.base.local_ranks import run_world
from megatron_2bw.tools.gpu_check.entry import gpt_flags, nothing
from megatron_2bw.tools.planner.descriptions.inputs import numbers

OURS = ("2bw", "pipedream-flush", "gpipe", "no-pipelining", "megatron")
ALL = (*OURS, "megatron-interleaved", *PEERS)


def options() -> Namespace:
    parser = new_parser(__doc__, "schedule_efficiency")
    option = parser.add_argument
    option("--stages", type=numbers, default=[8])
    option("--microbatches", type=comma_separated, default=["1x"], help="such as 4,1x")
    option("--width", type=int, default=1, help="data-parallel pipelines")
    option("--real", action="store_true", help="compute, do not sleep")
    option("--forward-ms", type=float, default=100)
    option("--backward-ms", type=float, default=200)
    option("--step-ms", type=numbers, default=[], help="a row for each, and for 0")
    option("--schedules", type=list_of(ALL), help="default: all")
    meaning = "7 at least: three fill the pipeline, two empty it"
    option("--iterations", type=whole_number(7), default=9, help=meaning)
    meaning = "of Megatron, by ;: a row for each set, of 2bw alone with --two-bw-..."
    option("--flags", default="", help=meaning)
    chosen = parser.parse_args()
    if chosen.real:
        chosen.forward_ms = chosen.backward_ms = 0.0
    if not chosen.schedules:
        chosen.schedules = OURS if chosen.real else ALL
    return chosen


def command(
    schedule: str,
    stages: int,
    microbatches: int,
    chosen: Namespace,
    flags: str,
) -> list[str]:
    """The command line of a tiny GPT with a layer per stage (two if the stages are
    interleaved), or of a real one."""
    name = schedule
    layers = stages
    if schedule in ("2bw", "limit"):
        name = "2bw --two-bw-late all --two-bw-correction none"
    elif schedule == "megatron-interleaved":
        name = "megatron --num-virtual-stages-per-pipeline-rank 2"
        layers = 2 * stages
    text = f"""--pipeline-model-parallel-size {stages} --global-batch-size {microbatches * chosen.width}
        --train-iters {chosen.iterations} --pipeline-schedule {name}"""
    if chosen.real:
        text += (
            " --vocab-size 255 --make-vocab-size-divisible-by 128 --log-interval 100"
        )
        return merged(gpt_flags(8, 256, 4, 256, text), flags.split())
    text += " --lr 1e-3 --fp16 --vocab-size 63 --log-interval 5"
    # pipedream scales by a constant and has no tied embeddings
    if schedule == "pipedream":
        text += " --loss-scale 1024 --untie-embeddings-and-output-weights"
    else:
        text += " --initial-loss-scale 1024"
    return merged(gpt_flags(layers, 16, 2, 8, text), flags.split())


def measure(
    schedule: str,
    stages: int,
    microbatches: int,
    chosen: Namespace,
    flags: str,
    step: int = 0,
    limit: float = 0.0,
) -> Row:
    """A row of the table. limit: the milliseconds of an iteration of the row "limit",
    if there is one."""
    forward = chosen.forward_ms / 1e3
    backward = chosen.backward_ms / 1e3
    ideal = microbatches * (forward + backward)
    # without pipelining an iteration takes `stages` times as long
    patience = 720 + chosen.iterations * (3 * ideal * stages + step / 1e3)
    if schedule in PEERS:
        sizes = (schedule, stages, microbatches, forward, backward, chosen.iterations)
        runs = run_world(stages, train_with_torch, *sizes, timeout=patience)
    else:
        argv = command(schedule, stages, microbatches, chosen, flags)
        limited = schedule == "limit"
        arguments = (argv, forward, backward, limited, nothing, step / 1e3)
        runs = run_world(stages * chosen.width, train, *arguments, timeout=patience)
    milliseconds = 1e3 * iteration_seconds(runs)
    ideal = 1e3 * ideal or limit or milliseconds
    return {
        "schedule": schedule,
        "stages": stages,
        "microbatches": microbatches,
        "width": chosen.width,
        "forward_ms": chosen.forward_ms,
        "backward_ms": chosen.backward_ms,
        "step_ms": step,
        "iteration_ms": round(milliseconds, 1),
        "ideal_ms": round(ideal, 1),
        "efficiency": round(ideal / milliseconds, 4),
        "peak_activations": max(run.peak_activations for run in runs),
        "versions": max(run.versions for run in runs),
        "flags": flags,
    }


def draw(rows: list[Row]) -> Any:
    """Bars of efficiency: one for each row, the longest first, or a group for each
    shape if there are several."""
    shares = {}
    shapes = []
    for row in rows:
        step = f"step {row['step_ms']} ms" if row.get("step_ms") else ""
        name = f"{row['schedule']} {row['flags']} {step}".strip()
        shape = f"d = {row['stages']}, m = {row['microbatches']}"
        shapes.append(shape)
        shares.setdefault(name, {})[shape] = row["efficiency"]
    label = "share of the time that stages compute"
    if "limit" in shares:
        label = "share of the limit, both cores busy"
    shapes = list(dict.fromkeys(shapes))
    if len(shapes) == 1:
        (shape,) = shapes
        names = sorted(shares, key=lambda name: -shares[name][shape])
        values = [shares[name][shape] for name in names]
        return bar_chart(names, {"": values}, f"{label}, {shape}")
    series = {}
    for name, efficiencies in shares.items():
        series[name] = [efficiencies.get(shape, math.nan) for shape in shapes]
    return bar_chart(shapes, series, label)


def cases(chosen: Namespace) -> Iterator[tuple[str, int, int, str, int]]:
    """Schedule, stages, microbatches, flags and step of each row."""
    schedules = [*chosen.schedules]
    if chosen.real:
        schedules.insert(0, "limit")
    for stages, text, schedule in itertools.product(
        chosen.stages, chosen.microbatches, schedules
    ):
        microbatches = int(text.removesuffix("x"))
        if text.endswith("x"):
            microbatches *= stages
        sets = [""] if schedule == "limit" else chosen.flags.split(";")
        for flags, step in itertools.product(sets, (0, *chosen.step_ms)):
            if schedule == "2bw" or "--two-bw" not in flags:
                yield schedule, stages, microbatches, flags.strip(), step


def main() -> None:
    chosen = options()
    machine = {"cores": os.cpu_count()}
    rows = []
    limit = 0.0
    for schedule, stages, microbatches, flags, step in cases(chosen):
        name = f"{schedule:24s} d {stages:2d}  m {microbatches:3d}"
        if "interleaved" in schedule and microbatches % stages:
            print(f"{name}  takes multiples of the stages only")
            continue
        if schedule == "limit":
            limit = 0.0
        row = measure(schedule, stages, microbatches, chosen, flags, step, limit)
        if schedule == "limit":
            limit = row["iteration_ms"]
        rows.append(row)
        times = "iteration {iteration_ms:8.1f} ms  efficiency {efficiency:.3f}"
        text = times.format(**row)
        print(f"{name}  {text}   {flags} step {step} ms", flush=True)
        write_result(chosen.json, {"machine": machine, "rows": rows}, draw(rows))


if __name__ == "__main__":
    main()
