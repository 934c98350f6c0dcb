"""megatron-2bw simulate: a schedule's timeline as text and as a picture."""

import argparse

from megatron_2bw.base.command_line import TYPES, parser_of
from megatron_2bw.base.errors import UserError, file_errors
from megatron_2bw.run.flags.project_flags import extra_warmup, schedule_name
from megatron_2bw.schedules import Schedule, Shape, schedule_of
from megatron_2bw.schedules.interleaved import Interleaved
from megatron_2bw.tools.timelines.picture import draw_shapes
from megatron_2bw.tools.timelines.simulator import (
    Times,
    busy,
    iteration_time,
    simulate,
)
from megatron_2bw.tools.timelines.text import render


def main(words: list[str], prog: str) -> int:
    types = TYPES | {"schedule": schedule_name, "numbers": extra_warmup}
    options = parser_of(prog, __file__, types).parse_args(words)
    schedule = _schedule(options)
    times = Times(options.forward, options.backward, options.transfer)
    stages = options.stages
    microbatches = options.microbatches
    shape = Shape(stages, microbatches, 0, options.iterations)
    print(f"{options.schedule}, {stages} stages, {microbatches} microbatches a batch")
    print(render(simulate(schedule, shape, times), stages))
    share = busy(schedule, stages, microbatches, times)
    print(f"stages busy {share:.1%} in the steady state")
    seconds = iteration_time(schedule, stages, microbatches, times)
    print(f"an iteration takes {seconds:g}")
    if options.out is not None:
        with file_errors(f"--out {options.out}"):
            panels = [(schedule, shape)]
            draw_shapes(panels, options.out, times, versions=options.versions)
        print(f"wrote {options.out}")
    return 0


def _schedule(options: argparse.Namespace) -> Schedule:
    """The schedule with its options. UserError for sizes that it cannot have."""
    stages = options.stages
    microbatches = options.microbatches
    if options.schedule == Interleaved.name:
        if microbatches % stages:
            raise UserError(
                f"--microbatches {microbatches}: {options.schedule} needs a multiple of "
                f"{stages}"
            )
        return Interleaved(options.virtual)
    schedule = schedule_of(
        options.schedule,
        extra_warmup=tuple(options.extra_warmup),
        gpipe_round=options.gpipe_round,
    )
    if schedule is None:
        raise UserError(f"--schedule {options.schedule}: there is no such schedule")
    if len(options.extra_warmup) not in (0, 1, stages - 1):
        raise UserError(
            f"--extra-warmup: give one number, or one for each of the {stages - 1} "
            "boundaries"
        )
    return schedule
