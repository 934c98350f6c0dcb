"""How much of the change of a gradient in one update a diagonal second-order estimate foretells.

    python bench/second_order.py --tokens 2048 --lr 4e-3

Trains the GPT of docs/convergence.md without delay. At every 25th iteration (--every) it takes the gradients of one
batch at W(j-1) and at W(j). Their difference is what a delay of one update leaves out. Two estimates of it that need no
further backward: g g (W(j) - W(j-1)), with g the gradient at W(j-1) (DC-ASGD, arXiv 1609.08326), and v (W(j) - W(j-1)),
with v Adam's second moment. Prints, in the units of Adam's divisor, the part of the difference that remains if the
estimate has the best of all scales: sqrt(1 - cos^2). 1: nothing is foretold.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch.nn.utils import parameters_to_vector

from bench.tables import new_parser, write_result
from megatron_2bw.convergence import options as study
from megatron_2bw.data.corpus import build_corpus
from megatron_2bw.gpu_check import entry

SHAPE = "--hidden-size 128 --num-layers 2 --train-iters 300 --lr-warmup-iters 20 --eval-iters 0 --verbose"


class Watch:
    """Keeps an iteration's four microbatches and the weights before its step; measures after each of `every`."""

    def __init__(self, path: Path, every: int, result: dict[str, Any]):
        self._path, self._every, self._result, self._iterations = path, every, result | {"rows": []}, 0
        self._batch: deque[tuple] = deque(maxlen=4)

    def after_setup(self, models: list, optimizer: Any) -> None:
        from megatron_2bw.tasks import gpt

        self._model, self._adam, get_batch = models[0].module, optimizer.chained_optimizers[0].optimizer, gpt.get_batch
        self._params = [param for group in self._adam.param_groups for param in group["params"]]
        self._before = parameters_to_vector(self._params).detach().clone()
        gpt.get_batch = lambda *args: self._batch.append(get_batch(*args)) or self._batch[-1]

    def after_step(self, losses: Any) -> None:
        self._iterations += 1
        now = parameters_to_vector(self._params).detach().clone()
        if self._iterations % self._every == 0:
            row = {"iteration": self._iterations} | self.remains(now)
            print(row, flush=True)
            self._result["rows"].append(row)
            write_result(self._path, self._result)
        self._before = now

    def gradient(self, weights: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for param, part in zip(self._params, weights.split([param.numel() for param in self._params])):
                param.copy_(part.view_as(param))
        total = 0.0
        for tokens, labels, mask, attention, positions in self._batch:
            losses = self._model(tokens, positions, attention, labels=labels)
            total = total + (losses * mask).sum() / mask.sum() / len(self._batch)
        return parameters_to_vector(torch.autograd.grad(total, self._params))

    def remains(self, now: torch.Tensor) -> dict[str, float]:
        group, states = self._adam.param_groups[0], [self._adam.state[param] for param in self._params]
        seconds = [state["exp_avg_sq"] / (1 - group["betas"][1] ** float(state["step"])) for state in states]
        second = parameters_to_vector(seconds)
        scale = (second.sqrt() + group["eps"]).rsqrt()
        older, newer = self.gradient(self._before), self.gradient(now)
        change, update = scale * (newer - older), now - self._before
        found = {"change": float(change.norm() / (scale * newer).norm())}
        for name, diagonal in (("g g", older * older), ("v", second)):
            cosine = torch.cosine_similarity(change, scale * diagonal * update, dim=0)
            found |= {f"{name}, cosine": float(cosine), f"{name}, remains": float((1 - cosine**2).sqrt())}
        return found


def main() -> int:
    parser = new_parser(__doc__, "second_order")
    parser.add_argument("--tokens", type=int, default=2048, help="of a batch, in four microbatches")
    parser.add_argument("--lr", default="4e-3")
    parser.add_argument("--every", type=int, default=25, help="iterations")
    options = parser.parse_args()
    sizes = f"--micro-batch-size {options.tokens // 512} --global-batch-size {options.tokens // 128} {SHAPE}"
    words = f"second_order --variants vanilla --lr {options.lr} --seeds 2001 --device cpu -- {sizes}".split()
    run = study.grid(study.parse(words), build_corpus(vocab_size=512).flags())[0]
    watch = Watch(options.json, options.every, {"tokens": options.tokens, "lr": options.lr})
    os.environ |= dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    words = run.command[run.command.index("--nproc-per-node") + 3 :]
    entry.train(words, watch.after_setup, watch.after_step)
    return 0


if __name__ == "__main__":
    sys.exit(main())
