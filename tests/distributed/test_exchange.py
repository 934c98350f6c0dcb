"""The neighbour exchange alone: order, counts, and the path that stages GPU tensors
through the host.

The staged path runs here with CPU tensors, the CPU answering for streams and events:
its threads, queues and errors are real, its copies are not asynchronous.
"""

import functools
import os
import time

import pytest
import torch
import torch.distributed as dist

from megatron_2bw.base.local_ranks import run_world
from megatron_2bw.engine import p2p

pytestmark = pytest.mark.cpu


def connected(rank: int, pipeline: list[int], staged: bool) -> p2p.Neighbours:
    dist.init_process_group("gloo")
    if staged:
        p2p.Channel = p2p.HostStagedChannel
    return p2p.connect(pipeline, rank, "auto", torch.device("cpu"))


PIPELINE = [3, 1, 0, 2]
MESSAGES = 20


def relay(rank: int, staged: bool) -> list[float]:
    """Activations go down the pipeline, each stage adds 1; the last stage sends them
    back as gradients."""
    neighbours = connected(rank, PIPELINE, staged)
    activations = neighbours.activations_in
    gradients = neighbours.gradients_in
    receivers = [receiver for receiver in (activations, gradients) if receiver]
    for receiver in receivers:
        receiver.announce(MESSAGES, functools.partial(torch.empty, 3, 2))
    for k in range(MESSAGES):
        value = activations.receive() if activations else torch.full((3, 2), float(k))
        (neighbours.activations_out or neighbours.gradients_out).send(value + 1)
    seen = []
    if gradients:
        for _ in range(MESSAGES):
            gradient = gradients.receive()
            seen.append(gradient[0, 0].item())
            if neighbours.gradients_out:
                neighbours.gradients_out.send(gradient)
    neighbours.flush()
    for receiver in receivers:
        assert receiver.outstanding == 0
    dist.barrier()
    return seen


@pytest.mark.proof("staged")
@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
def test_messages_arrive_in_order(staged):
    seen = run_world(4, relay, staged)
    for rank in PIPELINE[:-1]:
        assert seen[rank] == [float(k + 4) for k in range(MESSAGES)]


def lost_neighbour(rank: int, staged: bool) -> str:
    """The neighbour dies; whoever waits for it is told, also when a staging thread did
    the waiting."""
    neighbours = connected(rank, [0, 1], staged)
    dist.barrier()
    if rank == 0:
        time.sleep(0.5)  # the barrier's own messages have left
        torch.save("died", os.environ["WORLD_FOLDER"] + "/result0.pt")
        os._exit(0)
    neighbours.activations_in.announce(1, functools.partial(torch.empty, 4))
    try:
        neighbours.activations_in.receive()
    except RuntimeError as error:
        return type(error).__name__
    return "nothing raised"


@pytest.mark.proof("direct")
@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
def test_a_lost_neighbour_raises(staged):
    assert run_world(2, lost_neighbour, staged)[1] != "nothing raised"
