"""The flags of this project: their names, their values, and what they do not go
together with.

Invariant: without torch and Megatron, so that they can be read before either is
imported.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator
from pathlib import Path

from megatron_2bw.base.errors import UserError, whole
from megatron_2bw.run.flags import correction_flags
from megatron_2bw.run.flags.environment import exchange
from megatron_2bw.run.flags.rule import Args, asks, installed, task, value
from megatron_2bw.schedules import SCHEDULE_NAMES, SCHEDULES, schedule_of


def schedule_name(text: str) -> str:
    """A schedule's name as typed: 2BW is 2bw, 1f1b is pipedream-flush."""
    return {"1f1b": "pipedream-flush"}.get(text.lower(), text.lower())


def extra_warmup(text: str) -> tuple[int, ...]:
    """The value of --two-bw-extra-warmup: whole numbers with commas between."""
    return tuple(map(whole(0), text.split(",")))


def whole_or_share(text: str) -> int | str:
    """The value of --two-bw-sync-iterations: a whole number, or a share of the run's
    iterations such as `20%`."""
    return f"{whole(0, 100)(text[:-1])}%" if text.endswith("%") else whole(0)(text)


def slots(text: str) -> int | str:
    """The value of --two-bw-gradient-slots."""
    return text if text == "shard" else whole(1)(text)


def use_rampup(args: Args) -> str | None:
    """Replace --rampup-batch-size, which Megatron 0.19 ignores, by the
    --step-batch-size-schedule of its sizes.

    Returns the line of the log, or None without the flag. Raises UserError for values
    that give no sizes.
    """
    if args.rampup_batch_size is None:
        return None
    if not (args.train_samples and args.global_batch_size and args.seq_length):
        raise UserError(
            "--rampup-batch-size needs --global-batch-size, --seq-length, and "
            "--train-samples: add them"
        )
    start, increment, samples = args.rampup_batch_size
    count = (args.global_batch_size - start) // max(increment, 1)
    if start < 1 or count < 1 or start + count * increment != args.global_batch_size:
        raise UserError(
            f"--rampup-batch-size {start} {increment} {samples}: no number of "
            "increments leads to --global-batch-size "
            f"{args.global_batch_size}: give other numbers"
        )
    steps = []
    for number in range(count + 1):
        first = math.ceil(number * samples / count)
        # Megatron divides by the length again
        steps.append(f"{first * args.seq_length}:{start + number * increment}")
    args.step_batch_size_schedule = " ".join(steps)
    args.eval_global_batch_size = args.eval_global_batch_size or args.global_batch_size
    args.global_batch_size = args.rampup_batch_size = None
    # as Megatron has noted it before
    args._is_global_batch_size_explicitly_specified = False
    return (
        f"> --rampup-batch-size {start} {increment} {samples}: "
        f'--step-batch-size-schedule "{" ".join(steps)}"'
    )


ADAPTER = "_adapter"  # the end of an adapter's name, after that of its layer
LORA_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
# iterations at most; the curvature is largest at the start, also of a finetuning
# (docs/convergence.md)
START = 500
LOW_RATE = 1e-4  # up to it plain 2BW is enough


def sync_iterations(args: Args, iterations: int) -> int:
    """--two-bw-sync-iterations as a number, in a run of so many iterations; a share is
    rounded down."""
    given = args.two_bw_sync_iterations
    if given is None:
        return min(START, iterations // 5) * (
            args.two_bw_correction == "auto" and (args.lr or 0) > LOW_RATE
        )
    return given if isinstance(given, int) else int(given[:-1]) * iterations // 100


