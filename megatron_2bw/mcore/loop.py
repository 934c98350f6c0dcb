"""Replacements for functions of Megatron's training loop: what they do with a schedule of this project.

Their first argument is the original function. Invariant: with a late step nothing in the loop waits for another stage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from megatron_2bw.guard import arguments, around


class Loop:
    """The loop of a run with a `runtime` (a `runtime.MegatronRuntime`)."""

    def __init__(self, runtime: Any):
        self.runtime = runtime
        self._hidden: tuple | None = None  # exit flags as they were given, while `decide_exit` hides them

    def schedule(self, original: Callable) -> Callable:
        return lambda *args, **kwargs: self.runtime.forward_backward

    @around
    def attach(self, make: Callable, config: Any, model_chunks: list, *args: Any, **kwargs: Any) -> Any:
        optimizer = make(config, model_chunks, *args, **kwargs)
        self.runtime.attach(model_chunks, optimizer)
        return optimizer

    @around
    def log(self, training_log: Callable, *args: Any, **kwargs: Any) -> bool:
        return self.runtime.log.add(training_log, arguments(training_log, args, kwargs))

    @around
    def print_line(self, print_rank_last: Callable, message: str) -> None:
        print_rank_last(self.runtime.log.line(message) if self.runtime.log else message)

    @around
    def attach_scheduler(self, make: Callable, optimizer: Any) -> Any:
        scheduler = make(optimizer)
        self.runtime.attach_scheduler(scheduler)
        return scheduler

    @around
    def sync_first(self, read_weights: Callable, *args: Any, **kwargs: Any) -> Any:
        self.runtime.sync_weights()
        return read_weights(*args, **kwargs)

    @around
    def save(self, save_checkpoint: Callable, *args: Any, **kwargs: Any) -> Any:
        self.runtime.sync_weights()
        # A checkpoint holds the arguments.
        with contextlib.nullcontext() if self._hidden is None else _exit_flags(*self._hidden):
            return save_checkpoint(*args, **kwargs)

    @around
    def decide_exit(self, checkpoint_and_decide_exit: Callable, *args: Any, **kwargs: Any) -> bool:
        # Megatron asks all ranks in every iteration; here the late step has asked them in the background.
        with contextlib.nullcontext() if self.runtime.exit_requested else _exit_flags(False, None) as self._hidden:
            try:
                leave = checkpoint_and_decide_exit(*args, **kwargs)
            finally:
                self._hidden = None
        if leave:
            self.runtime.sync_weights()
        return leave


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
