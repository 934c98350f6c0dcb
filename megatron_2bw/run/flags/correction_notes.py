"""What the late microbatches of 2bw gain, and what they have cost a small GPT: the line
of a run, and the planner's figures.

Invariant: without torch.
"""

import copy
import math

from megatron_2bw.base.command_line import table_of
from megatron_2bw.run.flags.resolve import (
    batch_sizes,
    obstacle,
    prediction,
    replica,
)
from megatron_2bw.run.flags.rule import Args
from megatron_2bw.schedules import Schedule, TwoBW

# Validation losses above vanilla's in per cent (docs/convergence.md).
GAPS = table_of(__file__)


def notes(args: Args, schedule: Schedule) -> list[str]:
    """The lines of a run of 2bw, one for each size of its batches."""
    lines = []
    if isinstance(schedule, TwoBW):
        for size in dict.fromkeys(batch_sizes(args)):
            lines.append(_note(args, schedule, size))
    return lines


def _note(args: Args, schedule: TwoBW, size: int) -> str:
    stages = args.pipeline_model_parallel_size
    count = size // replica(args) or 1
    tokens = size * args.seq_length
    correction = "none" if args.two_bw_correction == "none" else "auto"
    if prediction(args):
        correction = "predict"
    late = schedule.late_of(count)
    line = f"> 2bw: {late} of {count} microbatches late"
    if correction == "predict":
        line += " on predicted weights"
    if stages > 1:
        line += f", {speed(stages, count, late):.2f} times as fast as 1F1B"
    line += f", {gap(tokens, late / count, correction)}"
    enough = min(stages - 1, count)
    if late >= enough:
        if args.two_bw_correction == "auto" and args.two_bw_late == "all":
            if why := obstacle(args, batch_sizes(args)):
                line += f" (not predicted: {why.partition(':')[0]})"
        return line
    further: int | str = enough
    with_all = copy.copy(args)
    with_all.two_bw_late = "all"
    if prediction(with_all):
        further = "all"
        enough = count
        correction = "predict"
    return (
        f"{line} (--two-bw-late {further}: {speed(stages, count, enough):.2f} times, "
        f"{gap(tokens, enough / count, correction)})"
    )


def speed(stages: int, microbatches: int, late: int) -> float:
    """How many times as fast as 1F1B with a flush, on even stages without messages and
    step (docs/schedules.md)."""
    slots = microbatches + max(stages - 1 - late, 0)
    return (microbatches + stages - 1) / slots


def gap(tokens: int, share: float, correction: str) -> str:
    """The measured gap of 2bw with a share of each batch late and the correction auto,
    predict or none; without one only that of all was measured."""
    percent = percent_of(tokens, share, correction)
    measured = nearest(tokens)
    where = f"at {measured:,} tokens a batch"
    if share and correction == "none":
        where += " with all late"
    return f"measured gap {percent:+.1f} % {where}"


def nearest(tokens: int) -> int:
    """The nearest number of tokens a batch that was measured."""

    def distance(measured: int) -> float:
        return abs(math.log(measured / max(tokens, 1)))

    return min(GAPS["auto"], key=distance)


def percent_of(tokens: int, share: float, correction: str = "auto") -> float:
    """The gap at the nearest number of tokens a batch, and with the correction auto
    between the nearest shares."""
    gaps = GAPS["auto"][nearest(tokens)]
    if share and correction != "auto":
        # not measured: as without a prediction
        return GAPS[correction].get(nearest(tokens), gaps[1])
    below = max(measured for measured in gaps if measured <= share)
    above = min(measured for measured in gaps if measured >= share)
    if below == above:
        return gaps[below]
    part = (share - below) / (above - below)
    return gaps[below] + part * (gaps[above] - gaps[below])


def most_late(tokens: int, microbatches: int, max_gap: float) -> int:
    """The largest number of late microbatches whose gap is at most `max_gap` per
    cent."""
    most = 0
    for late in range(1, microbatches + 1):
        if percent_of(tokens, late / microbatches) <= max_gap:
            most = late
    return most