def add_flags(
    parser: argparse.ArgumentParser, device: bool = True
) -> argparse.ArgumentParser:
    """Add this project's flags to a parser, with or without the choice of the
    device."""
    add = parser.add_argument_group(
        "pipeline schedule (megatron_2bw; docs/flags.md)"
    ).add_argument
    text = "; ".join(
        f"{schedule.name}: {schedule.summary}" for schedule in SCHEDULES.values()
    )
    text = f"megatron: Megatron's own; 1f1b: pipedream-flush; {text}"
    add(
        "--pipeline-schedule",
        type=schedule_name,
        choices=SCHEDULE_NAMES,
        default="megatron",
        help=text,
    )
    if device:
        add(
            "--device",
            choices=("auto", "cpu", "cuda"),
            default="auto",
            help="auto: GPUs if there are some, else CPU",
        )
        add(
            "--dry-run",
            action="store_true",
            help="check the flags as a host with GPUs would, and end",
        )
        add(
            "--verbose",
            action="store_true",
            help="print all lines of Megatron and torch, and the arguments",
        )
    text = (
        "transport between stages; auto: that of --distributed-backend; gloo stages "
        "GPU tensors through the host"
    )
    add(
        "--two-bw-exchange", choices=("auto", "nccl", "gloo"), default="auto", help=text
    )
    text = (
        "gradient buffers of 2bw; 1 saves memory, and waits for the step; shard: one "
        "and, with the distributed "
    )
    text += "optimizer, a shard; waits for the reduction"
    add(
        "--two-bw-gradient-slots",
        type=slots,
        choices=(1, 2, "shard"),
        default=2,
        help=text,
    )
    text = (
        "where 2bw keeps and steps the optimizer; host: main parameters and moments "
        "in host memory, by its cores"
    )
    add("--two-bw-optimizer", choices=("device", "host"), default="device", help=text)
    text = (
        "more forwards that the stages of 2bw run ahead, for slow links: for each "
        "boundary, or one number for all"
    )
    add(
        "--two-bw-extra-warmup",
        type=extra_warmup,
        default=(),
        metavar="K[,K...]",
        help=text,
    )
    text = (
        "the first N iterations of 2bw (or a share of all, such as 20%%) run without "
        "gradient delay, with a flush; "
    )
    text += (
        f"default with the correction auto: a fifth of the iterations, at most {START}"
    )
    add("--two-bw-sync-iterations", type=whole_or_share, metavar="N", help=text)
    text = (
        "only the first K microbatches of a batch of 2bw run on the older weights; "
        "the others wait for the newest "
    )
    text += (
        "(default: all are late; with the correction auto a quarter of the batch, "
        "one or two for each stage)"
    )
    add("--two-bw-late-microbatches", type=whole(0), metavar="K", help=text)
    text = (
        "against the gradient delay of 2bw; auto: the recommended setting; "
        "extrapolate: by the next two flags"
    )
    add(
        "--two-bw-correction",
        choices=("none", "auto", "extrapolate"),
        default="none",
        help=text,
    )
    add(
        "--two-bw-correction-factor",
        type=float,
        default=1.0,
        metavar="TIMES",
        help="x the last update, 0 to 2",
    )
    text = "so many times the last gradient's part of the last update, 0 to 10"
    add(
        "--two-bw-correction-gradient",
        type=float,
        default=0.0,
        metavar="TIMES",
        help=text,
    )
    add(
        "--gpipe-round",
        type=whole(1),
        metavar="N",
        help="microbatches at a time of gpipe (default: the whole batch)",
    )
    text = (
        "--data-path holds conversations (preprocess --task sft); only their targets "
        "count in the loss"
    )
    add("--sft-data", action="store_true", help=text)
    add(
        "--sft-packed",
        action="store_true",
        help="a sample holds as many whole conversations as fit, each by itself",
    )
    add(
        "--two-bw-trace",
        type=Path,
        metavar="DIR",
        help="record when every action of every stage ran and waited",
    )
    add(
        "--lora-rank",
        type=whole(1),
        metavar="N",
        help="train adapters of this rank, and save these alone",
    )
    add(
        "--lora-alpha",
        type=float,
        metavar="A",
        help="adapters count A / N times (default: A is twice the rank)",
    )
    text = "layers with adapters (default: all four)"
    add(
        "--lora-targets",
        nargs="+",
        choices=LORA_TARGETS,
        default=[*LORA_TARGETS],
        help=text,
    )
    text = "the checkpoint that holds the frozen model, at any parallel sizes"
    add("--lora-base", type=os.path.abspath, metavar="CKPT", help=text)
    return parser


