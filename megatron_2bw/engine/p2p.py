"""Asynchronous messages between neighbouring pipeline stages.

Each boundary has one process group per direction, so that messages of different
directions never queue behind each other (docs/design.md, [Note: collectives concurrent
with point-to-point traffic]). Receives are posted early: message k + 1 travels while
message k is in use (`Receiver.prefetch`).

Invariant: `Receiver.announce` names exactly the messages that the neighbour sends in an
iteration, so that the receives and sends of a boundary are equal in number at the end
of every iteration.
"""

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_2bw.engine.process_groups import new_group
from megatron_2bw.engine.streams import own_stream
from megatron_2bw.engine.worker import Worker


class Work(Protocol):
    """A message under way."""

    def wait(self) -> object: ...
    def is_completed(self) -> bool: ...


@dataclass(eq=False)
class Channel:
    """One direction of one boundary. Tensors arrive in the order in which they are
    sent.

    lanes  process groups of two ranks, which take the messages in turn. On NCCL each
           has a stream: a message that waited in it for an unfinished one would stop
           its hardware queue (CUDA_DEVICE_MAX_CONNECTIONS).
    peer   the global rank of the other end
    """

    lanes: Sequence[dist.ProcessGroup]
    peer: int
    device: torch.device

    def __post_init__(self) -> None:
        self._next = itertools.cycle(self.lanes)

    @property
    def occupies_device(self) -> bool:
        """Whether a posted message is a kernel that occupies the GPU until its peer
        arrives (NCCL)."""
        return dist.get_backend(self.lanes[0]) == "nccl"

    def preconnect(self, sends: bool) -> None:
        """Exchange a message per lane now: NCCL makes a communicator at first use and
        blocks until the peer does."""
        for _ in self.lanes:
            token = torch.zeros(1, device=self.device)
            work = self.send(token) if sends else self.receive(token)
            work.wait()

    def send(self, tensor: Tensor) -> Work:
        """Start to send; `tensor` must not change until the work is complete."""
        work = dist.isend(tensor, self.peer, group=next(self._next))
        assert work is not None, "this rank is not in the group"
        return work

    def receive(self, tensor: Tensor) -> Work:
        """Start to receive into `tensor`."""
        work = dist.irecv(tensor, self.peer, group=next(self._next))
        assert work is not None, "this rank is not in the group"
        return work


class HostStagedChannel(Channel):
    """A gloo channel for GPU tensors: they travel through pinned host memory, copied by
    a thread of the channel.

    So several stages can share one GPU, and servers without a common NCCL network can
    be joined.
    """

    occupies_device = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._worker = Worker(f"exchange with rank {self.peer}", self.device)
        self._stream = own_stream(self.device)

    def send(self, tensor: Tensor) -> Work:
        host = _host_copy_of(tensor)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
            copied = self._stream.record_event()

        def job() -> None:
            copied.synchronize()
            dist.send(host, self.peer, group=next(self._next))

        return _StagedWork(self._worker.submit(job), keep=tensor)

    def receive(self, tensor: Tensor) -> Work:
        host = _host_copy_of(tensor)
        # `tensor` may reuse memory that is still being read
        self._stream.wait_stream(torch.cuda.current_stream())

        def job() -> torch.cuda.Event:
            dist.recv(host, self.peer, group=next(self._next))
            with torch.cuda.stream(self._stream):
                tensor.copy_(host, non_blocking=True)
                arrived = torch.cuda.Event()
                arrived.record(self._stream)
            return arrived

        return _StagedWork(self._worker.submit(job), keep=(tensor, host))


@dataclass
class _StagedWork:
    """A message of `HostStagedChannel`; `keep` holds the tensors until it is
    complete."""

    done: Future[torch.cuda.Event | None]
    keep: object

    def is_completed(self) -> bool:
        return self.done.done()

    def wait(self) -> None:
        arrived = self.done.result()
        if arrived is not None:
            torch.cuda.current_stream().wait_event(arrived)


def _host_copy_of(tensor: Tensor) -> Tensor:
    pinned = torch.cuda.is_available()
    return torch.empty_like(tensor, device="cpu", pin_memory=pinned)


