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

from megatron_2bw.core import p2p
from megatron_2bw.local_ranks import run_world

pytestmark = pytest.mark.cpu


def connected(rank: int, pipeline: list[int], staged: bool) -> p2p.Neighbours:
    dist.init_process_group("gloo")
    if staged:
        p2p.Channel = p2p.HostStagedChannel
    return p2p.connect(pipeline, rank, "auto", torch.device("cpu"))


def relay(rank: int, pipeline: list[int], staged: bool, messages: int) -> list[float]:
    """Activations go down the pipeline, each stage adds 1; the last stage sends them back as gradients."""
    neighbours = connected(rank, pipeline, staged)
    new = lambda: torch.empty(3, 2)
    for receiver in filter(None, (neighbours.activations_in, neighbours.gradients_in)):
        receiver.announce(messages, new)
    for k in range(messages):
        value = (
            torch.full((3, 2), float(k)) if neighbours.activations_in is None else neighbours.activations_in.receive()
        )
        (neighbours.activations_out or neighbours.gradients_out).send(value + 1)
    seen = []
    if neighbours.gradients_in is not None:
        for _ in range(messages):
            gradient = neighbours.gradients_in.receive()
            seen.append(gradient[0, 0].item())
            if neighbours.gradients_out is not None:
                neighbours.gradients_out.send(gradient)
    neighbours.flush()
    for receiver in (neighbours.activations_in, neighbours.gradients_in):
        assert receiver is None or receiver.outstanding == 0
    dist.barrier()
    return seen


@pytest.mark.proof("[3, 1, 0, 2]-staged")
@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
@pytest.mark.parametrize("pipeline", [[0, 1], [0, 1, 2, 3], [3, 1, 0, 2]], ids=str)
def test_messages_arrive_in_order(pipeline, staged):
    seen = run_world(len(pipeline), relay, pipeline, staged, 20)
    for rank in pipeline[:-1]:
        assert seen[rank] == [float(k + len(pipeline)) for k in range(20)]


def received_ahead(rank: int, depth: int) -> bool:
    """While stage 1 works with message 0, the next `depth` are received although nobody asks for them, and no more."""
    neighbours = connected(rank, [0, 1], staged=False)
    if rank == 0:
        for k in range(depth + 2):
            neighbours.activations_out.send(torch.full((4,), float(k)))
        neighbours.flush()
        dist.barrier()
        return True
    receiver = neighbours.activations_in
    receiver.prefetch_depth = depth
    receiver.announce(depth + 2, lambda: torch.zeros(4), carried_over=1)
    receiver.receive()
    posted, expected = [tensor for tensor, _ in receiver._posted], [float(k + 1) for k in range(depth)]
    deadline = time.monotonic() + 20
    while [tensor[3].item() for tensor in posted] != expected and time.monotonic() < deadline:
        time.sleep(0.01)  # gloo's work does not say when it is done
    arrived = [tensor[3].item() for tensor in posted] == expected
    for _ in range(depth + 1):
        receiver.receive()
    dist.barrier()
    return arrived


@pytest.mark.parametrize("depth", [1, 3])
def test_messages_are_received_ahead(depth):
    assert run_world(2, received_ahead, depth) == [True, True]


def lost_neighbour(rank: int, staged: bool) -> str:
    """The neighbour dies; whoever waits for it is told, also when a staging thread did the waiting."""
    neighbours = connected(rank, [0, 1], staged)
    dist.barrier()
    if rank == 0:
        time.sleep(0.5)  # the barrier's own messages have left
        torch.save("died", os.environ["WORLD_FOLDER"] + "/result0.pt")
        os._exit(0)
    neighbours.activations_in.announce(1, lambda: torch.empty(4))
    try:
        neighbours.activations_in.receive()
    except RuntimeError as error:
        return type(error).__name__
    return "nothing raised"


@pytest.mark.proof("direct")
@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
def test_a_lost_neighbour_raises(staged):
    assert run_world(2, lost_neighbour, staged)[1] != "nothing raised"
