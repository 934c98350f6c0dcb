"""Pipeline schedules as data: pure Python, no torch. One definition drives runtime,
validator and pictures."""

from megatron_2bw.schedules.base import (
    REDUCE,
    STEP,
    Action,
    B,
    F,
    Schedule,
    Shape,
    parse_actions,
)
from megatron_2bw.schedules.flush import GPipe, NoPipelining, PipeDreamFlush
from megatron_2bw.schedules.pipedream import PipeDream
from megatron_2bw.schedules.two_bw import TwoBW
from megatron_2bw.schedules.validator import ScheduleError, check_actions, validate

SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (TwoBW(), PipeDreamFlush(), GPipe(), NoPipelining(), PipeDream())
}

# `megatron` is Megatron's own schedule, untouched.
SCHEDULE_NAMES = ("megatron", *SCHEDULES)


def schedule_of(
    name: str,
    *,
    gradient_slots: int | str = 2,
    extra_warmup: tuple[int, ...] = (),
    sync_iterations: int = 0,
    late_microbatches: int | str | None = None,
    gpipe_round: int | None = None,
) -> Schedule | None:
    """The schedule of --pipeline-schedule `name` with the options of 2bw and gpipe;
    None for Megatron's own."""
    if name == TwoBW.name:
        return TwoBW(gradient_slots, extra_warmup, sync_iterations, late_microbatches)
    if name == GPipe.name:
        return GPipe(gpipe_round)
    return SCHEDULES.get(name)
