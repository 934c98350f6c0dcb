"""Trains a small GPT with two pipeline stages for about two minutes and shows that it learns.

    python scripts/demo.py [--schedule NAME] [--iterations N] [--out DIR]

Prints Megatron's own log and writes it to DIR/train.log; the losses are read from it. Invariant: summary.json and
loss.png in DIR are those of a run that ended well, and each of them is whole or absent.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass
from pathlib import Path

from megatron_2bw import run_log
from megatron_2bw.data.corpus import build_corpus
from megatron_2bw.errors import Parser, UserError, file_errors, run_program
from megatron_2bw.files import new_figure, write_figure, write_json
from megatron_2bw.processes import stop_tree
from megatron_2bw.schedules import SCHEDULE_NAMES
from megatron_2bw.start.torchrun import PLAIN_TORCH, log_interval, start, torchrun

STAGES, MICROBATCHES, MICRO_BATCH_SIZE, SEQUENCE = 2, 4, 4, 128

# 3.4 million parameters. The last stage also multiplies with the vocabulary, which costs as much as two layers,
# so three of the four layers on the first stage make the stages about equal.
MODEL = """
    --num-layers 4 --decoder-first-pipeline-num-layers 3 --hidden-size 192 --num-attention-heads 6
    --position-embedding-type rope --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
""".split()

# Gradients that are one update late leave less room for the learning rate: at 3e-3 2BW learns more slowly.
OPTIMIZER = "--lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --adam-beta2 0.95 --clip-grad 1.0".split()
WARM_UP = 30
FLUSH_ITERATIONS = 30  # of the run that shows what a flush costs

# A tenth of the files for validation. With fewer, tables of character sets, which are easy, make up most of it.
DATA = "--split 90,10,0 --eval-iters 10".split()


@dataclass(frozen=True)
class Losses:
    """The losses of a run.

    steps       where each training loss belongs on the axis of iterations: the middle of those it is the mean of
    training    the mean loss of those iterations; the first is that of iteration 1 alone
    validation  after the last iteration; None if the log holds none
    """

    steps: list[float]
    training: list[float]
    validation: float | None


def parse_log(text: str) -> Losses:
    """The losses that Megatron logged; run_log says which iterations a line is the mean of."""
    steps, training, first = [], [], 1
    for line in run_log.training(text):
        if line.loss is not None:
            steps.append((first + line.iteration) / 2)
            training.append(line.loss)
        first = line.iteration + 1 if line.iteration > 1 else 1
    validations = [line.loss for line in run_log.validations(text)]
    return Losses(steps, training, validations[-1] if validations else None)


def training_command(schedule: str, iterations: int, corpus_flags: list[str], device: str) -> list[str]:
    """The command that trains: torchrun, the entry script, Megatron's flags."""
    sizes = f"""
        --pipeline-schedule {schedule} {"--two-bw-correction auto" if schedule == "2bw" else ""} --device {device}
        --pipeline-model-parallel-size {STAGES} --micro-batch-size {MICRO_BATCH_SIZE}
        --global-batch-size {MICRO_BATCH_SIZE * MICROBATCHES} --seq-length {SEQUENCE}
        --max-position-embeddings {SEQUENCE} --train-iters {iterations} --log-interval {log_interval(iterations)}
        --lr-warmup-iters {min(WARM_UP, iterations // 2)} --eval-interval {iterations + 1}
    """.split()  # one validation, after the last iteration
    return [*torchrun(STAGES), *sizes, *MODEL, *PLAIN_TORCH, *OPTIMIZER, *DATA, *corpus_flags]


def pick_device() -> str:
    """Two stages on one GPU gain nothing over the CPU here, and NCCL refuses it."""
    import torch

    return "cuda" if torch.cuda.device_count() >= STAGES else "cpu"


def train(command: list[str], log: Path, shown: bool = True) -> str:
    """Run the command, its output in `log` and on the screen; return the output. Raises UserError if it fails."""
    process = start(command)
    try:
        with open(log, "w") as file:
            for line in process.stdout or ():
                file.write(line)
                file.flush()
                if shown:
                    print(line, end="", flush=True)
        code = process.wait()
    finally:
        stop_tree(process, 5)
    text = log.read_text()
    if code:
        raise UserError(f"training failed with exit code {code}: {run_log.cause(text)} (log: {_shown(log)})")
    return text


def summarize(losses: Losses, schedule: str, iterations: int, seconds: float) -> dict:
    """What summary.json holds. Raises UserError if the log gave no losses, or impossible ones."""
    if not losses.training or losses.validation is None:
        raise UserError("training ended, but its log lacks the losses")
    if not all(map(math.isfinite, [*losses.training, losses.validation])):
        raise UserError("training ended, but a loss is not a finite number")
    return {
        "schedule": schedule,
        "stages": STAGES,
        "microbatches": MICROBATCHES,
        "iterations": iterations,
        "first_loss": losses.training[0],
        "last_loss": losses.training[-1],
        "validation_loss": losses.validation,
        "seconds": round(seconds, 1),
    }


