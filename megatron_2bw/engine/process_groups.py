"""Process groups with names of their own, and process groups for the thread of a step.

Invariant: when a collective of a `StepGroup` has returned, no GPU waits for another
rank because of it.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partialmethod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from megatron_2bw.engine.streams import POOL

_made: Counter[str] = Counter()
_torchs: Any = distributed_c10d  # with names that mypy does not know


def new_group(
    ranks: Sequence[int],
    name: str,
    backend: str | None = None,
    timeout: timedelta | None = None,
) -> dist.ProcessGroup:
    """A process group of `ranks`, made by these ranks alone (but see below).

    Its name is that of its ranks, `name`, and how often they have made it. torch before
    2.15 adds the number of groups that the rank is in, which differs between the
    stages: they would wait for each other for ever.

    NCCL: torch >= 2.15 splits the communicator of the world for each group, in which
    every rank of the world takes part. So all ranks make equally many groups of NCCL in
    one order, if need be with themselves as the only rank.
    """
    words = f"{list(ranks)} {name}"
    _made[words] += 1
    text = f"{words} {_made[words]}"
    digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    def own_name(ranks: list[int]) -> str:
        return digest

    name_of = _torchs._hash_ranks_to_str
    _torchs._hash_ranks_to_str = own_name
    try:
        group = dist.new_group(
            list(ranks),
            backend=backend,
            timeout=timeout,
            use_local_synchronization=True,
            group_desc=f"2bw {name}",
        )
    finally:
        _torchs._hash_ranks_to_str = name_of
    return cast(dist.ProcessGroup, group)


def streams_warning() -> str | None:
    """One line if this rank is in more groups of NCCL than torch's pool has streams
    (torch >= 2.15: one a group)."""
    backends = [dist.get_backend(group) for group in list(_torchs._world.pg_map)]
    count = sum("nccl" in backend for backend in backends)
    if count <= POOL:
        return None
    return (
        f"> {count} process groups of NCCL share the {POOL} CUDA streams of "
        "torch's pool, so that a message may wait "
        "for ever behind another one: give a smaller --two-bw-extra-warmup, or "
        "--pipeline-exchange gloo"
    )


class StepGroup:
    """A process group for the thread of a late step: a collective is complete, on the
    GPU too, when it returns.

    A kernel that is launched behind an unfinished NCCL kernel may share a hardware
    queue with the training thread's kernels, and stop them too
    (CUDA_DEVICE_MAX_CONNECTIONS). Two ranks then wait for each other for ever if their
    threads have launched in different orders. So the thread waits on the CPU first;
    Python's lock is free meanwhile. With `async_op`, the work's `wait` does that.

    Collectives of GPU tensors over gloo go through host tensors in the current stream:
    gloo itself would copy on streams of torch's pool, which may be those of NCCL.

    torch.distributed's functions accept it in place of `group`, with which it is equal.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self._over_gloo = dist.get_backend(group) == "gloo"

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # torch asks for it, for `barrier` on a host with GPUs
        return dist.ProcessGroup

    def __eq__(self, other: object) -> bool:
        return bool(self.group == getattr(other, "group", other))

    def __hash__(self) -> int:
        return hash(self.group)

    def __getattr__(self, name: str) -> Any:
        if name == "group":  # a copy under way has none yet
            raise AttributeError(name)
        found = getattr(self.group, name)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            result = found(*args, **kwargs)
            if result is None:  # a collective that is complete for the stream
                _wait_for_stream()
            return _Complete(result) if hasattr(result, "is_completed") else result

        return call

    def _through_host(
        self,
        name: str,
        tensors: list[Tensor],
        *options: Any,
    ) -> Any:
        collective: Callable[..., Any] = self.__getattr__(name)
        if not (self._over_gloo and tensors[0].is_cuda):
            return collective(tensors, *options)
        hosts = [tensor.cpu() for tensor in tensors]
        work = collective(hosts, *options)
        if work is not None:
            work.wait()
        for tensor, host in zip(tensors, hosts):
            tensor.copy_(host)
        return None

    allreduce = partialmethod(_through_host, "allreduce")
    broadcast = partialmethod(_through_host, "broadcast")


class _Complete:
    """A collective under way; after `wait` it is complete on the GPU too."""

    def __init__(self, work: Any):
        self._work = work

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self, *timeout: Any) -> bool:
        self._work.wait(*timeout)
        _wait_for_stream()
        return True


def _wait_for_stream() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
