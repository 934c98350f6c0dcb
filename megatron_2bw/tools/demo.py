"""Trains a small GPT with two pipeline stages for about two minutes and shows that it
learns, and what its schedule gains over 1F1B.

    megatron-2bw demo [--schedule NAME] [--iterations N] [--out DIR]

Invariant: demo.png in DIR is that of a run that ended well.
"""

import argparse
import json
from pathlib import Path

from megatron_2bw.base import run_log
from megatron_2bw.base.command_line import parser_of
from megatron_2bw.base.errors import file_errors, run_program
from megatron_2bw.base.files import new_figure, write_figure
from megatron_2bw.run.flags.plain_torch import PLAIN_TORCH
from megatron_2bw.run.start.torchrun import log_interval, run_ranks, torchrun
from megatron_2bw.schedules import SCHEDULE_NAMES, Shape
from megatron_2bw.tools.data.corpus import build_corpus
from megatron_2bw.tools.timelines.measured import as_1f1b, last_batches
from megatron_2bw.tools.timelines.picture import WIDTH, draw_rows
from megatron_2bw.tools.timelines.simulator import Events, scaled
from megatron_2bw.tools.timelines.trace import timed
from megatron_2bw.tools.timelines.waits import cut

STAGES = 2
MICROBATCHES = 4
MEGATRON = "megatron"  # this schedule of Megatron's own has no trace
PICTURE = "demo.png"
SHOWN = 3  # batches in the picture

# 3.4 million parameters. The last stage also multiplies with the vocabulary, which
# costs as much as two layers, so three of the four layers on the first stage make the
# stages about equal.
MODEL = """
    --num-layers 4 --decoder-first-pipeline-num-layers 3 --hidden-size 192 --num-attention-heads 6
    --position-embedding-type rope --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --pipeline-model-parallel-size 2 --micro-batch-size 4 --global-batch-size 16
    --seq-length 128 --max-position-embeddings 128
""".split()

# Gradients that are one update late leave less room for the learning rate: at 3e-3 2BW
# learns more slowly.
OPTIMIZER = (
    "--lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-fraction 0.12 "
    "--adam-beta2 0.95 --clip-grad 1.0"
).split()

# A tenth of the files for validation. With fewer, tables of character sets, which are
# easy, make up most of it. One validation, after the last iteration.
DATA = "--split 90,10,0 --eval-iters 10 --eval-interval 1000000".split()


def training_command(
    options: argparse.Namespace, corpus_flags: list[str], device: str
) -> list[str]:
    """The command that trains: torchrun, the entry script, Megatron's flags."""
    iterations = options.iterations
    own = f"""
        --pipeline-schedule {options.schedule} --device {device}
        --train-iters {iterations} --log-interval {log_interval(iterations)}
    """.split()
    own.append(f"--tensorboard-dir={options.out}")
    if options.schedule != MEGATRON:
        own.append(f"--pipeline-trace={options.out}")
    return [
        *torchrun(STAGES),
        *own,
        *MODEL,
        *PLAIN_TORCH,
        *OPTIMIZER,
        *DATA,
        *corpus_flags,
    ]


def pick_device() -> str:
    """Two stages on one GPU gain nothing over the CPU here, and NCCL refuses it."""
    import torch

    return "cuda" if torch.cuda.device_count() >= STAGES else "cpu"


def recent(events: Events, iterations: int) -> tuple[float, float, Events]:
    """The mean time of half of the batches, and the time and the actions of SHOWN
    batches: the last ones before the very last, in which the pipeline drains."""
    half = iterations // 2
    begins = []
    for batches in (1, 1 + half, 1 + SHOWN):
        begins.append(last_batches(events, batches).begin)
    end, middle, begin = begins
    shown = []
    for event in cut(events, begin):
        # colours repeat after as many batches, and bars have room for two digits
        number = event.action.number % (SHOWN * MICROBATCHES)
        shown.append(event._replace(action=event.action._replace(number=number)))
    return (end - middle) / half, end - begin, shown


