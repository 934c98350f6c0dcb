"""Replacements for functions of Megatron's training loop: what they do with a schedule of this project.

Each method takes the original function and returns its replacement. Invariant: with a late step nothing in the loop
waits for another stage.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any


class Loop:
    """The loop of a run with a `runtime` (a `runtime.MegatronRuntime`)."""

    def __init__(self, runtime: Any):
        self.runtime = runtime
        self._hidden: tuple | None = None  # exit flags as they were given, while `decide_exit` hides them

    def schedule(self, original: Callable) -> Callable:
        return lambda *args, **kwargs: self.runtime.forward_backward

    def attach(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def get_megatron_optimizer(config, model_chunks, *args, **kwargs):
            optimizer = original(config, model_chunks, *args, **kwargs)
            self.runtime.attach(model_chunks, optimizer)
            return optimizer

        return get_megatron_optimizer

    def log(self, original: Callable) -> Callable:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def training_log(*args, **kwargs):
            values = signature.bind(*args, **kwargs)
            values.apply_defaults()
            return self.runtime.log.add(original, values.arguments)

        return training_log

    def print_line(self, original: Callable) -> Callable:
        return lambda message: original(self.runtime.log.line(message) if self.runtime.log else message)

    def attach_scheduler(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def get_optimizer_param_scheduler(optimizer):
            scheduler = original(optimizer)
            self.runtime.attach_scheduler(scheduler)
            return scheduler

        return get_optimizer_param_scheduler

    def sync_first(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def with_the_newest_weights(*args, **kwargs):
            self.runtime.sync_weights()
            return original(*args, **kwargs)

        return with_the_newest_weights

    def save(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def save_checkpoint_and_time(*args, **kwargs):
            self.runtime.sync_weights()
            # A checkpoint holds the arguments.
            with contextlib.nullcontext() if self._hidden is None else _exit_flags(*self._hidden):
                return original(*args, **kwargs)

        return save_checkpoint_and_time

    def decide_exit(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def checkpoint_and_decide_exit(*args, **kwargs):
            # Megatron asks all ranks in every iteration; here the late step has asked them in the background.
            with contextlib.nullcontext() if self.runtime.exit_requested else _exit_flags(False, None) as self._hidden:
                try:
                    leave = original(*args, **kwargs)
                finally:
                    self._hidden = None
            if leave:
                self.runtime.sync_weights()
            return leave

        return checkpoint_and_decide_exit


def first_argument(original: Callable) -> Callable:
    """For a reduction over the stages, each of which has the value already."""
    return lambda value, group=None: value


@contextlib.contextmanager
def _exit_flags(signal_handler: bool, minutes: int | None) -> Iterator[tuple]:
    """--exit-signal-handler and --exit-duration-in-mins with other values; yields what they were."""
    from megatron.training import get_args

    args = get_args()
    asked = args.exit_signal_handler, args.exit_duration_in_mins
    args.exit_signal_handler, args.exit_duration_in_mins = signal_handler, minutes
    try:
        yield asked
    finally:
        args.exit_signal_handler, args.exit_duration_in_mins = asked
