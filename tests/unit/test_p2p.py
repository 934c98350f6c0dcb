"""When receives are posted, and what a sender keeps, with channels that only count."""

from functools import partial

import pytest
import torch

from megatron_2bw.engine.p2p import Neighbours, Receiver, Sender
from tests.plain import Arrived

BUFFER = partial(torch.empty, 1)


class Numbers:
    """A channel whose messages are 0, 1, 2, ...; those posted are counted."""

    peer = 0

    def __init__(self):
        self.posted = 0

    def receive(self, tensor: torch.Tensor) -> Arrived:
        arrive = partial(tensor.fill_, self.posted)
        self.posted += 1
        return Arrived(arrive)


def receive(receiver: Receiver, count: int) -> list[float]:
    return [receiver.receive().item() for _ in range(count)]


@pytest.mark.parametrize(
    "prefetch, depth, carried_over, posted",
    [
        (True, 1, 0, [1, 2, 3, 4, 4]),
        (True, 2, 0, [2, 3, 4, 4, 4]),
        (False, 1, 0, [0, 1, 2, 3, 4]),
        (False, 2, 2, [0, 1, 4]),
        (True, 1, 2, [1, 2, 4]),
    ],
)
def test_posted_receives(prefetch, depth, carried_over, posted):
    """After four messages are announced, and after each one that is received; the next
    iteration takes the others."""
    channel = Numbers()
    receiver = Receiver(channel)
    receiver.prefetch = prefetch
    receiver.prefetch_depth = depth
    receiver.announce(4, BUFFER, carried_over)
    seen = []
    counts = [channel.posted]
    for _ in range(4 - carried_over):
        seen += receive(receiver, 1)
        counts.append(channel.posted)
    assert counts == posted
    assert receiver.outstanding == carried_over
    receiver.announce(1, BUFFER)
    seen += receive(receiver, carried_over + 1)
    assert seen == [0, 1, 2, 3, 4]
    assert receiver.outstanding == 0


def test_what_depends_on_the_pending_step_is_held_back():
    """Two of six messages are left from before, and two are sent before the neighbour's
    step."""
    stepping = True

    def is_stepping() -> bool:
        return stepping

    channel = Numbers()
    receiver = Receiver(channel)
    receiver.prefetch_depth = 6
    receiver.prefetch = False
    receiver.announce(2, BUFFER)
    receiver.prefetch = True
    receiver.hold_back(2, is_stepping)
    receiver.announce(4, BUFFER)
    assert channel.posted == 4
    assert receive(receiver, 4) == [0, 1, 2, 3]
    assert channel.posted == 4
    with pytest.raises(AssertionError, match="depends on this stage's step"):
        receiver.receive()
    stepping = False
    receiver.post_early()
    assert channel.posted == 6
    # another step: what is posted stays, what is announced later is counted anew
    stepping = True
    assert receive(receiver, 1) == [4]
    receiver.hold_back(1, is_stepping)
    receiver.announce(3, BUFFER)
    assert channel.posted == 7


class NotSent(Arrived):
    def is_completed(self) -> bool:
        return False


class Slow:
    """A channel that has sent a message when it is waited for."""

    def __init__(self):
        self.tensors = []
        self.sent = []

    def send(self, tensor: torch.Tensor) -> Arrived:
        number = len(self.tensors)
        self.tensors.append(tensor)
        return NotSent(partial(self.sent.append, number))


def test_a_sender_waits_for_the_oldest_message_beyond_its_limit():
    channel = Slow()
    sender = Sender(channel, max_pending=2)
    for number in range(4):
        sender.send(torch.full((2, 3), float(number)).t())
        assert channel.sent == list(range(number - 1))
    pending = [tensor[0, 0].item() for tensor, _ in sender._pending]
    assert pending == [2, 3], "kept until they are sent"
    for tensor in channel.tensors:
        assert tensor.is_contiguous()
        assert tensor.shape == (3, 2)
    Neighbours(gradients_out=sender).flush()
    assert channel.sent == [0, 1, 2, 3]
