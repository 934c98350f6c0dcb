"""Pipeline schedules as data: pure Python, no torch. One definition drives runtime,
validator and pictures."""

from megatron_2bw.schedules.base import (
    PREDICT,
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
from megatron_2bw.schedules.two_bw import NONE_LATE, TwoBW
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
    late: int | str = "all",
    memory: str = "two-slots",
    extra_warmup: tuple[int, ...] = (),
    sync_iterations: int = 0,
    predicts: bool = False,
    lead: int = 0,
    gpipe_round: int | None = None,
) -> Schedule | None:
    """The schedule of --pipeline-schedule `name` with the options of 2bw and gpipe;
    None for Megatron's own."""
    if name == TwoBW.name:
        return TwoBW(late, memory, extra_warmup, sync_iterations, predicts, lead)
    if name == GPipe.name:
        return GPipe(gpipe_round)
    return SCHEDULES.get(name)
