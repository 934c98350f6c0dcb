"""CUDA streams that nothing else uses.

Invariant: a stream of this module is neither another one of it nor a stream of NCCL or
gloo.
"""

import torch

# torch has a pool of 32 streams for each priority and gives them out in turn, so that
# two of its streams may be one. Those of NCCL have priority 0 or the highest, those of
# gloo the highest (torch's c10/cuda/CUDAStream.h).
PRIORITY = -2
POOL = 32

_taken: list[torch.cuda.Stream] = []


def own_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream for one purpose, for as long as the process lives. RuntimeError if the
    pool is used up."""
    for _ in range(POOL):
        stream = torch.cuda.Stream(device=device, priority=PRIORITY)
        if all(stream.cuda_stream != other.cuda_stream for other in _taken):
            _taken.append(stream)
            return stream
    raise RuntimeError(f"all {POOL} CUDA streams of priority {PRIORITY} are in use")
