"""Trains a small GPT with two pipeline stages for about two minutes and shows that it
learns.

    megatron-2bw demo [--schedule NAME] [--iterations N] [--out DIR]

Invariant: loss.png in DIR is that of a run that ended well.
"""

import argparse
from pathlib import Path

from megatron_2bw.base import run_log
from megatron_2bw.base.errors import Parser, file_errors, run_program, whole_number
from megatron_2bw.base.files import new_figure, write_figure
from megatron_2bw.run.flags.plain_torch import PLAIN_TORCH
from megatron_2bw.run.start.torchrun import log_interval, run_ranks, torchrun
from megatron_2bw.schedules import SCHEDULE_NAMES
from megatron_2bw.tools.data.corpus import build_corpus

STAGES = 2
MICROBATCHES = 4
MICRO_BATCH_SIZE = 4
SEQUENCE = 128

# 3.4 million parameters. The last stage also multiplies with the vocabulary, which
# costs as much as two layers, so three of the four layers on the first stage make the
# stages about equal.
MODEL = """
    --num-layers 4 --decoder-first-pipeline-num-layers 3 --hidden-size 192 --num-attention-heads 6
    --position-embedding-type rope --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
""".split()

# Gradients that are one update late leave less room for the learning rate: at 3e-3 2BW
# learns more slowly.
OPTIMIZER = (
    "--lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --adam-beta2 0.95 --clip-grad 1.0"
).split()
WARM_UP = 30

# A tenth of the files for validation. With fewer, tables of character sets, which are
# easy, make up most of it.
DATA = "--split 90,10,0 --eval-iters 10".split()


def training_command(
    schedule: str, iterations: int, corpus_flags: list[str], device: str, out: Path
) -> list[str]:
    """The command that trains: torchrun, the entry script, Megatron's flags."""
    # one validation, after the last iteration
    sizes = f"""
        --pipeline-schedule {schedule} --device {device}
        --pipeline-model-parallel-size {STAGES} --micro-batch-size {MICRO_BATCH_SIZE}
        --global-batch-size {MICRO_BATCH_SIZE * MICROBATCHES} --seq-length {SEQUENCE}
        --max-position-embeddings {SEQUENCE} --train-iters {iterations} --log-interval {log_interval(iterations)}
        --lr-warmup-iters {min(WARM_UP, iterations // 2)} --eval-interval {iterations + 1}
    """.split()
    return [
        *torchrun(STAGES),
        *sizes,
        *MODEL,
        *PLAIN_TORCH,
        *OPTIMIZER,
        *DATA,
        *corpus_flags,
        f"--tensorboard-dir={out}",
    ]


def pick_device() -> str:
    """Two stages on one GPU gain nothing over the CPU here, and NCCL refuses it."""
    import torch

    return "cuda" if torch.cuda.device_count() >= STAGES else "cpu"


def draw(
    path: Path, schedule: str, training: list[tuple[int, float]], validation: float
) -> None:
    """The training loss over the iterations, the validation loss marked at their end,
    as a PNG picture."""
    figure = new_figure(7, 4.2)
    axes = figure.add_subplot()
    iterations, losses = zip(*training)
    axes.plot(iterations, losses, color="#1f5fa8", linewidth=1.8, label="training loss")
    axes.plot(
        iterations[-1],
        validation,
        "o",
        color="#d1495b",
        clip_on=False,
        label=f"validation loss {validation:.2f}",
    )
    sizes = f"{STAGES} stages, {MICROBATCHES} microbatches"
    axes.set_title(f"GPT of 3.4 million parameters: {schedule}, {sizes}", fontsize=11)
    axes.set(
        xlabel="iteration", ylabel="loss (nats per token)", xlim=(0, iterations[-1])
    )
    axes.grid(linewidth=0.5, alpha=0.4)
    axes.legend(frameon=False)
    write_figure(path, figure)


def run_demo(options: argparse.Namespace, prog: str) -> int:
    """The whole demo; its status. Raises UserError."""
    out = options.out
    device = pick_device()
    log = out / "output" / f"rank-{STAGES - 1}.txt"  # the last stage prints the losses
    with file_errors(f"--out {out}"):
        out.mkdir(parents=True, exist_ok=True)
        for old in (out / "loss.png", log):
            old.unlink(missing_ok=True)
    print(
        f"demo: {options.schedule}, {STAGES} stages on {STAGES} processes ({device}), "
        f"{options.iterations} iterations",
        flush=True,
    )
    corpus = build_corpus().flags()
    status = run_ranks(
        prog,
        training_command(options.schedule, options.iterations, corpus, device, out),
    )
    if status:
        return status
    text = log.read_text()
    training = []
    for line in run_log.training(text):
        if line.loss is not None:
            training.append((line.iteration, line.loss))
    *_, validation = run_log.validations(text)
    draw(out / "loss.png", options.schedule, training, validation.loss)
    first = training[0][1]
    last = training[-1][1]
    print(
        f"\nloss             {first:.3f}, after {options.iterations} iterations "
        f"{last:.3f} ({last / first - 1:+.0%})"
    )
    print(f"validation loss  {validation.loss:.3f}")
    print(f"files            {out}/: loss.png, {log.relative_to(out)}")
    return 0


def main(argv: list[str] | None = None, prog: str = "megatron-2bw demo") -> int:
    """The exit code: 0, that of the first rank that failed, 2 for a wrong option, 130
    if interrupted."""
    parser = Parser(prog, description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--schedule", choices=SCHEDULE_NAMES, default="2bw", help="default: %(default)s"
    )
    parser.add_argument(
        "--iterations", type=whole_number(1), default=250, help="default: %(default)s"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out/demo"), help="folder, default: out/demo"
    )
    options = parser.parse_args(argv)
    return run_program(prog, lambda: run_demo(options, prog))
