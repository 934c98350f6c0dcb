"""A training run in this process, watched from outside: for tests, benchmarks and checks of GPUs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def nothing(*_: Any) -> None:
    """No observer."""


def train(
    argv: Sequence[str],
    after_setup: Callable[[list, Any], object] = nothing,
    after_step: Callable[[Mapping[str, Any]], object] = nothing,
    task: str = "gpt",
) -> None:
    """Train as pretrain_`task`_2bw.py does with `argv`.

    after_setup  called with the model's chunks and the optimizer, which is None with --skip-train
    after_step   called after each iteration with its losses by name, which the last stage alone has
    """
    from megatron.training import training

    from megatron_2bw.start.launch import launch

    def observed(function: Callable, observe: Callable[[tuple], object]) -> Callable:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> tuple:
            result = function(*args, **kwargs)
            observe(result)
            return result

        return call

    training.setup_model_and_optimizer = observed(
        training.setup_model_and_optimizer, lambda result: after_setup(*result[:2])
    )
    training.train_step = observed(training.train_step, lambda result: after_step(result[0]))
    sys.argv = [f"pretrain_{task}_2bw.py", *argv]
    launch(f"megatron_2bw.tasks.{task}")
