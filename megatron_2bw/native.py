"""What a Megatron-LM source checkout calls once `patches/` is applied to it: its two hooks.

What checkpoints hold, and what a late step changes in the training loop, is rebound beside them (`patches.py`). In a
checkout `--pipeline-schedule` is a flag like any other, and every entry script of it has the schedules. What
--two-bw-trace has recorded is joined by `python -m megatron_2bw.timelines.trace DIR` there.
"""

from __future__ import annotations

import argparse
from typing import Any

from megatron.core.optimizer import get_megatron_optimizer as megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func as megatron_schedule

from megatron_2bw.flags import parse as arguments
from megatron_2bw.mcore import patches
from megatron_2bw.start.launch import make_runtime, stop

_runtimes: list[Any] = []  # the one runtime of this process, made when it is first asked for


def _runtime():
    """The runtime of --pipeline-schedule, or None for Megatron's own schedule."""
    from megatron.training import get_args

    args = get_args()
    if args.pipeline_schedule == "megatron":
        return None
    if not _runtimes:
        runtime = make_runtime(args)
        wanted = patches.repairs() + patches.for_checkpoints(runtime)
        if runtime.schedule.late_step:
            wanted += patches.for_late_step(runtime)
        else:
            wanted += patches.for_log(runtime)
        patches.apply(wanted)
        _runtimes.append(runtime)
    return _runtimes[0]


def check(args: argparse.Namespace) -> None:
    """Stop with one line if the command line asks for what the schedule cannot do. Megatron's own is left alone."""
    if args.pipeline_schedule != "megatron":
        arguments.check(args, stop)


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags that mean something here: the device is the entry script's choice."""
    return arguments.add_flags(parser, device=False)


def get_forward_backward_func(*args, **kwargs):
    """Megatron-core's function of this name, but for the schedules of this project."""
    runtime = _runtime()
    return runtime.forward_backward if runtime is not None else megatron_schedule(*args, **kwargs)


def get_megatron_optimizer(config, model_chunks, *args, **kwargs):
    """Megatron-core's function of this name; the runtime takes over the optimizer's step."""
    optimizer = megatron_optimizer(config, model_chunks, *args, **kwargs)
    runtime = _runtime()
    if runtime is not None:
        runtime.attach(model_chunks, optimizer)
    return optimizer
