"""What the flags of this project do not go together with.

Invariant: a rule reads the arguments, without torch and Megatron; its line names the
flag and says what to do. Those that compare no numbers are in combinations.yaml.
"""

import argparse
from collections.abc import Iterator

from megatron_2bw.base.command_line import table_of
from megatron_2bw.run.flags.environment import exchange
from megatron_2bw.run.flags.project_flags import add_flags
from megatron_2bw.run.flags.resolve import batch_sizes, obstacle, replica
from megatron_2bw.run.flags.rule import Args, asks, have, installed, value

_TABLES = table_of(__file__)
_DEFAULTS = add_flags(argparse.ArgumentParser()).parse_args([])
_APEX_SOFTMAX = "scaled_upper_triang_masked_softmax_cuda"


def mistake(args: Args) -> str | None:
    """The line of the first own flag that the arguments do not go together with, or
    None."""
    return next(_mistakes(args), None)


def _mistakes(args: Args) -> Iterator[str]:
    for line, settings in _TABLES["mistakes"].items():
        if have(settings, args):
            yield line
    for need, flags in _TABLES["needs"].items():
        for flag in flags.split():
            if value(args, flag) != value(_DEFAULTS, flag) and not asks(args, need):
                yield f"{flag} has no effect without {need}: leave it out"
    if args.sft_data:
        for flag in _TABLES["not of conversations"]:
            if value(args, flag):
                yield f"{flag} does not work with --sft-data: leave it out"
    if args.sft_packed:
        yield from _mistakes_of_packed(args)
    correction = args.two_bw_correction
    if correction.startswith("predict") and args.pipeline_schedule == "2bw":
        # a resumed run may have passed small batches
        sizes = batch_sizes(args)[-1:] if args.load else batch_sizes(args)
        if why := obstacle(args, sizes):
            yield f"--two-bw-correction {correction}: {why}"
    yield from _mistakes_of_warmup(args)
    if replica(args):  # else Megatron reports it
        yield from _mistakes_of_batches(args)


def _mistakes_of_packed(args: Args) -> Iterator[str]:
    if args.transformer_impl != "local" and installed("transformer_engine"):
        if args.micro_batch_size != 1:
            yield (
                "--sft-packed with Transformer Engine needs --micro-batch-size 1: pack "
                "more by a longer --seq-length"
            )
    elif args.masked_softmax_fusion and installed(_APEX_SOFTMAX):
        yield (
            "--sft-packed needs --no-masked-softmax-fusion, since Apex's softmax "
            "reads no mask: add it"
        )


def _mistakes_of_warmup(args: Args) -> Iterator[str]:
    stages = args.pipeline_model_parallel_size
    extra = args.two_bw_extra_warmup
    if len(extra) not in (0, 1, stages - 1) or (extra and stages == 1):
        yield (
            f"--two-bw-extra-warmup {','.join(map(str, extra))}: give one number or "
            f"{stages - 1}; with one stage leave it out"
        )
    # The timers wait for the GPU, so receives are posted when they are asked for; then
    # stages wait for each other.
    timed = args.timing_log_level >= 2 and exchange(args) == "nccl"
    if timed and max(extra, default=0) > 1:
        yield (
            "--two-bw-extra-warmup of 2 or more does not work with "
            "--timing-log-level 2 on NCCL: use level 1 or 0"
        )


def _mistakes_of_batches(args: Args) -> Iterator[str]:
    """The sizes of a batch schedule, and --gpipe-round, must fit the batch."""
    samples = replica(args)  # of one microbatch
    sizes = batch_sizes(args)
    if sizes != sorted(sizes):
        yield (
            "--step-batch-size-schedule: Megatron ends a run at a smaller batch; "
            "give steps whose sizes increase"
        )
    # a resumed run may have passed small batches
    if args.step_batch_size_schedule and not args.load:
        for size in sizes:
            if size % samples:
                yield (
                    f"--step-batch-size-schedule: a batch of {size} is no multiple of "
                    f"a microbatch, {samples} samples"
                )
    microbatches = sizes[0] // samples
    if args.gpipe_round and args.gpipe_round > microbatches:
        yield (
            f"--gpipe-round {args.gpipe_round} is more than the {microbatches} "
            "microbatches of a pipeline's batch"
        )
