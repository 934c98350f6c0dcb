"""Installs the schedules into Megatron's training loop. For an entry script of your own
it takes three more lines:

    from megatron_2bw.mcore import add_flags, check, install

    # 1: the flags of this project
    args = parse_and_validate_args(extra_args_provider=add_flags)
    check(args)    # 2: one line and exit status 2 for what cannot run
    install(args)  # 3: before pretrain()
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING

from megatron_2bw.mcore import cpu
from megatron_2bw.mcore.checkpoints import owner

if TYPE_CHECKING:
    from megatron_2bw.mcore.runtime import MegatronRuntime


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add this project's flags to Megatron's parser; the device is the entry script's
    choice."""
    from megatron_2bw.run.flags import parse

    return parse.add_flags(parser, device=False)


def check(args: argparse.Namespace) -> None:
    """Exit with status 2 and one line if the command line asks for what the schedule
    cannot do.

    Megatron's own schedule is left alone.
    """
    from megatron_2bw.run.flags import parse
    from megatron_2bw.run.flags.stop import stop

    if args.pipeline_schedule != "megatron":
        parse.check(args, stop)


def install(args: argparse.Namespace, hooks: bool = True) -> MegatronRuntime | None:
    """Rebind what `args.pipeline_schedule` needs; call it after Megatron's arguments
    are parsed, before its `pretrain`.

    Returns the runtime, None with Megatron's own schedule. Raises DriftError, with
    nothing rebound, if the installed Megatron is another one than this project was
    written for, and UserError if another run saves to the same folder.

    hooks: also rebind how the training loop finds its schedule and makes its optimizer;
    a patched source checkout has that in its source (native.py), and its device is its
    own affair
    """
    from megatron_2bw.mcore import patches, rebinding

    runtime = None if args.pipeline_schedule == "megatron" else make_runtime(args)
    rows = [
        *patches.repairs(),
        *patches.for_checkpoints(runtime),
        *patches.for_log(runtime),
    ]
    if hooks and cpu.installed():
        rows += patches.for_cpu()
    if runtime is not None:
        if hooks:
            rows += patches.for_schedule(runtime)
        if runtime.schedule.late_step:
            rows += patches.for_late_step(runtime)
            if runtime.schedule.memory == "host":
                rows += patches.for_host()
    rebinding.apply(rows)
    if args.save and args.rank == 0:
        owner.hold(args.save)
    return runtime


def make_runtime(args: argparse.Namespace) -> MegatronRuntime:
    """The runtime of `args.pipeline_schedule`, which reads the training loop's position
    from `args`."""
    from megatron_2bw.engine.trace_file import forget
    from megatron_2bw.mcore.batch_sizes import planned, position
    from megatron_2bw.mcore.runtime import MegatronRuntime
    from megatron_2bw.run.flags.correction_notes import notes
    from megatron_2bw.run.flags.resolve import resolve

    iterations, _ = planned(args)
    options = resolve(args, iterations)
    if args.rank == 0:
        if options.trace is not None:
            forget(options.trace)
        for line in notes(args, options.schedule):
            print(line, flush=True)
    return MegatronRuntime(options.schedule, partial(position, args), options)
