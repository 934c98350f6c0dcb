"""The lines of a run of 2bw about its gradient delay: what `auto` stands for, and what
the delay has cost a small GPT.

Invariant: without torch; the planner prints the same gaps.
"""

from megatron_2bw.mcore.options import RunOptions
from megatron_2bw.run.flags.resolve import batch_sizes, replica
from megatron_2bw.run.flags.rule import Args

# Validation losses above vanilla's in per cent, by tokens a batch: of plain 2BW, and
# with `auto` if all, half or a quarter of a batch is late; a small GPT at vanilla's
# best rate (docs/convergence.md).
GAPS = {
    512: (20.8, 1.0, -0.3, -0.4),
    2048: (33.2, 2.2, -0.7, -0.9),
    8192: (62.8, 6.3, -0.4, -1.5),
    32768: (80.3, 14.5, 1.7, -0.1),  # the first two: one seed
}


def notes(args: Args, options: RunOptions) -> list[str]:
    """The lines of a run of 2bw, one for each size of its batches: what `auto` stands
    for, or that nothing is done."""
    if args.pipeline_schedule != "2bw":
        return []
    sizes = [*dict.fromkeys(batch_sizes(args))]
    if args.two_bw_correction == "auto":
        several = len(sizes) > 1
        return [_note_of_auto(args, options, size, several) for size in sizes]
    if args.two_bw_correction == "none" and not args.two_bw_sync_iterations:
        text = (
            "gradients are late by one update, which raises the loss; "
            "--two-bw-correction auto recovers most of it"
        )
        return [f"> 2bw: {text}. {gap(sizes[-1] * args.seq_length)}"]
    return []


def _note_of_auto(args: Args, options: RunOptions, size: int, several: bool) -> str:
    count = size // replica(args)
    late = options.schedule.late(args.pipeline_model_parallel_size, count)
    correction = options.correction(count)
    which = f"the first {late} of {count} microbatches"
    if late == count:
        which = "all microbatches"
    batch = f"a batch of {size} samples" if several else "a batch"
    line = f"> 2bw: --two-bw-correction auto: {which} of {batch} are late"
    line += f"; weights {correction.factor:g} updates ahead"
    if correction.gradient > 0:
        line += f", and {correction.gradient:g} x the last gradient's part of an update"
    if args.optimizer == "adam":
        line += f"; --adam-beta1 {args.adam_beta1:g}"
    return f"{line}. {gap(size * args.seq_length, late, count)}"


def gap(tokens: int, late: int | None = None, count: int = 0) -> str:
    """The gap of GAPS at the nearest number of tokens a batch, of `auto` with so many
    late of `count` microbatches, or with all late if None; of plain 2BW if `count` is
    0."""
    if not count:
        column = 0
    elif late is None or 10 * late > 7 * count:
        column = 1
    elif 3 * late >= count:
        column = 2
    else:
        column = 3

    nearest = min(GAPS, key=lambda size: max(size, tokens) / max(min(size, tokens), 1))
    return (
        f"At {nearest:,} tokens a batch a small GPT's gap to vanilla's loss was "
        f"{GAPS[nearest][column]:+.1f} %"
    )
