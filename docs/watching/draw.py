"""Draws the pictures of docs/watching.md from runs that it makes, a minute and a half.

    python docs/watching/draw.py

2BW and PipeDream-Flush, four stages, eight microbatches a batch: a tiny real GPT through pretrain_gpt_2bw.py's own
path, whose stages also sleep in each forward and backward (bench/emulated.py), so that four processes on two cores
behave like four devices. Reads back what --tensorboard-dir has recorded, takes the picture of --two-bw-trace as it is,
and prints a line of each log and the shares' means.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

from bench.emulated import train  # noqa: E402
from megatron_2bw.local_ranks import own_output, run_world  # noqa: E402

STAGES, MICROBATCHES, ITERATIONS = 4, 8, 16
FORWARD, BACKWARD = 0.05, 0.1  # seconds
SCHEDULES = ("2bw", "pipedream-flush")


def command(schedule: str, folder: Path) -> list[str]:
    words = [
        "--pipeline-schedule",
        schedule,
        "--pipeline-model-parallel-size",
        STAGES,
        "--num-layers",
        STAGES,
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
        MICROBATCHES,
        "--train-iters",
        ITERATIONS,
        "--lr",
        1e-3,
        "--lr-decay-style",
        "constant",
        "--mock-data",
        "--tokenizer-type",
        "NullTokenizer",
        "--vocab-size",
        63,
        "--num-workers",
        0,
        "--eval-iters",
        0,
        "--eval-interval",
        1000,
        "--log-interval",
        1,
        "--split",
        "98,1,1",
        "--device",
        "cpu",
        "--tensorboard-dir",
        folder / "scalars",
        "--two-bw-trace",
        folder / "trace",
    ]
    return [str(word) for word in words]


def run(rank: int, argv: list[str]) -> str:
    """Train; what this rank printed."""
    train(rank, argv, FORWARD, BACKWARD)
    return own_output()


def scalars(folder: Path, name: str) -> tuple[list[int], list[float]]:
    """Iterations and values of what TensorBoard shows as `name`."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "scalars"))
    events.Reload()
    return [event.step for event in events.Scalars(name)], [event.value for event in events.Scalars(name)]


def main() -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axis = figure.subplots()
    flushed = (STAGES - 1) / (MICROBATCHES + STAGES - 1)
    axis.axhline(flushed, color="black", linewidth=0.8, linestyle=":", label="(d - 1) / (m + d - 1)")
    with tempfile.TemporaryDirectory() as scratch:
        for schedule in SCHEDULES:
            folder = Path(scratch, schedule)
            print(f"{schedule}: {ITERATIONS} iterations", flush=True)
            printed = run_world(STAGES, run, command(schedule, folder), timeout=300)[-1]
            print(*re.findall(r"iteration +12/.*", printed), sep="\n")
            shutil.copy(folder / "trace" / "timeline.png", HERE / f"timeline-{schedule}.png")
            iterations, shares = scalars(folder, "bubble/mean")
            axis.plot(iterations, shares, marker="o", markersize=3, label=schedule)
            for name in ("bubble/mean", *(f"bubble/stage {stage}" for stage in range(STAGES))):
                values = scalars(folder, name)[1][3:-1]
                print(f"  {name}: {sum(values) / len(values):.1%} from iteration 4 to {ITERATIONS - 1}")
    axis.set_ylim(0, 0.5)
    axis.set_xlabel("iteration")
    axis.set_ylabel("bubble/mean")
    axis.legend(frameon=False)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    figure.savefig(HERE / "bubble.png", dpi=150)


if __name__ == "__main__":
    main()
