"""--two-bw-correction: the working copy of the newest weights, on which a batch of 2bw
computes.

With 2BW the gradient of batch j + 1 changes W(j+1) and is taken one update earlier.
With a correction it is taken at the working copy

    W'(j) = W(j) + factor (W(j) - W(j-1)) + gradient D(j),

where D(j) is the last gradient's part of the update W(j) - W(j-1). For Adam D(j) is -(1
- beta1) rate g / (sqrt(v) + eps), without the 1 / (1 - beta1^t) of the first
iterations. The first term is the error feedback of arXiv 2606.30634; the second damps
the directions of high curvature, in which the delay oscillates (docs/convergence.md).

Invariant: without torch, as all flags; the values in `args` are strings and numbers,
which Megatron saves.
"""

from __future__ import annotations

from megatron_2bw.mcore.correction import Correction
from megatron_2bw.run.flags.rule import Args
from megatron_2bw.schedules import TwoBW

# Optimizers whose update is a running mean of gradients, and the decay of that mean.
DECAYS = {
    "adam": "adam_beta1",
    "sgd": "sgd_momentum",
    "muon": "muon_momentum",
    "soap": "adam_beta1",
}
# of `auto` if none is given: the first bears higher rates if all are late
BETA1, BETA1_OF_MEGATRON = 0.95, 0.9
# Validation losses above vanilla's in per cent, by tokens a batch: of plain 2BW, and
# with `auto` if all, half or a quarter of a batch is late; a small GPT at vanilla's
# best rate (docs/convergence.md).
GAPS = {
    512: (20.8, 1.0, -0.3, -0.4),
    2048: (33.2, 2.2, -0.7, -0.9),
    8192: (62.8, 6.3, -0.4, -1.5),
}
GAPS[32768] = (80.3, 14.5, 1.7, -0.1)  # the first two: one seed
# updates that `auto` looks ahead if some microbatches are late; it lowers the noise
# (docs/convergence.md)
AHEAD = 0.25
# below it `auto` adds the best factor of a gradient of pure noise, the momentum
LEAST_MOMENTUM = 0.8


def correction(args: Args, microbatches: int) -> Correction | None:
    """What --two-bw-correction asks for in a batch of so many microbatches; None
    without a correction."""
    if args.two_bw_correction == "none":
        return None
    if args.two_bw_correction == "auto":
        return recommended(args, microbatches)
    return Correction(args.two_bw_correction_factor, args.two_bw_correction_gradient)


def recommended(args: Args, microbatches: int) -> Correction:
    """The setting of `auto` for a batch of so many microbatches
    (docs/convergence.md)."""
    decay = getattr(args, DECAYS.get(args.optimizer, ""), LEAST_MOMENTUM)
    # no optimizer has a gradient's part
    unknown = args.optimizer == "muon" and args.muon_scalar_optimizer == "lion"
    late = late_of(args, microbatches)
    share = late / microbatches
    if decay < LEAST_MOMENTUM:
        return Correction(decay * share)
    if late == microbatches:
        return Correction(1.5, 0.0 if unknown else 2.0)
    return Correction(share + AHEAD, 0.0 if unknown else share + AHEAD)


def replica(args: Args) -> int:
    """Samples of one microbatch on all pipelines; 0 for sizes that Megatron refuses."""
    ranks = (
        args.pipeline_model_parallel_size
        * args.tensor_model_parallel_size
        * args.context_parallel_size
    )
    return (args.micro_batch_size or 0) * (args.world_size // ranks)


def batch_sizes(args: Args) -> list[int]:
    """Samples of a batch; with --step-batch-size-schedule of each step. [0] for what
    Megatron refuses."""
    steps = (args.step_batch_size_schedule or "").replace(",", " ").split()
    if not steps:
        return [args.global_batch_size or replica(args)]
    return [int(step.split(":")[1]) for step in steps]


def late_microbatches(args: Args) -> int | str | None:
    """The first microbatches of a batch that run on the older weights, as `TwoBW` takes
    them.

    Without --two-bw-late-microbatches `auto` chooses them by the size of each batch.
    """
    if args.two_bw_late_microbatches is None and args.two_bw_correction == "auto":
        return "auto"
    return args.two_bw_late_microbatches


def late_of(args: Args, microbatches: int) -> int:
    """How many of a batch's microbatches run on the older weights."""
    schedule = TwoBW(
        extra_warmup=args.two_bw_extra_warmup, late_microbatches=late_microbatches(args)
    )
    late = schedule.late(args.pipeline_model_parallel_size, microbatches)
    return microbatches if late is None else min(late, microbatches)


def beta1(args: Args) -> float:
    """Adam's first decay in a run with `auto`. It is one for all batches; the largest
    decides."""
    largest = batch_sizes(args)[-1] // max(replica(args), 1)
    return BETA1 if late_of(args, largest) == largest else BETA1_OF_MEGATRON


def notes(args: Args) -> list[str]:
    """The lines of a run of 2bw, one for each size of its batches: what `auto` stands
    for, or that nothing is done."""
    if args.pipeline_schedule != "2bw":
        return []
    sizes = [*dict.fromkeys(batch_sizes(args))]
    if args.two_bw_correction == "auto":
        return [_note_of_auto(args, size, several=len(sizes) > 1) for size in sizes]
    if args.two_bw_correction == "none" and not args.two_bw_sync_iterations:
        text = (
            "gradients are late by one update, which raises the loss; "
            "--two-bw-correction auto recovers most of it"
        )
        return [f"> 2bw: {text}. {gap(sizes[-1] * args.seq_length)}"]
    return []


def _note_of_auto(args: Args, size: int, several: bool) -> str:
    count = size // replica(args)
    late = late_of(args, count)
    found = recommended(args, count)
    which = (
        "all microbatches"
        if late == count
        else f"the first {late} of {count} microbatches"
    )
    line = f"> 2bw: --two-bw-correction auto: {which} of a batch "
    line += f"of {size} samples " * several
    line += f"are late; weights {found.factor:g} updates ahead"
    line += f", and {found.gradient:g} x the last gradient's part of an update" * (
        found.gradient > 0
    )
    line += f"; --adam-beta1 {args.adam_beta1:g}" * (args.optimizer == "adam")
    return f"{line}. {gap(size * args.seq_length, late, count)}"


def gap(tokens: int, late: int | None = None, count: int = 0) -> str:
    """The gap of GAPS at the nearest number of tokens a batch, of `auto` with so many
    late of `count` microbatches, or with all late if None; of plain 2BW if `count` is
    0."""
    column = (
        0
        if not count
        else 1
        if late is None or 10 * late > 7 * count
        else 2
        if 3 * late >= count
        else 3
    )
    nearest = min(GAPS, key=lambda each: max(each, tokens) / max(min(each, tokens), 1))
    return (
        f"At {nearest:,} tokens a batch a small GPT's gap to vanilla's loss was "
        f"{GAPS[nearest][column]:+.1f} %"
    )
