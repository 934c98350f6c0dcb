"""The flags of this project: their names, their values, and what they do not go together with.

Invariant: without torch and Megatron, so that they can be read before either is imported.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from megatron_2bw import sizes
from megatron_2bw.flags import correction
from megatron_2bw.flags.environment import exchange
from megatron_2bw.flags.rule import Args, Rule, line, task, value
from megatron_2bw.schedules import SCHEDULE_NAMES, SCHEDULES

_HELP = {
    "--pipeline-schedule": "order of forwards, backwards and weight updates. megatron: Megatron's own, untouched; "
    "1f1b: pipedream-flush; " + "; ".join(f"{schedule.name}: {schedule.summary}" for schedule in SCHEDULES.values()),
    "--device": "where to compute; auto: on GPUs if there are any, else on the CPU over gloo",
    "--two-bw-exchange": "transport between pipeline stages; auto: that of --distributed-backend; gloo stages GPU "
    "tensors through the host",
    "--two-bw-gradient-slots": "gradient buffers of 2bw; with 2 a batch accumulates while the one before is reduced "
    "and applied, with 1 it waits for that and saves their memory",
    "--two-bw-extra-warmup": "more forwards that the stages of 2bw run ahead, for each boundary between stages, first "
    "to last, or one number for all: 1 hides messages that take up to half of a microbatch's time (slow links between "
    "servers), 2 up to all of it; each costs the activations of a microbatch on the stages before it",
    "--two-bw-sync-iterations": "the first N iterations of 2bw (or a share of all, such as 20%%), in which the weights "
    "change most, run without gradient delay, with a flush; the run then continues without flushes",
    "--two-bw-correction": "against the gradient delay of 2bw: a batch computes with weights ahead of W(j), so its "
    "gradients are taken near the weights that they change; evaluation and checkpoints have the true W(j). auto: the "
    "recommended setting, with --adam-beta1 0.95 if that is not given; extrapolate: by the next two flags",
    "--two-bw-correction-factor": "of --two-bw-correction extrapolate: so many times the last update, 0 to 2; a number "
    "or a schedule over the run, FIRST:cosine:LAST or FIRST:linear:LAST",
    "--two-bw-correction-gradient": "of --two-bw-correction extrapolate: so many times the part of the last update "
    "that its last gradient alone contributed (with Adam and SGD), 0 to 10",
    "--gpipe-round": "microbatches that gpipe admits at a time: a batch runs in rounds of N, each all forwards, then "
    "all backwards, with the activations of N microbatches; default: the whole batch in one round",
    "--sft-data": "--data-path holds conversations, of scripts/preprocess_data.py --task sft: a sample is one of them, "
    "cut or padded to --seq-length, and only its targets count in the loss",
    "--two-bw-trace": "record when every action of every stage ran and how long it waited: DIR/trace.json for "
    "Perfetto, DIR/timeline.png and .html",
    "--verbose": "print all lines of Megatron and torch, also those that say nothing about this run, and the arguments",
}


def schedule_name(text: str) -> str:
    """A schedule's name as typed: 2BW is 2bw, 1f1b is pipedream-flush."""
    return {"1f1b": "pipedream-flush"}.get(text.lower(), text.lower())


def extra_warmup(text: str) -> tuple[int, ...]:
    """The value of --two-bw-extra-warmup: whole numbers, none of them negative, with commas between."""
    if not all(word.isdecimal() for word in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text}: must be whole numbers of 0 or more, with commas between")
    return tuple(int(word) for word in text.split(","))


def whole(least: int, most: float = math.inf) -> Callable[[str], int]:
    """A parser of a flag's value: a whole number from `least` to `most`."""
    bounds = f"of {least} or more" if most == math.inf else f"from {least} to {most}"

    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text}: must be a whole number {bounds}")
        return int(text)

    return parse


def whole_or_share(text: str) -> int | str:
    """The value of --two-bw-sync-iterations: a whole number, or a share of the run's iterations such as `20%`."""
    number = text.removesuffix("%")
    if not number.isdecimal() or (number != text and int(number) > 100):
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number of 0 or more, or a share such as 20%")
    return int(text) if number == text else text


def sync_iterations(args: Args) -> int:
    """--two-bw-sync-iterations as a number; a share is rounded down."""
    given = args.two_bw_sync_iterations
    return given if isinstance(given, int) else int(given[:-1]) * _iterations(args)[0] // 100


def _iterations(args: Args) -> tuple[int, str]:
    """The iterations of the run, and the flags that give them."""
    if args.train_iters:
        return args.train_iters, "--train-iters"
    batch = args.global_batch_size or args.micro_batch_size or 1
    return (args.train_samples or 0) // batch, "--train-samples / --global-batch-size"


WARMUP = 100  # iterations; with fewer the gap to vanilla grew fast at a rate of 1e-3 (docs/convergence.md)
LOW_RATE = 1e-4  # up to it plain 2BW is enough
SHORT_RUN = 200  # iterations


