"""The two hooks that a Megatron-LM source checkout calls once `patches/` is applied to
it.

The rest is rebound by `mcore.install`. In a checkout `--pipeline-schedule` is a flag
like any other, and every entry script of it has the schedules. `python -m
megatron_2bw.tools.timelines.trace DIR` joins the files of --pipeline-trace there.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron.core.optimizer import get_megatron_optimizer as megatron_optimizer
from megatron.core.pipeline_parallel import (
    get_forward_backward_func as megatron_schedule,
)
from megatron.training import get_args

from megatron_2bw.mcore import add_flags, check, install  # noqa: F401  (the patched source imports the first two)


@functools.cache
def _runtime() -> Any:
    """The one runtime of this process, made when it is first asked for; None for
    Megatron's own schedule."""
    args = get_args()
    return None if args.pipeline_schedule == "megatron" else install(args, hooks=False)


def get_forward_backward_func(*args, **kwargs):
    """Megatron-core's function of this name, but for the schedules of this project."""
    runtime = _runtime()
    return (
        runtime.forward_backward
        if runtime is not None
        else megatron_schedule(*args, **kwargs)
    )


def get_megatron_optimizer(config, model_chunks, *args, **kwargs):
    """Megatron-core's function of this name; the runtime takes over the optimizer's
    step."""
    runtime = _runtime()
    make = (
        megatron_optimizer
        if runtime is None
        else runtime.make_optimizer(megatron_optimizer)
    )
    return make(config, model_chunks, *args, **kwargs)