_SCHEDULES = f"--pipeline-schedule {' '.join(SCHEDULES)}"
# A flag must have its default without another flag, with one of the values.
_NEEDS = {
    "--two-bw-exchange": ("auto", _SCHEDULES),
    "--two-bw-trace": (None, _SCHEDULES),
    "--two-bw-gradient-slots": (2, "--pipeline-schedule 2bw"),
    "--two-bw-optimizer": ("device", "--pipeline-schedule 2bw"),
    "--two-bw-extra-warmup": ((), "--pipeline-schedule 2bw"),
    "--two-bw-sync-iterations": (None, "--pipeline-schedule 2bw"),
    "--two-bw-late-microbatches": (None, "--pipeline-schedule 2bw"),
    "--two-bw-correction": ("none", "--pipeline-schedule 2bw"),
    "--two-bw-correction-factor": (1, "--two-bw-correction extrapolate"),
    "--two-bw-correction-gradient": (0, "--two-bw-correction extrapolate"),
    "--gpipe-round": (None, "--pipeline-schedule gpipe"),
    "--sft-packed": (False, "--sft-data"),
    "--lora-alpha": (None, "--lora-rank"),
    "--lora-targets": ([*LORA_TARGETS], "--lora-rank"),
    "--lora-base": (None, "--lora-rank"),
}
# Megatron would read tokens of 16 bits, by the size of the vocabulary, and indices that
# are not made.
_NOT_OF_CONVERSATIONS = (
    "--mock-data --fim-data --eod-mask-loss --per-split-data-args-path "
    "--per-dataset-sequences-path "
    "--dataloader-fast-cache-load --dataloader-defer-npy-index-mmap "
    "--reset-attention-mask --reset-position-ids"
)


def adopt(args: Args, saved: Args) -> None:
    """For --use-checkpoint-args: the adapters of a checkpoint's arguments."""
    if not args.lora_rank and getattr(saved, "lora_rank", None):
        vars(args).update(
            {
                name: value
                for name, value in vars(saved).items()
                if name.startswith("lora_")
            }
        )


def mistake(args: Args) -> str | None:
    """The line of the first own flag that the arguments do not go together with, or
    None."""
    return next(_mistakes(args), None)


def _mistakes(args: Args) -> Iterator[str]:
    if args.lr is None and not args.skip_train:
        yield "--lr is missing"  # Megatron has a TypeError without a flag's name
    for flag, (default, need) in _NEEDS.items():
        if value(args, flag) != default and not asks(args, need):
            yield f"{flag} has no effect without {need}: leave it out"
    if args.two_bw_optimizer == "host" and args.two_bw_gradient_slots != 2:
        yield (
            "--two-bw-gradient-slots has no effect with --two-bw-optimizer host, "
            "which has one slot: leave it out"
        )
    if args.two_bw_gradient_slots == "shard" and not args.use_distributed_optimizer:
        yield "--two-bw-gradient-slots shard needs --use-distributed-optimizer: add it, or use 2"
    for flag, most in (
        ("--two-bw-correction-factor", 2),
        ("--two-bw-correction-gradient", 10),
    ):
        if not 0 <= value(args, flag) <= most:
            yield f"{flag} {value(args, flag)} must be between 0 and {most}"
    if args.lora_rank and not task(args):
        yield "--lora-rank works in the entry scripts of a GPT and a BERT only: leave it out"
    if args.lora_rank and args.save and not args.lora_base:
        yield (
            "--lora-base is missing: --save keeps adapters only, so give the folder "
            "of the model's checkpoint"
        )
    if args.sft_data and task(args) != "gpt":
        yield "--sft-data works with a GPT only: leave it out"
    for flag in _NOT_OF_CONVERSATIONS.split() if args.sft_data else ():
        if value(args, flag):
            yield f"{flag} does not work with --sft-data: leave it out"
    if args.sft_packed:
        yield from _of_packed(args)
    yield from _of_the_batch(args)


