"""A training run in this process, watched from outside: for tests, benchmarks and
checks of GPUs."""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_2bw.base.argv import merged

SMALL_GPT = """
    --mock-data --split 98,1,1 --tokenizer-type NullTokenizer --make-vocab-size-divisible-by 32 --num-workers 0
    --micro-batch-size 1 --lr 1e-4 --lr-decay-style constant --clip-grad 1.0 --attention-dropout 0 --hidden-dropout 0
    --eval-iters 0 --eval-interval 1000 --device cpu
""".split()


def gpt_flags(
    layers: int, hidden: int, heads: int, sequence: int, text: str, *words: object
) -> list[str]:
    """Flags of a GPT on mock data with a fixed learning rate. `text`, and `words` such
    as paths, replace defaults."""
    shape = (
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} "
        f"--seq-length {sequence}"
    )
    defaults = [*SMALL_GPT, *shape.split(), "--max-position-embeddings", str(sequence)]
    return merged(defaults, [*text.split(), *map(str, words)])


def nothing(*_: Any) -> None:
    """No observer."""


def train(
    argv: Sequence[str],
    after_setup: Callable[[list, Any], object] = nothing,
    after_step: Callable[[Mapping[str, Any]], object] = nothing,
    task: str = "gpt",
) -> None:
    """Train as pretrain_`task`_2bw.py does with `argv`.

    after_setup  called with the model's chunks and the optimizer, which is None with
                 --skip-train
    after_step   called after each iteration with its losses by name, which the last
                 stage alone has
    """
    from megatron.training import training

    from megatron_2bw.run.start.launch import launch

    def observe(name: str, tell: Callable[[tuple], object]) -> None:
        """Let `tell` see what a function of Megatron's returns."""
        function = getattr(training, name)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> tuple:
            result = function(*args, **kwargs)
            tell(result)
            return result

        setattr(training, name, call)

    observe("setup_model_and_optimizer", lambda result: after_setup(*result[:2]))
    observe("train_step", lambda result: after_step(result[0]))
    sys.argv = [f"pretrain_{task}_2bw.py", *argv]
    launch(f"megatron_2bw.run.tasks.{task}")
