"""Where a delay costs loss: with the parameters of one part of the model late, and of W against its working copy.

    python bench/delay_parts.py --late embedding
    python bench/delay_parts.py --working --variant "--two-bw-correction auto --two-bw-late-microbatches 2"

The study's GPT of docs/convergence.md, 2,048 tokens a batch at 4e-3, seed 2001; --tokens and --lr give other ones.
--late WORD  Megatron's schedule without a pipeline; the gradient of batch j is taken with the parameters whose names
             match the regular expression at W(j-1) and the others at W(j), and applied to W(j). `.` is plain 2bw
--variant    instead, these flags with --pipeline-schedule 2bw; --working evaluates the working copy W', not W
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.tables import new_parser, write_result
from megatron_2bw.convergence import options as study
from megatron_2bw.data.corpus import build_corpus
from megatron_2bw.gpu_check import entry

SHAPE = "--hidden-size 128 --num-layers 2 --train-iters 300 --lr-warmup-iters 20 --log-interval 10 --verbose"


class Late:
    """Takes gradients with the matching parameters one update old."""

    def __init__(self, pattern: str):
        self._pattern = pattern

    def after_setup(self, models: list, optimizer: Any) -> None:
        adam = optimizer.chained_optimizers[0].optimizer
        named = [(name, param) for name, param in models[0].module.named_parameters() if param.requires_grad]
        held = {id(param) for group in adam.param_groups for param in group["params"]}
        assert all(id(param) in held for _, param in named)
        self._params = [param for name, param in named if re.search(self._pattern, name)]
        print("late:", *[name for name, _ in named if re.search(self._pattern, name)], flush=True)
        self._old = [param.detach().clone() for param in self._params]
        self._new: list[torch.Tensor] | None = None
        models[0].register_forward_pre_hook(self._before_forward)
        adam.register_step_pre_hook(self._before_step)

    @torch.no_grad()
    def _before_forward(self, model: torch.nn.Module, _: Any) -> None:
        if model.training and self._new is None:  # the first microbatch of a batch
            self._new = [param.detach().clone() for param in self._params]
            torch._foreach_copy_([param.data for param in self._params], self._old)

    @torch.no_grad()
    def _before_step(self, *_: Any) -> None:
        torch._foreach_copy_([param.data for param in self._params], self._new)
        self._old, self._new = self._new, None


def main() -> int:
    parser = new_parser(__doc__, "delay_parts")
    parser.add_argument("--late", default="", help="regular expression; empty: none")
    parser.add_argument("--working", action="store_true")
    parser.add_argument("--variant", default="")
    parser.add_argument("--tokens", type=int, default=2048, help="of a batch, in four microbatches")
    parser.add_argument("--lr", default="4e-3")
    options = parser.parse_args()
    samples = 200 * 512 // options.tokens  # validation batches
    sizes = f"--micro-batch-size {options.tokens // 512} --global-batch-size {options.tokens // 128} {SHAPE}"
    sizes += f" --eval-iters {samples} --eval-interval 101"
    words = f"parts --variants vanilla --lr {options.lr} --seeds 2001 --device cpu -- {sizes}".split()
    run = study.grid(study.parse(words), build_corpus(vocab_size=512).flags())[0]
    os.environ |= dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    words = run.command[run.command.index("--nproc-per-node") + 3 :]
    if options.variant:
        words = [*words, "--pipeline-schedule", "2bw", *options.variant.split()]
    if options.working:
        from megatron_2bw.mcore.working_copy import WorkingCopy

        WorkingCopy.swap_in_true_weights = lambda self: None
    result: dict[str, Any] = {"late": options.late, "variant": options.variant, "working": options.working}
    result |= {"tokens": options.tokens, "lr": options.lr, "validation": {}}
    from megatron.training import training

    evaluate = training.evaluate

    def noted(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        found = evaluate(*args, **kwargs)
        result["validation"][get_args().curr_iteration] = float(next(iter(found[0].values())))
        write_result(options.json, result)
        return found

    training.evaluate = noted
    watch = Late(options.late) if options.late else None
    entry.train(words, watch.after_setup if watch else entry.nothing)
    return 0


if __name__ == "__main__":
    sys.exit(main())