class Receiver:
    """Messages from a neighbour, in order.

    prefetch        whether the receives of the next messages are posted while this one
                    is used. While a receive is posted on NCCL, nothing may wait for the
                    whole GPU (a timer that synchronises, the tuning of a kernel at its
                    first use): it would wait for a message that depends on this stage.
                    Without `prefetch` a receive is posted when it is asked for. The
                    messages that an iteration leaves for the next are always posted, so
                    that their sender is free; they depend on this stage no more.
    prefetch_depth  how many receives are posted early: as many as the sender runs
                    forwards ahead of this stage, at least one, since on gloo a message
                    does not travel before its receive is posted
    """

    def __init__(self, channel: Channel):
        self.channel = channel
        self.prefetch = True
        self.prefetch_depth = 1
        self._expected = 0
        self._carried_over = 0
        # receives that may be posted while `_is_stepping`; None: as many as wanted
        self._allowed: int | None = None
        self._is_stepping: Callable[[], bool] | None = None
        self._new_buffer: Callable[[], Tensor] | None = None
        self._posted: deque[tuple[Tensor, Work]] = deque()

    def announce(
        self,
        count: int,
        new_buffer: Callable[[], Tensor],
        carried_over: int = 0,
    ) -> None:
        """The neighbour will send `count` more messages, each into an empty tensor of
        `new_buffer`.

        carried_over: how many of the outstanding messages the stage will not receive
        before the next announcement
        """
        self._expected += count
        self._carried_over = carried_over
        self._new_buffer = new_buffer
        self.post_early()

    def hold_back(
        self,
        sent_before_step: int,
        is_stepping: Callable[[], bool],
    ) -> None:
        """While `is_stepping`, post only messages that do not depend on this stage's
        pending step.

        They are those of earlier announcements, which are sent, and the next
        `sent_before_step`, which the neighbour sends before its own step. With another
        receive posted on NCCL, a wait for the whole GPU in the step's thread (by
        cudaFree, by the loading of a kernel) would never end: the sender waits for this
        stage's part of the norm.
        """
        self._allowed = self._expected + sent_before_step
        self._is_stepping = is_stepping

    def post_early(self) -> None:
        """Post what may be posted by now."""
        while self._expected and self._may_post():
            early = self.prefetch and len(self._posted) < self.prefetch_depth
            if not early and self.outstanding > self._carried_over:
                return
            self._post()

    def receive(self) -> Tensor:
        """Wait for the next message. With `prefetch` the receives after it are posted
        before this returns.

        RuntimeError if no message is announced, or if the neighbour is lost.
        """
        if self.outstanding == 0:
            raise RuntimeError(f"no message is expected from rank {self.channel.peer}")
        if not self._posted:
            self._post()
        tensor, work = self._posted.popleft()
        work.wait()
        self.post_early()
        return tensor

    @property
    def outstanding(self) -> int:
        """Messages announced and not received yet."""
        return self._expected + len(self._posted)

    def _may_post(self) -> bool:
        if self._is_stepping is None or not self._is_stepping():
            self._allowed = None
        return self._allowed != 0

    def _post(self) -> None:
        assert self._new_buffer is not None
        assert self._may_post(), "a message is needed that depends on this stage's step"
        self._expected -= 1
        if self._allowed is not None:
            self._allowed -= 1
        tensor = self._new_buffer()
        self._posted.append((tensor, self.channel.receive(tensor)))


class Sender:
    """Messages to a neighbour. A tensor is kept alive until it is sent.

    max_pending  how many messages may be under way; `send` waits for the oldest beyond
                 that. It bounds the memory on gloo, whose sends do not report their
                 completion. `Pipeline` sets one more than the microbatches in flight,
                 which never makes a stage wait: the backward of an older one proves
                 that its message arrived.
    """

    def __init__(self, channel: Channel, max_pending: int = 1 << 30):
        self.channel = channel
        self.max_pending = max_pending
        self._pending: deque[tuple[Tensor, Work]] = deque()

    def send(self, tensor: Tensor) -> None:
        """Send without waiting; the caller must not write to `tensor` any more."""
        while self._pending:
            _, oldest = self._pending[0]
            if len(self._pending) < self.max_pending and not oldest.is_completed():
                break
            self._wait_for_oldest()
        tensor = tensor.contiguous()
        self._pending.append((tensor, self.channel.send(tensor)))

    def flush(self) -> None:
        """Wait until everything is sent."""
        while self._pending:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        _, work = self._pending.popleft()
        work.wait()


