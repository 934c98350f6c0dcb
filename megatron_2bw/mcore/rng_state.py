"""The random state of one rank, taken and put back: what dropout and data loading draw from."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel


@dataclass(frozen=True)
class RandomState:
    """What Megatron saves of a rank's generators: Python's, NumPy's, torch's on host and device, and its own tracker's.

    Taking it copies some kilobytes on the host and waits for no kernel.
    """

    python: tuple
    numpy: tuple
    host: torch.Tensor
    device: torch.Tensor
    tracker: dict[str, torch.Tensor]

    @classmethod
    def now(cls) -> RandomState:
        states = tensor_parallel.get_cuda_rng_tracker().get_states()
        return cls(
            random.getstate(),
            np.random.get_state(),
            torch.get_rng_state(),
            torch.cuda.get_rng_state(),
            {name: tensor_parallel.convert_cuda_rng_state(state) for name, state in states.items()},
        )

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.host)
        torch.cuda.set_rng_state(self.device)
        tracker: Any = tensor_parallel.get_cuda_rng_tracker()
        graphable = tensor_parallel.is_graph_safe_cuda_rng_tracker(tracker)
        tracker.set_states(
            {
                name: tensor_parallel.convert_cuda_rng_state(state, to_graphable=graphable)
                for name, state in self.tracker.items()
            }
        )
