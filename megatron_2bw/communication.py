"""Asynchronous neighbour exchange between pipeline stages.

Each boundary has one process group per direction, so that messages that go different ways never queue behind
each other. Receives are posted one ahead: message k+1 travels while k is computed with.

Invariant: the runtime announces with `Inbox.expect` just the messages that the neighbour sends in an iteration,
so that receives and sends of a boundary are equal in number at every iteration's end.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from dataclasses import dataclass
from typing import Callable, Protocol

import torch
import torch.distributed as dist


class Work(Protocol):
    def wait(self) -> object: ...
    def is_completed(self) -> bool: ...


class Link:
    """One direction of one boundary: a two-rank process group, over which tensors go in one order."""

    def __init__(self, group: dist.ProcessGroup, peer: int):
        self.group, self.peer = group, peer

    def greet(self, sends: bool, device: torch.device) -> None:
        """Exchange a first message. NCCL builds its communicator at the first use and waits for the other end there,
        so both ends must come to it at the same time: before training, not inside it."""
        token = torch.zeros(1, device=device)
        (self.send(token) if sends else self.receive(token)).wait()

    def send(self, tensor: torch.Tensor) -> Work:
        return dist.isend(tensor, self.peer, group=self.group)

    def receive(self, tensor: torch.Tensor) -> Work:
        return dist.irecv(tensor, self.peer, group=self.group)


class StagedLink(Link):
    """A gloo link for GPU tensors: they travel through pinned host memory, copied by a thread of this link's own.

    So several stages can share one GPU, and servers without a common NCCL network can be joined.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int):
        super().__init__(group, peer)
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stream: torch.cuda.Stream | None = None
        threading.Thread(target=self._serve, daemon=True, name=f"exchange with rank {peer}").start()

    def _serve(self) -> None:
        while True:
            self._jobs.get()()

    def send(self, tensor: torch.Tensor) -> Work:
        host = _host_copy_of(tensor)
        stream = self._copy_stream(tensor.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            host.copy_(tensor, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(stream)

        def job() -> None:
            copied.synchronize()
            dist.send(host, self.peer, group=self.group)

        return self._submit(job, keep=tensor)

    def receive(self, tensor: torch.Tensor) -> Work:
        host = _host_copy_of(tensor)
        stream = self._copy_stream(tensor.device)
        stream.wait_stream(torch.cuda.current_stream())  # `tensor` may reuse memory that is still being read
        work: _StagedWork

        def job() -> None:
            dist.recv(host, self.peer, group=self.group)
            with torch.cuda.stream(stream):
                tensor.copy_(host, non_blocking=True)
                work.arrived = torch.cuda.Event()
                work.arrived.record(stream)

        work = self._submit(job, keep=(tensor, host))
        return work

    def _copy_stream(self, device: torch.device) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device=device)
        return self._stream

    def _submit(self, job: Callable[[], None], keep: object) -> "_StagedWork":
        work = _StagedWork(keep)

        def run() -> None:
            try:
                job()
            except BaseException as error:  # raised again by wait(), in the training thread
                work.error = error
            work.done.set()

        self._jobs.put(run)
        return work


class _StagedWork:
    """What `StagedLink` has been asked to do; `keep` holds the tensors until it is done."""

    def __init__(self, keep: object):
        self.keep, self.done = keep, threading.Event()
        self.error: BaseException | None = None
        self.arrived: torch.cuda.Event | None = None

    def is_completed(self) -> bool:
        return self.done.is_set()

    def wait(self) -> None:
        self.done.wait()
        if self.error is not None:
            raise self.error
        if self.arrived is not None:
            torch.cuda.current_stream().wait_event(self.arrived)


def _host_copy_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=torch.cuda.is_available())


class Inbox:
    """Messages from a neighbour, in order, one received ahead."""

    def __init__(self, link: Link):
        self.link = link
        self._expected = 0
        self._new_buffer: Callable[[], torch.Tensor] | None = None
        self._posted: tuple[torch.Tensor, Work] | None = None

    def expect(self, count: int, new_buffer: Callable[[], torch.Tensor]) -> None:
        """The neighbour will send `count` more messages that fit the tensors that `new_buffer` makes."""
        self._expected += count
        self._new_buffer = new_buffer
        if self._posted is None:
            self._post()

    def take(self) -> torch.Tensor:
        """Wait for the next message; the receive of the one after it is posted before this returns."""
        if self._posted is None:
            raise RuntimeError(f"no message is expected from rank {self.link.peer}")
        tensor, work = self._posted
        work.wait()
        self._post()
        return tensor

    @property
    def outstanding(self) -> int:
        """Messages announced and not taken yet."""
        return self._expected + (self._posted is not None)

    def _post(self) -> None:
        self._posted = None
        if self._expected:
            self._expected -= 1
            tensor = self._new_buffer()
            self._posted = tensor, self.link.receive(tensor)


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


def connect(pipeline: list[int], rank: int, transport: str, device: torch.device) -> Exchange:
    """Make the process groups of `rank`'s boundaries in `pipeline` (the ranks of its stages, first to last).

    transport: "nccl", "gloo", or "auto" (the backend of the default group). GPU tensors over gloo are staged
    through the host. Every rank of every pipeline must call this, at the same time.
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
            dist.new_group(ends, backend=backend, use_local_synchronization=True, group_desc=f"2bw {way}")
            for way in ("activations", "gradients")
        ]
        if ends == [rank]:
            continue
        above = boundary == stage  # this stage is the upper end: it sends activations and receives gradients
        activations, gradients = (link(group, ends[1] if above else ends[0]) for group in groups)
        activations.greet(sends=above, device=device)
        gradients.greet(sends=not above, device=device)
        if above:
            exchange.activations_out, exchange.gradients_in = Outbox(activations), Inbox(gradients)
        else:
            exchange.activations_in, exchange.gradients_out = Inbox(activations), Outbox(gradients)
    return exchange
