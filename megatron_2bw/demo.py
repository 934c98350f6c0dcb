"""Trains a small GPT with two pipeline stages for about two minutes and shows that it learns.

    megatron-2bw demo [--schedule NAME] [--iterations N] [--out DIR]

Prints the run's log and writes it to DIR/train.log; the losses are read from it. Invariant: summary.json and
loss.png in DIR are those of a run that ended well, and each of them is whole or absent.
"""

from __future__ import annotations

import argparse
import time
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
                print(line, end="", file=file, flush=True)
                if shown:
                    print(line, end="", flush=True)
        code = process.wait()
    finally:
        stop_tree(process, 5)
    text = log.read_text()
    if code:
        raise UserError(f"training failed with exit code {code}: {run_log.cause(text)} (log: {log})")
    return text


def losses(text: str) -> list[tuple[float, float]]:
    """(iteration, loss): a line's loss stands in the middle of the iterations that it is the mean of (run_log)."""
    found, first = [], 1
    for line in run_log.training(text):
        if line.loss is not None:
            found.append(((first + line.iteration) / 2, line.loss))
        first = line.iteration + 1 if line.iteration > 1 else 1
    return found


def summarize(text: str, schedule: str, iterations: int, seconds: float) -> dict:
    """What summary.json holds. Raises UserError if the log gave no losses."""
    training, validations = losses(text), [line.loss for line in run_log.validations(text)]
    if not training or not validations:
        raise UserError("training ended, but its log lacks the losses")
    return {
        "schedule": schedule,
        "stages": STAGES,
        "microbatches": MICROBATCHES,
        "iterations": iterations,
        "first_loss": training[0][1],
        "last_loss": training[-1][1],
        "validation_loss": validations[-1],
        "seconds": round(seconds, 1),
    }


def mean_time(text: str, last: int) -> float:
    """Milliseconds of an iteration: the mean of the lines up to iteration `last`, the first third left out."""
    lines = [line for line in run_log.training(text) if last // 3 < line.iteration <= last]
    times = [line.milliseconds for line in lines if line.milliseconds]
    return sum(times) / len(times)


def draw(path: Path, training: list[tuple[float, float]], summary: dict) -> None:
    """The training loss over the iterations, the validation loss marked at their end, as a PNG picture."""
    figure = new_figure(7, 4.2)
    axes = figure.add_subplot()
    axes.plot(*zip(*training), color="#1f5fa8", linewidth=1.8, label="training loss")
    label = f"validation loss {summary['validation_loss']:.2f}"
    axes.plot(summary["iterations"], summary["validation_loss"], "o", color="#d1495b", clip_on=False, label=label)
    sizes = f"{STAGES} stages, {MICROBATCHES} microbatches"
    axes.set_title(f"GPT of 3.4 million parameters: {summary['schedule']}, {sizes}", fontsize=11)
    axes.set(xlabel="iteration", ylabel="loss (nats per token)", xlim=(0, summary["iterations"]))
    axes.grid(linewidth=0.5, alpha=0.4)
    axes.legend(frameon=False)
    write_figure(path, figure)


def run(options: argparse.Namespace) -> None:
    """The whole demo. Raises UserError."""
    with file_errors(f"--out {options.out}"):
        options.out.mkdir(parents=True, exist_ok=True)
        for name in ("summary.json", "loss.png", "train.log", "flush.log"):
            (options.out / name).unlink(missing_ok=True)
    schedule, iterations, device = options.schedule, options.iterations, pick_device()
    print(f"demo: {schedule}, {STAGES} stages on {STAGES} processes ({device}), {iterations} iterations", flush=True)
    flags, begun = build_corpus().flags(), time.monotonic()
    text = train(training_command(schedule, iterations, flags, device), options.out / "train.log")
    summary = summarize(text, schedule, iterations, time.monotonic() - begun)
    draw(options.out / "loss.png", losses(text), summary)
    write_json(options.out / "summary.json", summary, indent=2)
    first, last = summary["first_loss"], summary["last_loss"]
    print(f"\nloss             {first:.3f}, after {iterations} iterations {last:.3f} ({last / first - 1:+.0%})")
    print(f"validation loss  {summary['validation_loss']:.3f}")
    print(f"files            {options.out}/: summary.json, loss.png, train.log", flush=True)
    if schedule == "2bw":
        few = min(FLUSH_ITERATIONS, iterations)
        command = training_command("pipedream-flush", few, flags, device)
        flush, ours = mean_time(train(command, options.out / "flush.log", shown=False), few), mean_time(text, few)
        times = f"{ours:.0f} ms an iteration, {flush:.0f} with a flush (pipedream-flush, {flush / ours - 1:+.0%})"
        print(f"against a flush  {times}; the stages share the cores of this machine")


def main(argv: list[str] | None = None, prog: str = "demo.py") -> int:
    """The exit code: 0, 1 if training failed, 2 for a wrong option, 130 if interrupted."""
    parser = Parser(prog, description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--schedule", choices=SCHEDULE_NAMES, default="2bw", help="default: %(default)s")
    parser.add_argument("--iterations", type=int, default=250, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder, default: out/demo")
    options = parser.parse_args(argv)
    if options.iterations < 1:
        parser.error(f"--iterations {options.iterations}: it must be at least 1")
    return run_program(prog, lambda: run(options))