def table(summary: dict, interval: int, folder: Path) -> str:
    """The summary for people, a few aligned lines."""
    first, last = summary["first_loss"], summary["last_loss"]
    rows = {
        "schedule": f"{summary['schedule']}, {STAGES} stages, {MICROBATCHES} microbatches per batch",
        "iterations": f"{summary['iterations']} in {summary['seconds']:.0f} s, with start-up and validation",
        "first loss": f"{first:.3f}",
        "last loss": f"{last:.3f}, the mean of the last {interval} iterations ({last / first - 1:+.0%})",
        "validation loss": f"{summary['validation_loss']:.3f}",
        "files": f"{_shown(folder)}/: summary.json, loss.png, train.log",
    }
    return "\n".join(f"{name:<16} {value}" for name, value in rows.items())


def mean_time(text: str, last: int) -> float | None:
    """Milliseconds of an iteration: the mean of the lines up to iteration `last`, the first third left out."""
    lines = [line for line in run_log.training(text) if last // 3 < line.iteration <= last]
    times = [line.milliseconds for line in lines if line.milliseconds]
    return sum(times) / len(times) if times else None


def against_a_flush(options: argparse.Namespace, text: str, corpus_flags: list[str], device: str) -> str:
    """Train the same model with a flush for a few iterations, and say how long one takes with and without."""
    iterations = min(FLUSH_ITERATIONS, options.iterations)
    print(f"demo.py: {iterations} iterations with a flush, to compare", flush=True)
    command = training_command("pipedream-flush", iterations, corpus_flags, device)
    flush = mean_time(train(command, options.out / "flush.log", shown=False), iterations)
    ours = mean_time(text, iterations)
    if not flush or not ours:
        return "the log lacks the times"
    times = f"{ours:.0f} ms an iteration, {flush:.0f} with a flush (pipedream-flush, {flush / ours - 1:+.0%})"
    return f"{times}; the stages' processes share the cores of this machine"


def draw(path: Path, losses: Losses, summary: dict) -> None:
    """The training loss over the iterations, the validation loss marked at their end, as a PNG picture."""
    figure = new_figure(7, 4.2)
    axes = figure.add_subplot()
    axes.plot(losses.steps, losses.training, color="#1f5fa8", linewidth=1.8, label="training loss")
    end, label = (summary["iterations"], losses.validation), f"validation loss {losses.validation:.2f}"
    axes.plot(*end, "o", color="#d1495b", markersize=7, clip_on=False, zorder=3, label=label)
    sizes = f"{STAGES} stages, {MICROBATCHES} microbatches"
    axes.set_title(f"GPT of 3.4 million parameters: {summary['schedule']}, {sizes}", fontsize=11)
    axes.set(xlabel="iteration", ylabel="loss (nats per token)", xlim=(0, summary["iterations"]))
    axes.grid(linewidth=0.5, alpha=0.4)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    write_figure(path, figure)


def parse_options(argv: list[str] | None, prog: str = "demo.py") -> argparse.Namespace:
    parser = Parser(prog, description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--schedule", choices=SCHEDULE_NAMES, default="2bw", help="default: %(default)s")
    parser.add_argument("--iterations", type=int, default=250, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder, default: out/demo")
    options = parser.parse_args(argv)
    if options.iterations < 1:
        parser.error(f"--iterations {options.iterations}: it must be at least 1")
    return options


def _empty(folder: Path) -> None:
    """Make the folder, without the results of an earlier run."""
    with file_errors(f"--out {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("summary.json", "loss.png", "train.log", "flush.log"):
            (folder / name).unlink(missing_ok=True)


def _shown(path: Path) -> str:
    """A path as a person in this folder would type it."""
    path = path.absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def run(options: argparse.Namespace) -> None:
    """The whole demo. Raises UserError."""
    _empty(options.out)
    device = pick_device()
    processes = f"{STAGES} stages on {STAGES} processes ({device})"
    print(f"demo.py: {options.schedule}, {processes}, {options.iterations} iterations", flush=True)
    corpus_flags = build_corpus().flags()
    command = training_command(options.schedule, options.iterations, corpus_flags, device)
    begun = time.monotonic()
    text = train(command, options.out / "train.log")
    losses = parse_log(text)
    summary = summarize(losses, options.schedule, options.iterations, time.monotonic() - begun)
    draw(options.out / "loss.png", losses, summary)
    write_json(options.out / "summary.json", summary, indent=2)
    rows = table(summary, log_interval(options.iterations), options.out)
    if options.schedule == "2bw":
        rows += f"\n{'against a flush':<16} {against_a_flush(options, text, corpus_flags, device)}"
    print("\n" + rows)


def main(argv: list[str] | None = None, prog: str = "demo.py") -> int:
    """The exit code: 0, 1 if training failed, 2 for a wrong option, 130 if interrupted."""
    options = parse_options(argv, prog)
    return run_program(prog, lambda: run(options))
