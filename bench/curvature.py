"""Learning rate x curvature during a training of docs/convergence.md, in the units of bench/delay_stability.py.

    python bench/curvature.py --tokens 2048 --lr 4e-3

Trains the study's GPT without delay, and prints at every 25th iteration (--every) the learning rate times the largest
eigenvalue of P^-1/2 H P^-1/2, by size. H is the Hessian of the loss of that iteration's batch and P = sqrt(v / (1 -
beta2^t)) + epsilon, Adam's divisor: so Adam is momentum on a quadratic with that curvature. Power iteration; a product
with H is a difference of two gradients.
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

ITERATIONS, STEP = 15, 1e-3  # STEP: of a difference, in lengths of the weights
SHAPE = "--hidden-size 128 --num-layers 2 --train-iters 300 --lr-warmup-iters 20 --eval-iters 0 --verbose"


class Watch:
    """Keeps an iteration's four microbatches; measures and writes `result` after each of `every`."""

    def __init__(self, path: Path, every: int, result: dict[str, Any]):
        self._path, self._every, self._result, self._iterations = path, every, result | {"rows": []}, 0
        self._batch: deque[tuple] = deque(maxlen=4)

    def after_setup(self, models: list, optimizer: Any) -> None:
        from megatron_2bw.tasks import gpt

        self._model, self._adam, get_batch = models[0].module, optimizer.chained_optimizers[0].optimizer, gpt.get_batch
        self._params = [param for group in self._adam.param_groups for param in group["params"]]
        gpt.get_batch = lambda *args: self._batch.append(get_batch(*args)) or self._batch[-1]

    def after_step(self, losses: Any) -> None:
        self._iterations += 1
        if self._iterations % self._every == 0:
            rate = self._adam.param_groups[0]["lr"]
            row = {"iteration": self._iterations, "rate": rate, "rate x curvature": rate * self.curvature()}
            print(row, flush=True)
            self._result["rows"].append(row)
            write_result(self._path, self._result)

    def gradient(self) -> torch.Tensor:
        total = 0.0
        for tokens, labels, mask, attention, positions in self._batch:
            losses = self._model(tokens, positions, attention, labels=labels)
            total = total + (losses * mask).sum() / mask.sum() / len(self._batch)
        return parameters_to_vector(torch.autograd.grad(total, self._params))

    @torch.no_grad()
    def curvature(self) -> float:
        """The Rayleigh quotient of the last iteration."""
        group, states = self._adam.param_groups[0], [self._adam.state[param] for param in self._params]
        seconds = (state["exp_avg_sq"] / (1 - group["betas"][1] ** float(state["step"])) for state in states)
        scale = (parameters_to_vector(seconds).sqrt() + group["eps"]).rsqrt()
        weights = parameters_to_vector(self._params)
        vector = product = torch.randn(len(weights), generator=torch.Generator().manual_seed(1))
        for _ in range(ITERATIONS):
            vector = product / product.norm()
            step = STEP * weights.norm() / (scale * vector).norm()
            ends = []
            for sign in (1, -1):
                self._set(weights + sign * step * scale * vector)
                with torch.enable_grad():
                    ends.append(self.gradient())
            product = scale * (ends[0] - ends[1]) / (2 * step)
        self._set(weights)
        return float(vector @ product)

    def _set(self, weights: torch.Tensor) -> None:
        for param, part in zip(self._params, weights.split([param.numel() for param in self._params])):
            param.copy_(part.view_as(param))


def main() -> int:
    parser = new_parser(__doc__, "curvature")
    parser.add_argument("--tokens", type=int, default=2048, help="of a batch, in four microbatches")
    parser.add_argument("--lr", default="4e-3")
    parser.add_argument("--every", type=int, default=25, help="iterations")
    options = parser.parse_args()
    sizes = f"--micro-batch-size {options.tokens // 512} --global-batch-size {options.tokens // 128} {SHAPE}"
    words = f"curvature --variants vanilla --lr {options.lr} --seeds 2001 --device cpu -- {sizes}".split()
    run = study.grid(study.parse(words), build_corpus(vocab_size=512).flags())[0]
    watch = Watch(options.json, options.every, {"tokens": options.tokens, "lr": options.lr})
    os.environ |= dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    words = run.command[run.command.index("--nproc-per-node") + 3 :]
    entry.train(words, watch.after_setup, watch.after_step)
    return 0


if __name__ == "__main__":
    sys.exit(main())