def draw(
    path: Path,
    timelines: dict[str, Events],
    until: float,
    training: dict[int, float],
    validation: float,
) -> None:
    """A PNG picture: the timelines on one axis, the training loss over the iterations,
    and the validation loss at their end."""
    figure = new_figure(WIDTH, 6)
    *rows, curve = figure.subplots(len(timelines) + 1, squeeze=False).flat
    for axis, (title, events) in zip(rows, timelines.items()):
        draw_rows(axis, events, Shape(STAGES, MICROBATCHES), until)
        axis.set_title(title, loc="left", fontsize=9)
        axis.set_xlabel(
            "time (ms); light: forward, dark: backward, colours: batches, lines: steps"
        )
    curve.plot(training.keys(), training.values(), label="training loss")
    label = f"validation loss {validation:.2f}"
    curve.plot(max(training), validation, "o", label=label)
    curve.set(xlabel="iteration", ylabel="loss (nats per token)")
    curve.grid(alpha=0.4)
    curve.legend()
    write_figure(path, figure)


def run_demo(options: argparse.Namespace, prog: str) -> int:
    """The whole demo; its status. Raises UserError."""
    out = options.out
    device = pick_device()
    log = out / "output" / "rank-1.txt"  # the last stage prints the losses
    with file_errors(f"--out {out}"):
        out.mkdir(parents=True, exist_ok=True)
        for old in (out / PICTURE, log):
            old.unlink(missing_ok=True)
    print(
        f"demo: {options.schedule}, {STAGES} stages on {STAGES} processes ({device}), "
        f"{options.iterations} iterations",
        flush=True,
    )
    corpus = build_corpus().flags()
    status = run_ranks(prog, training_command(options, corpus, device))
    if not status:
        tell(options, log.read_text())
        print(f"files            {out}/: {PICTURE}, {log.relative_to(out)}")
    return status


def tell(options: argparse.Namespace, log: str) -> None:
    """Print what a run has reached, and draw it."""
    iterations = options.iterations
    training = {line.iteration: line.loss for line in run_log.training(log)}
    *_, validation = run_log.validations(log)
    first = training[1]
    last = training[iterations]
    print(
        f"\nloss             {first:.3f}, after {iterations} iterations "
        f"{last:.3f} ({last / first - 1:+.0%})"
    )
    print(f"validation loss  {validation.loss:.3f}")
    timelines = {}
    until = 0.0
    if options.schedule != MEGATRON and iterations > SHOWN:
        trace = json.loads((options.out / "trace.json").read_text())
        events = scaled(timed(trace["traceEvents"]), 1e3)
        flush = as_1f1b(events, Shape(STAGES, MICROBATCHES, 0, iterations))
        own_time, own_shown, own = recent(events, iterations)
        flush_time, flush_shown, flush = recent(flush, iterations)
        timelines = {
            f"{options.schedule}, measured: {own_time:.0f} ms a batch": own,
            f"1F1B, simulated with these times: {flush_time:.0f} ms a batch": flush,
        }
        until = max(own_shown, flush_shown)
        print(
            f"speed            {flush_time / own_time:.2f} times as fast as 1F1B (simulated "
            f"with this run's times: {own_time:.0f} against {flush_time:.0f} ms a batch)"
        )
    draw(options.out / PICTURE, timelines, until, training, validation.loss)


def main(argv: list[str] | None = None, prog: str = "megatron-2bw demo") -> int:
    """The exit code: 0, that of the first rank that failed, 2 for a wrong option, 130
    if interrupted."""
    parser = parser_of(prog, __file__)
    parser.add_argument("--schedule", choices=SCHEDULE_NAMES, default="2bw")
    options = parser.parse_args(argv)
    return run_program(prog, lambda: run_demo(options, prog))
