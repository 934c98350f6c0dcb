"""Runs the trainings of docs/running.md and draws its pictures, in a minute and a
half.

    python docs/running/draw.py

2BW with all microbatches late, and PipeDream-Flush, four stages, eight microbatches per
batch: a tiny real GPT through the code path of pretrain_gpt_2bw.py, whose stages also
sleep in each forward and backward (bench/emulated.py), so that four processes on two
cores behave like four devices. Reads the scalars of --tensorboard-dir, copies the
picture of --pipeline-trace, and prints a line of each log and the mean shares.
"""

import re
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.emulated import train
from megatron_2bw.base.files import new_figure, write_figure
from megatron_2bw.base.local_ranks import own_output, run_world
from megatron_2bw.tools.gpu_check.entry import gpt_flags

HERE = Path(__file__).resolve().parent
STAGES = 4
MICROBATCHES = 8
ITERATIONS = 16
FORWARD = 0.05  # seconds
BACKWARD = 0.1
FLAGS = {  # of the schedules
    "2bw": "--two-bw-late all --two-bw-correction none",
    "pipedream-flush": "",
}


def command(schedule: str, folder: Path) -> list[str]:
    text = f"""--pipeline-schedule {schedule} --pipeline-model-parallel-size {STAGES} --global-batch-size {MICROBATCHES}
        --train-iters {ITERATIONS} --lr 1e-3 --vocab-size 63 --log-interval 1 {FLAGS[schedule]}"""
    text += f" --tensorboard-dir {folder}/scalars --pipeline-trace {folder}/trace"
    return gpt_flags(STAGES, 16, 2, 8, text)


def run(rank: int, argv: list[str]) -> str:
    """Train; what this rank printed."""
    train(rank, argv, FORWARD, BACKWARD)
    return own_output()


def scalars(folder: Path, name: str) -> tuple[list[int], list[float]]:
    """Iterations and values of what TensorBoard shows as `name`."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "scalars"))
    events.Reload()
    found = events.Scalars(name)
    return [event.step for event in found], [event.value for event in found]


def main() -> None:
    figure = new_figure(8, 3.4)
    axis = figure.subplots()
    flushed = (STAGES - 1) / (MICROBATCHES + STAGES - 1)
    axis.axhline(
        flushed,
        color="black",
        linewidth=0.8,
        linestyle=":",
        label="(d - 1) / (m + d - 1)",
    )
    with tempfile.TemporaryDirectory() as scratch:
        for schedule in FLAGS:
            folder = Path(scratch, schedule)
            print(f"{schedule}: {ITERATIONS} iterations", flush=True)
            printed = run_world(STAGES, run, command(schedule, folder), timeout=300)[-1]
            print(*re.findall(r"iteration +12/.*", printed), sep="\n")
            picture = folder / "trace" / "timeline.png"
            shutil.copy(picture, HERE / f"timeline-{schedule}.png")
            iterations, shares = scalars(folder, "bubble/mean")
            axis.plot(iterations, shares, marker="o", markersize=3, label=schedule)
            for place in ("mean", *range(STAGES)):
                name = "bubble/mean" if place == "mean" else f"bubble/stage {place}"
                mean = statistics.fmean(scalars(folder, name)[1][3:-1])
                print(f"  {name}: {mean:.1%} from iteration 4 to {ITERATIONS - 1}")
    axis.set(ylim=(0, 0.5), xlabel="iteration", ylabel="bubble/mean")
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    write_figure(HERE / "bubble.png", figure)


if __name__ == "__main__":
    main()
