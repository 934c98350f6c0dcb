"""The neighbour exchange alone: order, one ahead, counts, and the path that stages GPU tensors through the host.

The staged path runs here with CPU tensors, the CPU answering for streams and events: its threads, queues and errors
are real, its copies are not asynchronous.
"""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from megatron_2bw.core import p2p as communication
from megatron_2bw.local_ranks import run_world


def connected(rank: int, pipeline: list[int], staged: bool) -> communication.Exchange:
    dist.init_process_group("gloo")
    if staged:
        communication.Link = communication.StagedLink
    return communication.connect(pipeline, rank, "auto", torch.device("cpu"))


def relay(rank: int, pipeline: list[int], staged: bool, messages: int) -> list[float]:
    """Activations go down the pipeline, each stage adds 1; the last stage sends them back as gradients."""
    exchange = connected(rank, pipeline, staged)
    new = lambda: torch.empty(3, 2)
    if exchange.activations_in is not None:
        exchange.activations_in.expect(messages, new)
    if exchange.gradients_in is not None:
        exchange.gradients_in.expect(messages, new)
    for k in range(messages):
        value = torch.full((3, 2), float(k)) if exchange.activations_in is None else exchange.activations_in.take()
        (exchange.activations_out or exchange.gradients_out).put(value + 1)
    seen = []
    if exchange.gradients_in is not None:
        for _ in range(messages):
            gradient = exchange.gradients_in.take()
            seen.append(gradient[0, 0].item())
            if exchange.gradients_out is not None:
                exchange.gradients_out.put(gradient)
    exchange.flush()
    for box in (exchange.activations_in, exchange.gradients_in):
        assert box is None or box.outstanding == 0
    dist.barrier()
    return seen


@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
@pytest.mark.parametrize("pipeline", [[0, 1], [0, 1, 2, 3], [3, 1, 0, 2]], ids=str)
def test_messages_arrive_in_order(pipeline, staged):
    seen = run_world(len(pipeline), relay, pipeline, staged, 20)
    for rank in pipeline[:-1]:
        assert seen[rank] == [float(k + len(pipeline)) for k in range(20)]


def two_pipelines(rank: int) -> float:
    """Ranks 0 and 2, 1 and 3 form pipelines of their own, as with width 2."""
    pipeline = [rank % 2, rank % 2 + 2]
    exchange = connected(rank, pipeline, staged=False)
    if rank < 2:
        exchange.activations_out.put(torch.full((1,), float(rank)))
        exchange.flush()
        value = float(rank)
    else:
        exchange.activations_in.expect(1, lambda: torch.empty(1))
        value = exchange.activations_in.take().item()
    dist.barrier()
    return value


def test_pipelines_side_by_side():
    assert run_world(4, two_pipelines) == [0.0, 1.0, 0.0, 1.0]


def received_ahead(rank: int, depth: int) -> bool:
    """While stage 1 works with message 0, the next `depth` are received although nobody asks for them, and no more."""
    exchange = connected(rank, [0, 1], staged=False)
    if rank == 0:
        for k in range(depth + 2):
            exchange.activations_out.put(torch.full((4,), float(k)))
        exchange.flush()
        dist.barrier()
        return True
    inbox = exchange.activations_in
    inbox.depth = depth
    inbox.expect(depth + 2, lambda: torch.zeros(4), held=1)
    inbox.take()
    posted, expected = [tensor for tensor, _ in inbox._posted], [float(k + 1) for k in range(depth)]
    deadline = time.monotonic() + 20
    while [tensor[3].item() for tensor in posted] != expected and time.monotonic() < deadline:
        time.sleep(0.01)  # gloo's work does not say when it is done
    arrived = [tensor[3].item() for tensor in posted] == expected
    for _ in range(depth + 1):
        inbox.take()
    dist.barrier()
    return arrived


@pytest.mark.parametrize("depth", [1, 3])
def test_messages_are_received_ahead(depth):
    assert run_world(2, received_ahead, depth) == [True, True]


def lost_neighbour(rank: int, staged: bool) -> str:
    """The neighbour dies; whoever waits for it is told, also when a staging thread did the waiting."""
    exchange = connected(rank, [0, 1], staged)
    dist.barrier()
    if rank == 0:
        time.sleep(0.5)  # the barrier's own messages have left
        torch.save("died", os.environ["WORLD_FOLDER"] + "/result0.pt")
        os._exit(0)
    exchange.activations_in.expect(1, lambda: torch.empty(4))
    try:
        exchange.activations_in.take()
    except RuntimeError as error:
        return type(error).__name__
    return "nothing raised"


@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
def test_a_lost_neighbour_raises(staged):
    assert run_world(2, lost_neighbour, staged)[1] != "nothing raised"


def bounded(rank: int, limit: int) -> int:
    """The most messages that an outbox keeps while its neighbour takes them one by one."""
    exchange = connected(rank, [0, 1], staged=False)
    most = 0
    if rank == 0:
        exchange.activations_out.limit = limit
        for k in range(50):
            exchange.activations_out.put(torch.full((4,), float(k)))
            most = max(most, len(exchange.activations_out._leaving))
        exchange.flush()
    else:
        exchange.activations_in.expect(50, lambda: torch.empty(4))
        assert [exchange.activations_in.take()[0].item() for _ in range(50)] == list(range(50))
    dist.barrier()
    return most


def test_an_outbox_keeps_few_messages():
    assert run_world(2, bounded, 3)[0] == 3


def taken_too_often(rank: int) -> str:
    exchange = connected(rank, [0, 1], staged=False)
    message = ""
    if rank == 1:
        try:
            exchange.activations_in.take()
        except RuntimeError as error:
            message = str(error)
    dist.barrier()
    return message


def test_taking_what_was_not_announced():
    assert run_world(2, taken_too_often)[1] == "no message is expected from rank 0"
