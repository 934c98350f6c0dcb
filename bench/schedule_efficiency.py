"""How much of the time the stages of a pipeline compute: every schedule, in one run, on stages that sleep.

    python bench/schedule_efficiency.py --stages 8 --microbatches 8 --json out/bench/efficiency.json

Each row trains a tiny real GPT (one layer a stage, fp16 with dynamic loss scaling, tied embeddings, clipping) through
pretrain_gpt_2bw.py's own path; a stage's forward and backward also sleep for the given times. ideal_ms is
microbatches x (forward + backward), efficiency is ideal_ms / iteration_ms of the median steady-state iteration.
Beside the JSON a picture of the same name is written.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.emulated import PEERS, iteration_seconds, train, train_with_torch
from megatron_2bw.local_ranks import WorldError, run_world

OURS = ("2bw", "pipedream-flush", "gpipe", "no-pipelining", "megatron")
ALL = (*OURS, "megatron-interleaved", *PEERS)


@dataclass
class Row:
    schedule: str
    stages: int
    microbatches: int
    width: int
    forward_ms: float
    backward_ms: float
    iteration_ms: float
    ideal_ms: float
    efficiency: float
    clip_grad: float
    peak_activations: int
    versions: int
    flags: str


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=lambda text: [int(word) for word in text.split(",")], default=[8])
    parser.add_argument(
        "--microbatches",
        type=lambda text: text.split(","),
        default=["1x"],
        metavar="M,...",
        help="numbers, or multiples of the stages such as 1x,2x,4x",
    )
    parser.add_argument("--width", type=int, default=1, help="pipelines side by side")
    parser.add_argument("--forward-ms", type=float, default=100)
    parser.add_argument("--backward-ms", type=float, default=200)
    parser.add_argument("--schedules", type=lambda text: text.split(","), default=list(ALL), metavar="NAME,...")
    parser.add_argument("--iterations", type=int, default=9)
    parser.add_argument("--clip-grad", type=float, default=1.0)
    parser.add_argument(
        "--flags",
        type=lambda text: [part.strip() for part in text.split(";")],
        default=[""],
        metavar="FLAGS;...",
        help="more flags of Megatron: a row for each part (write --flags=..., a part may be empty)",
    )
    parser.add_argument("--json", type=Path, default=Path("out/bench/schedule_efficiency.json"))
    chosen = parser.parse_args()
    unknown = set(chosen.schedules) - set(ALL)
    if unknown:
        parser.error(f"--schedules: {', '.join(sorted(unknown))} is not one of {', '.join(ALL)}")
    if chosen.iterations < 7:
        parser.error("--iterations must be 7 at least: three fill the pipeline, two empty it")
    return chosen


def command(schedule: str, stages: int, microbatches: int, chosen: argparse.Namespace, flags: str) -> list[str]:
    """The command line of a tiny GPT with a layer a stage (two if the stages are interleaved)."""
    interleaved = schedule == "megatron-interleaved"
    words = [
        "--pipeline-schedule",
        "megatron" if interleaved else schedule,
        "--pipeline-model-parallel-size",
        stages,
        "--num-layers",
        stages * (2 if interleaved else 1),
        "--hidden-size",
        16,
        "--num-attention-heads",
        2,
        "--seq-length",
        8,
        "--max-position-embeddings",
        8,
        "--micro-batch-size",
        1,
        "--global-batch-size",
        microbatches * chosen.width,
        "--train-iters",
        chosen.iterations,
        "--lr",
        1e-3,
        "--lr-decay-style",
        "constant",
        "--clip-grad",
        chosen.clip_grad,
        "--fp16",
        "--initial-loss-scale",
        1024,
        "--mock-data",
        "--tokenizer-type",
        "NullTokenizer",
        "--vocab-size",
        63,
        "--make-vocab-size-divisible-by",
        32,
        "--attention-dropout",
        0,
        "--hidden-dropout",
        0,
        "--num-workers",
        0,
        "--eval-iters",
        0,
        "--eval-interval",
        1000,
        "--log-interval",
        5,
        "--split",
        "98,1,1",
        "--device",
        "cpu",
        *flags.split(),
    ]
    if interleaved:
        words += ["--num-virtual-stages-per-pipeline-rank", 2]
    return [str(word) for word in words]


def measure(schedule: str, stages: int, microbatches: int, chosen: argparse.Namespace, flags: str) -> Row:
    forward, backward = chosen.forward_ms / 1e3, chosen.backward_ms / 1e3
    ideal = microbatches * (forward + backward)
    limit = 120 + 20 * stages + 3 * chosen.iterations * ideal * (stages if schedule == "no-pipelining" else 1)
    clip = 0.0
    if schedule in PEERS:
        arguments = (train_with_torch, schedule, stages, microbatches, forward, backward, chosen.iterations)
        runs = run_world(stages, *arguments, timeout=limit)
    else:
        words = command(schedule, stages, microbatches, chosen, flags)
        clip = float(words[len(words) - 1 - words[::-1].index("--clip-grad") + 1])  # the last one counts
        runs = run_world(stages * chosen.width, train, words, forward, backward, timeout=limit)
    seconds = iteration_seconds(runs)
    return Row(
        schedule,
        stages,
        microbatches,
        1 if schedule in PEERS else chosen.width,
        chosen.forward_ms,
        chosen.backward_ms,
        round(1e3 * seconds, 1),
        round(1e3 * ideal, 1),
        round(ideal / seconds, 4),
        clip,
        max(run.peak_activations for run in runs),
        max(run.versions for run in runs),
        "" if schedule in PEERS else flags,
    )


def draw(rows: list[Row], path: Path) -> None:
    """Bars of efficiency, a group for each shape."""
    from matplotlib.figure import Figure

    shapes = list(dict.fromkeys((row.stages, row.microbatches) for row in rows))

    def label(row: Row) -> str:
        return f"{row.schedule} {row.flags}".strip()

    names = list(dict.fromkeys(map(label, rows)))
    figure = Figure(figsize=(max(7, 1.0 + 0.19 * len(names) * len(shapes)), 4.2), layout="constrained")
    axis = figure.subplots()
    for place, name in enumerate(names):
        heights = {(r.stages, r.microbatches): r.efficiency for r in rows if label(r) == name}
        xs = [shapes.index(shape) + (place - (len(names) - 1) / 2) * 0.8 / len(names) for shape in heights]
        axis.bar(xs, heights.values(), 0.8 / len(names), label=name)
    axis.axhline(1, color="black", linewidth=0.8, linestyle=":")
    axis.set_xticks(range(len(shapes)), [f"d = {d}\nm = {m}" for d, m in shapes])
    axis.set_ylabel("share of the time that stages compute")
    axis.set_ylim(0, 1.05)
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> int:
    chosen = options()
    chosen.json.parent.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    failures: list[str] = []
    for stages in chosen.stages:
        counts = [int(text[:-1]) * stages if text.endswith("x") else int(text) for text in chosen.microbatches]
        for microbatches in counts:
            for schedule, flags in [(name, flags) for name in chosen.schedules for flags in chosen.flags]:
                if "interleaved" in schedule and microbatches % stages:
                    print(f"{schedule:24s} d {stages:2d}  m {microbatches:3d}  takes multiples of the stages only")
                    continue
                begun = time.monotonic()
                try:
                    rows.append(measure(schedule, stages, microbatches, chosen, flags))
                except WorldError as error:
                    failures.append(f"{schedule}, {stages} stages, {microbatches} microbatches: {error}")
                    print(failures[-1], file=sys.stderr, flush=True)
                    continue
                row = rows[-1]
                print(
                    f"{schedule:24s} d {stages:2d}  m {microbatches:3d}  iteration {row.iteration_ms:8.1f} ms  "
                    f"efficiency {row.efficiency:.3f}   ({time.monotonic() - begun:.0f} s) {flags}",
                    flush=True,
                )
                machine = {"cores": os.cpu_count(), "python": platform.python_version()}
                result = {"machine": machine, "rows": [asdict(row) for row in rows], "failures": failures}
                part = chosen.json.with_suffix(".part")
                part.write_text(json.dumps(result, indent=1) + "\n")
                part.replace(chosen.json)
    if rows:
        draw(rows, chosen.json.with_suffix(".png"))
        print(f"wrote {chosen.json} and {chosen.json.with_suffix('.png')}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
