"""Asynchronous neighbour exchange between pipeline stages.

Each boundary has one process group per direction, so that messages that go different ways never queue behind
each other. Receives are posted ahead: message k+1 travels while k is computed with (`Inbox.ahead`, `Inbox.depth`).

Invariant: the runtime announces with `Inbox.expect` just the messages that the neighbour sends in an iteration,
so that receives and sends of a boundary are equal in number at every iteration's end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_2bw.core.worker import Worker


class Work(Protocol):
    def wait(self) -> object: ...
    def is_completed(self) -> bool: ...


class Link:
    """One direction of one boundary: a two-rank process group, over which tensors go in one order."""

    def __init__(self, group: dist.ProcessGroup, peer: int, device: torch.device):
        self.group, self.peer, self.device = group, peer, device

    @property
    def occupies_device(self) -> bool:
        """Whether a posted message is a kernel that runs on the GPU until the other end has come (NCCL)."""
        return dist.get_backend(self.group) == "nccl"

    def greet(self, sends: bool) -> None:
        """Exchange a first message. NCCL builds its communicator at the first use and waits for the other end there,
        so both ends must come to it at the same time: before training, not inside it."""
        token = torch.zeros(1, device=self.device)
        (self.send(token) if sends else self.receive(token)).wait()

    def send(self, tensor: torch.Tensor) -> Work:
        return dist.isend(tensor, self.peer, group=self.group)

    def receive(self, tensor: torch.Tensor) -> Work:
        return dist.irecv(tensor, self.peer, group=self.group)


class StagedLink(Link):
    """A gloo link for GPU tensors: they travel through pinned host memory, copied by a thread of this link's own.

    So several stages can share one GPU, and servers without a common NCCL network can be joined.
    """

    occupies_device = False

    def __init__(self, group: dist.ProcessGroup, peer: int, device: torch.device):
        super().__init__(group, peer, device)
        self._worker = Worker(f"exchange with rank {peer}", device)
        self._stream = torch.cuda.Stream(device=device)

    def send(self, tensor: torch.Tensor) -> Work:
        host = _host_copy_of(tensor)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._stream)

        def job() -> None:
            copied.synchronize()
            dist.send(host, self.peer, group=self.group)

        return _StagedWork(self._worker.submit(job), keep=tensor)

    def receive(self, tensor: torch.Tensor) -> Work:
        host = _host_copy_of(tensor)
        self._stream.wait_stream(torch.cuda.current_stream())  # `tensor` may reuse memory that is still being read

        def job() -> torch.cuda.Event:
            dist.recv(host, self.peer, group=self.group)
            with torch.cuda.stream(self._stream):
                tensor.copy_(host, non_blocking=True)
                arrived = torch.cuda.Event()
                arrived.record(self._stream)
            return arrived

        return _StagedWork(self._worker.submit(job), keep=(tensor, host))


@dataclass
class _StagedWork:
    """What `StagedLink` has been asked to do; `keep` holds the tensors until it is done."""

    done: Future
    keep: object

    def is_completed(self) -> bool:
        return self.done.done()

    def wait(self) -> None:
        arrived = self.done.result()
        if arrived is not None:
            torch.cuda.current_stream().wait_event(arrived)


def _host_copy_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=torch.cuda.is_available())


class Inbox:
    """Messages from a neighbour, in order.

    ahead  whether the receives of the next messages are posted while this one is used. While a receive is posted on
           NCCL, nothing may wait for the whole GPU (a timer that synchronises, the tuning of a kernel that is
           compiled at its first use): it would wait for a message that this stage has to cause itself. Without
           `ahead` a receive is posted when it is asked for. The messages that an iteration leaves for the next are
           always posted, so that their sender is free; they need nothing more from this stage.
    depth  how many receives are posted ahead: as many forwards as the sender runs further ahead than this stage (one
           at least), since on gloo a message does not travel before its receive is posted.
    """

    def __init__(self, link: Link):
        self.link, self.ahead, self.depth = link, True, 1
        self._expected = self._held = 0
        self._new_buffer: Callable[[], torch.Tensor] | None = None
        self._posted: deque[tuple[torch.Tensor, Work]] = deque()

    def expect(self, count: int, new_buffer: Callable[[], torch.Tensor], held: int = 0) -> None:
        """The neighbour will send `count` more messages that fit the tensors that `new_buffer` makes.

        held: how many of all that are outstanding then will not be taken before the next call.
        """
        self._expected += count
        self._held, self._new_buffer = held, new_buffer
        self._post_ahead()

    def take(self) -> torch.Tensor:
        """Wait for the next message; with `ahead`, the receives after it are posted before this returns."""
        if self.outstanding == 0:
            raise RuntimeError(f"no message is expected from rank {self.link.peer}")
        if not self._posted:
            self._post()
        tensor, work = self._posted.popleft()
        work.wait()
        self._post_ahead()
        return tensor

    @property
    def outstanding(self) -> int:
        """Messages announced and not taken yet."""
        return self._expected + len(self._posted)

    def _post_ahead(self) -> None:
        while self._expected and ((self.ahead and len(self._posted) < self.depth) or self.outstanding <= self._held):
            self._post()

    def _post(self) -> None:
        self._expected -= 1
        tensor = self._new_buffer()
        self._posted.append((tensor, self.link.receive(tensor)))


class Outbox:
    """Messages to a neighbour. A tensor is kept alive until it has left.

    limit  how many messages may be on their way; `put` waits for the oldest beyond that. It bounds memory on gloo,
           whose sends do not tell by themselves that they are done. The runtime sets one more than the microbatches
           in flight, which never makes a stage wait: the backward of an older one proves that its message arrived.
    """

    def __init__(self, link: Link, limit: int = 1 << 30):
        self.link, self.limit = link, limit
        self._leaving: deque[tuple[torch.Tensor, Work]] = deque()

    def put(self, tensor: torch.Tensor) -> None:
        """Send without waiting; the caller must not write to `tensor` any more."""
        while self._leaving and (len(self._leaving) >= self.limit or self._leaving[0][1].is_completed()):
            self._leaving.popleft()[1].wait()
        tensor = tensor.contiguous()
        self._leaving.append((tensor, self.link.send(tensor)))

    def flush(self) -> None:
        """Wait until everything has left."""
        while self._leaving:
            self._leaving.popleft()[1].wait()


@dataclass
class Exchange:
    """The four one-way channels of a stage; None where there is no neighbour.

    activations_in from stage s-1, activations_out to s+1, gradients_in from s+1, gradients_out to s-1.
    """

    activations_in: Inbox | None = None
    activations_out: Outbox | None = None
    gradients_in: Inbox | None = None
    gradients_out: Outbox | None = None

    def flush(self) -> None:
        for box in (self.activations_out, self.gradients_out):
            if box is not None:
                box.flush()


def connect(
    pipeline: list[int], rank: int, transport: str, device: torch.device, timeout: timedelta | None = None
) -> Exchange:
    """Make the process groups of `rank`'s boundaries in `pipeline` (the ranks of its stages, first to last).

    transport: "nccl", "gloo", or "auto" (the backend of the default group). GPU tensors over gloo are staged
    through the host. timeout: after which a lost neighbour is an error (default: torch's of the backend).
    Every rank of every pipeline must call this, at the same time.
    """
    backend = dist.get_backend() if transport == "auto" else transport
    link = StagedLink if backend == "gloo" and device.type == "cuda" else Link
    stage = pipeline.index(rank)
    exchange = Exchange()
    for parity in (0, 1):  # even boundaries, then odd ones: a stage is at one of each at most
        boundary = stage if stage % 2 == parity else stage - 1
        ends = pipeline[boundary : boundary + 2] if 0 <= boundary < len(pipeline) - 1 else [rank]
        # torch names a group by a counter that must agree on its members, so each rank makes equally many;
        # one without this boundary makes groups of its own, which cost nothing.
        groups = [
            dist.new_group(
                ends, backend=backend, timeout=timeout, use_local_synchronization=True, group_desc=f"2bw {way}"
            )
            for way in ("activations", "gradients")
        ]
        if ends == [rank]:
            continue
        above = boundary == stage  # this stage is the upper end: it sends activations and receives gradients
        activations, gradients = (link(group, ends[1] if above else ends[0], device) for group in groups)
        activations.greet(sends=above)
        gradients.greet(sends=not above)
        if above:
            exchange.activations_out, exchange.gradients_in = Outbox(activations), Inbox(gradients)
        else:
            exchange.activations_in, exchange.gradients_out = Inbox(activations), Outbox(gradients)
    return exchange
