"""The share of time in which the stages of a pipeline compute: every schedule in one
run, on stages that sleep.

    python bench/schedule_efficiency.py --stages 8 --microbatches 8 --json
    out/bench/efficiency.json

Each row trains a tiny real GPT (one layer per stage, fp16 with dynamic loss scaling,
tied embeddings, clipping) through the code path of pretrain_gpt_2bw.py; a stage's
forward and backward also sleep for the given times. ideal_ms is microbatches x (forward
+ backward), efficiency is ideal_ms / iteration_ms of the median steady-state iteration.
2bw-as-nccl is 2bw that posts receives no earlier than on NCCL; the messages go over
gloo as in all rows.

    python bench/schedule_efficiency.py --real --stages 2 --microbatches 4 --iterations
    14

With --real nothing sleeps, and a larger GPT (8 layers of 256) computes on one thread a
stage. ideal_ms is the row "limit" of the same run: all stages compute at the same time
without communication. Busy cores share caches and memory, so this is the machine's
limit, not a part of the time of one process.

Writes the JSON and a picture of the same name.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.emulated import PEERS, iteration_seconds, train, train_with_torch
from bench.tables import bar_chart, new_parser, write_result
from megatron_2bw.base.argv import merged
from megatron_2bw.base.errors import names_of, words
from megatron_2bw.base.local_ranks import WorldError, run_world
from megatron_2bw.tools.gpu_check.entry import gpt_flags, nothing
from megatron_2bw.tools.planner.descriptions.inputs import numbers

OURS = ("2bw", "pipedream-flush", "gpipe", "no-pipelining", "megatron")
ALL = (*OURS, "megatron-interleaved", *PEERS)
Row = dict[str, Any]


def options() -> argparse.Namespace:
    parser = new_parser(__doc__, "schedule_efficiency")
    option = parser.add_argument
    option("--stages", type=numbers, default=[8], metavar="D,...")
    meaning = "numbers, or multiples of the stages: 1x,2x"
    option("--microbatches", type=words, default=["1x"], metavar="M,...", help=meaning)
    option("--width", type=int, default=1, help="data-parallel pipelines")
    option("--real", action="store_true", help="compute, do not sleep")
    option("--forward-ms", type=float, default=100)
    option("--backward-ms", type=float, default=200)
    option(
        "--step-ms",
        type=numbers,
        default=[],
        metavar="N,...",
        help="of the optimizer: a row for each, and for 0",
    )
    option(
        "--schedules",
        type=names_of((*ALL, "2bw-as-nccl")),
        metavar="NAME,...",
        help="default: all",
    )
    option(
        "--gpipe-round",
        type=numbers,
        default=[],
        metavar="N,...",
        help="of gpipe: a row for each, and one without",
    )
    option("--iterations", type=int, default=9)
    sets = lambda text: list(map(str.strip, text.split(";")))
    option(
        "--flags",
        type=sets,
        default=[""],
        metavar="FLAGS;...",
        help="of Megatron: a row for each set",
    )
    chosen = parser.parse_args()
    if chosen.iterations < 7:
        parser.error(
            "--iterations must be 7 at least: three fill the pipeline, two empty it"
        )
    if chosen.real:
        chosen.forward_ms = chosen.backward_ms = 0.0
    chosen.schedules = chosen.schedules or (OURS if chosen.real else ALL)
    return chosen


def command(
    schedule: str,
    stages: int,
    microbatches: int,
    chosen: argparse.Namespace,
    flags: str,
) -> list[str]:
    """The command line of a tiny GPT with a layer per stage (two if the stages are
    interleaved), or of a real one."""
    name = "2bw" if schedule == "limit" else schedule.removesuffix("-as-nccl")
    text = f"""--pipeline-model-parallel-size {stages} --global-batch-size {microbatches * chosen.width}
        --train-iters {chosen.iterations}"""
    if chosen.real:
        text += (
            f" --pipeline-schedule {name} --vocab-size 255 "
            "--make-vocab-size-divisible-by 128 --log-interval 100"
        )
        return merged(gpt_flags(8, 256, 4, 256, text), flags.split())
    layers = stages
    if name == "megatron-interleaved":
        name, layers = "megatron --num-virtual-stages-per-pipeline-rank 2", 2 * stages
    # pipedream scales by a constant and has no tied embeddings
    scale = "--loss-scale 1024 --untie-embeddings-and-output-weights"
    if schedule != "pipedream":
        scale = "--initial-loss-scale 1024"
    text += f" --pipeline-schedule {name} --lr 1e-3 --fp16 {scale} --vocab-size 63 --log-interval 5"
    return merged(gpt_flags(layers, 16, 2, 8, text), flags.split())


def measure(
    schedule: str,
    stages: int,
    microbatches: int,
    chosen: argparse.Namespace,
    flags: str,
    step: int,
    limit: float = 0.0,
) -> Row:
    """A row of the table. limit: the milliseconds of an iteration of the row "limit",
    if there is one."""
    forward, backward = chosen.forward_ms / 1e3, chosen.backward_ms / 1e3
    ideal = microbatches * (forward + backward)
    patience = (
        120
        + 20 * stages
        + 3 * chosen.iterations * ideal * (stages if schedule == "no-pipelining" else 1)
    )
    patience += 600 * chosen.real
    clip = 0.0
    if schedule in PEERS:
        arguments = (
            train_with_torch,
            schedule,
            stages,
            microbatches,
            forward,
            backward,
            chosen.iterations,
        )
        runs = run_world(stages, *arguments, timeout=patience)
    else:
        words = command(schedule, stages, microbatches, chosen, flags)
        clip = float(words[words.index("--clip-grad") + 1])
        kind = schedule.removeprefix("2bw-")
        arguments = (train, words, forward, backward, kind, nothing, step / 1e3)
        runs = run_world(
            stages * chosen.width,
            *arguments,
            timeout=patience + chosen.iterations * step / 1e3,
        )
    milliseconds = 1e3 * iteration_seconds(runs)
    ideal = 1e3 * ideal or limit or milliseconds
    return {
        "schedule": schedule,
        "stages": stages,
        "microbatches": microbatches,
        "width": 1 if schedule in PEERS else chosen.width,
        "forward_ms": chosen.forward_ms,
        "backward_ms": chosen.backward_ms,
        "step_ms": step,
        "iteration_ms": round(milliseconds, 1),
        "ideal_ms": round(ideal, 1),
        "efficiency": round(ideal / milliseconds, 4),
        "clip_grad": clip,
        "peak_activations": max(run.peak_activations for run in runs),
        "versions": max(run.versions for run in runs),
        "flags": "" if schedule in PEERS else flags,
    }


def draw(rows: list[Row]) -> Any:
    """Bars of efficiency: one for each row, the longest first, or a group for each
    shape if there are several."""
    shares = {}
    for row in rows:
        step = f"step {row['step_ms']} ms" if row.get("step_ms") else ""
        place = (
            "{schedule} {flags} {}".format(step, **row).strip(),
            "d = {stages}, m = {microbatches}".format(**row),
        )
        shares[place] = row["efficiency"]
    names, shapes = (
        list(dict.fromkeys(key[place] for key in shares)) for place in (0, 1)
    )
    label = (
        "share of the limit, both cores busy"
        if "limit" in names
        else "share of the time that stages compute"
    )
    if len(shapes) == 1:
        names.sort(key=lambda name: -shares[name, shapes[0]])
        return bar_chart(
            names,
            {"": [shares[name, shapes[0]] for name in names]},
            f"{label}, {shapes[0]}",
            ".1%",
        )
    series = {
        name: [shares.get((name, shape), math.nan) for shape in shapes]
        for name in names
    }
    return bar_chart(shapes, series, label, ".1%")


def main() -> int:
    chosen = options()
    machine = {"cores": os.cpu_count(), "python": platform.python_version()}
    result = {"machine": machine, "rows": [], "failures": []}
    cases = [
        (
            stages,
            int(text[:-1]) * stages if text[-1] == "x" else int(text),
            schedule,
            f"{size} {flags}".strip(),
            step,
        )
        for stages in chosen.stages
        for text in chosen.microbatches
        for schedule in (*["limit"] * chosen.real, *chosen.schedules)
        for size in (
            "",
            *(f"--gpipe-round {n}" for n in chosen.gpipe_round if schedule == "gpipe"),
        )
        for flags in (chosen.flags if schedule != "limit" else [""])
        for step in (0, *chosen.step_ms)
    ]
    limit = 0.0
    for stages, microbatches, schedule, flags, step in cases:
        name = f"{schedule:24s} d {stages:2d}  m {microbatches:3d}"
        if "interleaved" in schedule and microbatches % stages:
            print(f"{name}  takes multiples of the stages only")
            continue
        begun = time.monotonic()
        try:
            row = measure(
                schedule,
                stages,
                microbatches,
                chosen,
                flags,
                step,
                0.0 if schedule == "limit" else limit,
            )
        except WorldError as error:
            result["failures"].append(
                f"{schedule}, {stages} stages, {microbatches} microbatches: {error}"
            )
            print(result["failures"][-1], file=sys.stderr, flush=True)
            continue
        limit = row["iteration_ms"] if schedule == "limit" else limit
        result["rows"].append(row)
        times = "iteration {iteration_ms:8.1f} ms  efficiency {efficiency:.3f}".format(
            **row
        )
        print(
            f"{name}  {times}   ({time.monotonic() - begun:.0f} s) {flags} step {step} ms",
            flush=True,
        )
        write_result(chosen.json, result)
    if result["rows"]:
        write_result(chosen.json, result, draw(result["rows"]))
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