@dataclass
class Neighbours:
    """The four one-way connections of a stage; None where there is no neighbour.

    activations_in from stage s-1, activations_out to s+1, gradients_in from s+1,
    gradients_out to s-1.
    """

    activations_in: Receiver | None = None
    activations_out: Sender | None = None
    gradients_in: Receiver | None = None
    gradients_out: Sender | None = None

    @property
    def occupies_device(self) -> bool:
        """Whether a posted receive occupies the GPU until its message arrives."""
        for receiver in (self.activations_in, self.gradients_in):
            if receiver is not None and receiver.channel.occupies_device:
                return True
        return False

    def flush(self) -> None:
        """Wait until everything is sent."""
        for sender in (self.activations_out, self.gradients_out):
            if sender is not None:
                sender.flush()


def connect(
    pipeline: list[int],
    rank: int,
    transport: str = "auto",
    device: torch.device = torch.device("cpu"),
    timeout: timedelta | None = None,
    lanes: Sequence[int] = (),
) -> Neighbours:
    """Make the process groups of `rank`'s boundaries in `pipeline` (the ranks of its
    stages, first to last).

    transport: "nccl", "gloo", or "auto" (the backend of the default group). GPU tensors
    over gloo are staged through the host. timeout: after which a lost neighbour is an
    error (default: torch's of the backend). lanes: process groups of each boundary and
    direction (default: one); as many as the stage before the boundary runs forwards
    ahead of the one behind it. Every rank of every pipeline must call this, at the same
    time.
    """
    backend = dist.get_backend() if transport == "auto" else transport
    channel = Channel
    if backend == "gloo" and device.type == "cuda":
        channel = HostStagedChannel
    stage = pipeline.index(rank)
    neighbours = Neighbours()
    # even boundaries, then odd ones: a stage is at one of each at most
    for parity in (0, 1):
        # this stage is the upper end: it sends activations and receives gradients
        above = stage % 2 == parity
        boundary = stage if above else stage - 1
        exists = 0 <= boundary < len(pipeline) - 1
        # A rank without this boundary makes groups of itself: see `new_group`.
        ends = pipeline[boundary : boundary + 2] if exists else [rank]
        count = max(lanes[parity::2], default=1)
        down = [new_group(ends, "activations", backend, timeout) for _ in range(count)]
        up = [new_group(ends, "gradients", backend, timeout) for _ in range(count)]
        if not exists:
            continue
        peer = ends[1] if above else ends[0]
        activations = channel(down, peer, device)
        gradients = channel(up, peer, device)
        activations.preconnect(sends=above)
        gradients.preconnect(sends=not above)
        if above:
            neighbours.activations_out = Sender(activations)
            neighbours.gradients_in = Receiver(gradients)
        else:
            neighbours.activations_in = Receiver(activations)
            neighbours.gradients_out = Sender(gradients)
    return neighbours


def connect_group(
    group: dist.ProcessGroup,
    pipeline: list[int],
    rank: int,
    device: torch.device,
) -> None:
    """Exchange a message with each neighbour over `group`, in one batch: NCCL makes its
    communicator now.

    For messages that are sent in batches, and at first in the middle of a run. Every
    rank of `pipeline` must call this.
    """
    if dist.get_backend(group) == "gloo":  # it is connected since it was made
        return
    stage = pipeline.index(rank)
    messages = []
    for neighbour, exchange in ((stage - 1, dist.irecv), (stage + 1, dist.isend)):
        if 0 <= neighbour < len(pipeline):
            token = torch.zeros(1, device=device)
            peer = pipeline[neighbour]
            messages.append(dist.P2POp(exchange, token, peer, group))
    if messages:
        for work in dist.batch_isend_irecv(messages):
            work.wait()