def _of_packed(args: Args) -> Iterator[str]:
    engine = args.transformer_impl != "local" and installed("transformer_engine")
    if args.context_parallel_size > 1:
        yield "--sft-packed does not work with --context-parallel-size: leave it out"
    if engine and args.micro_batch_size != 1:
        yield (
            "--sft-packed with Transformer Engine needs --micro-batch-size 1: pack "
            "more by a longer --seq-length"
        )
    if (
        not engine
        and args.masked_softmax_fusion
        and installed("scaled_upper_triang_masked_softmax_cuda")
    ):
        yield (
            "--sft-packed needs --no-masked-softmax-fusion, since Apex's softmax "
            "reads no mask: add it"
        )


def _of_the_batch(args: Args) -> Iterator[str]:
    """2bw needs a microbatch for each stage, and more with --two-bw-extra-warmup;
    --gpipe-round must fit the batch."""
    stages, extra = args.pipeline_model_parallel_size, args.two_bw_extra_warmup
    if len(extra) not in (0, 1, stages - 1) or (extra and stages == 1):
        given = ",".join(map(str, extra))
        yield (
            f"--two-bw-extra-warmup {given}: give one number or {stages - 1}; with "
            "one stage leave it out"
        )
    # The timers wait for the GPU, so receives are posted when they are asked for; then
    # stages wait for each other.
    if (
        max(extra, default=0) > 1
        and args.timing_log_level >= 2
        and exchange(args) == "nccl"
    ):
        yield (
            "--two-bw-extra-warmup of 2 or more does not work with "
            "--timing-log-level 2 on NCCL: use level 1 or 0"
        )
    if not (replica := correction_flags.replica(args)):
        return  # Megatron says so
    sizes = correction_flags.batch_sizes(args)
    if sizes != sorted(sizes):
        yield (
            "--step-batch-size-schedule: Megatron ends a run at a smaller batch; "
            "give steps whose sizes increase"
        )
    # a resumed run may have passed small batches
    if args.step_batch_size_schedule and not args.load:
        for size in sizes:
            if size % replica:
                yield (
                    f"--step-batch-size-schedule: a batch of {size} is no multiple of "
                    f"a microbatch, {replica} samples"
                )
    size = sizes[0]
    schedule = schedule_of(
        args.pipeline_schedule,
        gradient_slots=args.two_bw_gradient_slots,
        extra_warmup=extra,
    )
    if (
        schedule is not None
        and (needed := schedule.min_microbatches(stages)) > size // replica
    ):
        flag = (
            "--step-batch-size-schedule, a batch of"
            if args.step_batch_size_schedule
            else "--global-batch-size"
        )
        yield (
            f"{flag} {size} gives each pipeline {size // replica} of the microbatches, but "
            f"--pipeline-schedule {schedule.name} needs {needed} with its stages "
            "and --two-bw-extra-warmup: "
            f"use {flag} {needed * replica} or more"
        )
    late = args.two_bw_late_microbatches
    if late is not None and late < (ahead := schedule.min_microbatches(stages) - 1):
        yield (
            f"--two-bw-late-microbatches {late}: stage 0 runs {ahead} microbatches "
            f"ahead; use {ahead} or more"
        )
    if args.gpipe_round and args.gpipe_round > size // replica:
        yield (
            f"--gpipe-round {args.gpipe_round} is more than the {size // replica} "
            "microbatches of a pipeline's batch"
        )
