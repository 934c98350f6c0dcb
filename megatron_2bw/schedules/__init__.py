"""Pipeline schedules as data: pure Python, no torch. One definition drives runtime, validator and pictures."""

from megatron_2bw.schedules.action import B, F, REDUCE, STEP, W, Action, Shape, parse
from megatron_2bw.schedules.base import Schedule
from megatron_2bw.schedules.flush import GPipe, NoPipelining, PipeDreamFlush
from megatron_2bw.schedules.pipedream import PipeDream
from megatron_2bw.schedules.two_bw import TwoBW
from megatron_2bw.schedules.validator import ScheduleError, check_actions, validate

SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule for schedule in (TwoBW(), PipeDreamFlush(), GPipe(), NoPipelining(), PipeDream())
}

# `megatron` is Megatron's own schedule, untouched.
SCHEDULE_NAMES = ("megatron", *SCHEDULES)

__all__ = [
    "B", "F", "REDUCE", "STEP", "W", "Action", "Shape", "Schedule", "ScheduleError", "SCHEDULES", "SCHEDULE_NAMES",
    "TwoBW", "check_actions", "parse", "validate",
]