def short_warmup(args: Args) -> str | None:
    """A line for a run of 2bw whose rate rises too fast for the delay, or None. For arguments that Megatron validated.

    Only runs from random weights count, and not those of a few iterations, whose loss says little.
    """
    (iterations, _), batch = _iterations(args), args.global_batch_size
    starts = args.load is None and args.pretrained_checkpoint is None
    if args.pipeline_schedule != "2bw" or (args.lr or 0) <= LOW_RATE or iterations < SHORT_RUN or not starts:
        return None
    given = f"--lr-warmup-iters {args.lr_warmup_iters}"
    warmup = args.lr_warmup_iters or args.lr_warmup_samples / batch
    if args.lr_warmup_fraction is not None:
        given = f"--lr-warmup-fraction {args.lr_warmup_fraction:g}"
        warmup = args.lr_warmup_fraction * (args.lr_decay_iters or (args.lr_decay_samples or 0) / batch or iterations)
    elif args.lr_warmup_samples:
        given = f"--lr-warmup-samples {args.lr_warmup_samples}"
    if max(warmup, sync_iterations(args)) >= WARMUP:
        return None
    return (
        f"WARNING: {given}: with fewer than {WARMUP} iterations of warm-up the delay of 2bw raises the loss at high "
        f"learning rates, also with --two-bw-correction auto. Give --lr-warmup-iters {WARMUP} or more "
        "(docs/convergence.md)"
    )


def add_flags(parser: argparse.ArgumentParser, device: bool = True) -> argparse.ArgumentParser:
    """Add this project's flags to a parser, with or without the choice of the device."""
    group = parser.add_argument_group("pipeline schedule (megatron_2bw)")

    def add(flag: str, **options) -> None:
        group.add_argument(flag, help=_HELP[flag], **options)

    add("--pipeline-schedule", type=schedule_name, choices=SCHEDULE_NAMES, default="megatron")
    if device:
        add("--device", choices=("auto", "cpu", "cuda"), default="auto")
        add("--verbose", action="store_true")
    add("--two-bw-exchange", choices=("auto", "nccl", "gloo"), default="auto")
    add("--two-bw-gradient-slots", type=int, choices=(1, 2), default=2)
    add("--two-bw-extra-warmup", type=extra_warmup, default=(), metavar="K[,K...]")
    add("--two-bw-sync-iterations", type=whole_or_share, default=0, metavar="N")
    add("--two-bw-correction", choices=("none", "auto", "extrapolate"), default="none")
    add("--two-bw-correction-factor", type=correction.factor, default="1", metavar="FACTOR")
    add("--two-bw-correction-gradient", type=float, default=0.0, metavar="TIMES")
    add("--gpipe-round", type=whole(1), metavar="N")
    add("--sft-data", action="store_true")
    add("--two-bw-trace", type=Path, metavar="DIR")
    return parser


def _correction_for_nothing(args: Args) -> str | None:
    """--two-bw-sync-iterations must leave iterations for --two-bw-correction."""
    iterations, flag = _iterations(args)
    if args.two_bw_correction == "none" or not iterations or sync_iterations(args) < iterations:
        return None
    return (
        f"--two-bw-correction {args.two_bw_correction} has no effect: --two-bw-sync-iterations "
        f"{args.two_bw_sync_iterations} is not below {flag} {iterations}"
    )


def _waits_for_timers(args: Args) -> bool:
    # The timers wait for the GPU, so receives are posted when they are asked for; then stages wait for each other.
    return max(args.two_bw_extra_warmup, default=0) > 1 and args.timing_log_level >= 2 and exchange(args) == "nccl"


def _not_megatron(flag: str, default: object) -> Rule:
    text = f"{flag} has no effect with --pipeline-schedule megatron: leave it out"
    return line(text, lambda a: a.pipeline_schedule == "megatron" and value(a, flag) != default)


def _only_extrapolate(flag: str, default: object) -> Rule:
    text = f"{flag} has no effect without --two-bw-correction extrapolate: leave it out"
    return line(text, lambda a: a.two_bw_correction != "extrapolate" and value(a, flag) != default)


# A sample is one conversation, since Megatron's fused attention reads no mask that separates several; Megatron would
# read tokens of 16 bits, by the size of the vocabulary, and indices that are not made.
_NOT_OF_CONVERSATIONS = (
    "--mock-data --fim-data --eod-mask-loss --per-split-data-args-path --per-dataset-sequences-path "
    "--dataloader-fast-cache-load --dataloader-defer-npy-index-mmap --reset-attention-mask --reset-position-ids"
)


def _of_text(args: Args) -> str | None:
    """--sft-data is for a GPT, and not with flags of plain text."""
    if args.sft_data and task(args) == "bert":
        return "--sft-data is a flag of pretrain_gpt_2bw.py: leave it out"
    for flag in _NOT_OF_CONVERSATIONS.split() if args.sft_data else ():
        if value(args, flag):
            return f"{flag} does not work with --sft-data: leave it out"
    return None


OWN: tuple[Rule | sizes.Check, ...] = (
    line(
        "--two-bw-exchange nccl needs --distributed-backend nccl",
        lambda a: a.two_bw_exchange == "nccl" and a.distributed_backend == "gloo",
    ),
    _not_megatron("--two-bw-exchange", "auto"),
    _not_megatron("--two-bw-trace", None),
    sizes.SLOTS,
    sizes.only("2bw", "--two-bw-sync-iterations", 0),
    sizes.EXTRAPOLATES,
    _only_extrapolate("--two-bw-correction-factor", "1"),
    _only_extrapolate("--two-bw-correction-gradient", 0),
    line(
        "--two-bw-correction-gradient {given} must be between 0 and 10",
        lambda a: not 0 <= a.two_bw_correction_gradient <= 10,
    ),
    line(
        "--two-bw-correction-gradient has no effect with --muon-scalar-optimizer lion: leave it out",
        lambda a: a.two_bw_correction_gradient and "muon" in a.optimizer and a.muon_scalar_optimizer == "lion",
    ),
    _correction_for_nothing,
    _of_text,
    sizes.extra_warmup,
    sizes.ROUND,
    sizes.gpipe_round,
    line(
        "--two-bw-extra-warmup of 2 or more does not work with --timing-log-level 2 on NCCL: use level 1 or 0",
        _waits_for_timers,
    ),
)
