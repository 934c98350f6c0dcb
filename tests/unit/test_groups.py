"""Groups with names of their own, and groups for the step's thread: on one rank, with a
stand-in for the GPU."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
import torch.distributed as dist

from megatron_2bw.engine import process_groups
from megatron_2bw.engine.process_groups import StepGroup, new_group
from megatron_2bw.engine.streams import POOL, own_stream


@pytest.fixture
def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def waits(monkeypatch):
    """A GPU whose current stream notes each wait of the CPU."""
    noted: list[str] = []

    class Stream:
        def synchronize(self):
            noted.append("wait")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream())
    return noted


@pytest.mark.parametrize("before", [(), ("other",), ("other", "other", "third")])
def test_a_name_depends_on_ranks_and_purpose_alone(world, monkeypatch, before):
    """So the two ends of a boundary agree, however many other groups each of them is
    in."""
    monkeypatch.setattr(process_groups, "_made", Counter())
    first = new_group([0], "data").group_name
    monkeypatch.setattr(process_groups, "_made", Counter())
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    others = [new_group([0], name).group_name for name in before]
    dist.new_group([0])
    assert new_group([0], "data").group_name == first
    assert len({first, *others, new_group([0], "data").group_name}) == len(before) + 2


COLLECTIVES = {
    "all_reduce": lambda result, group: dist.all_reduce(
        result.copy_(torch.arange(3.0)), group=group
    ),
    "broadcast": lambda result, group: dist.broadcast(
        result.copy_(torch.arange(3.0)), src=0, group=group
    ),
    "all_gather": lambda result, group: dist.all_gather(
        [result], torch.arange(3.0), group
    ),
    "into a tensor": lambda result, group: dist.all_gather_into_tensor(
        result, torch.arange(3.0), group=group
    ),
    "reduce_scatter": lambda result, group: dist.reduce_scatter_tensor(
        result, torch.arange(3.0), group=group
    ),
    "barrier": lambda result, group: (
        dist.barrier(group=group),
        result.copy_(torch.arange(3.0)),
    ),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_collective_ends_with_a_wait(name, world, waits):
    """Each that Megatron or an optimizer calls in the step's thread."""
    result = torch.empty(3)
    COLLECTIVES[name](result, StepGroup(new_group([0], "step")))
    assert torch.equal(result, torch.arange(3.0)) and waits == ["wait"]


@pytest.mark.parametrize("async_ops", [False, True])
def test_coalesced_collectives_end_with_one_wait(world, waits, async_ops):
    """As Megatron's bucket groups reduce; with --overlap-grad-reduce the handle is
    waited for later."""
    group, tensors = (
        StepGroup(new_group([0], "step")),
        [torch.arange(3.0), torch.ones(2)],
    )
    with dist._coalescing_manager(group, async_ops=async_ops) as handle:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group, async_op=async_ops)
    if async_ops:
        assert waits == []
        handle.wait()
    assert waits == ["wait"]
    assert torch.equal(tensors[0], torch.arange(3.0))


def test_asked_for_its_ranks_it_answers_as_the_group(world):
    group = new_group([0], "step")
    step = StepGroup(group)
    assert (step.size(), step.rank(), dist.get_backend(step)) == (1, 0, "gloo")
    assert (
        dist.get_process_group_ranks(step) == [0] and dist.get_group_rank(step, 0) == 0
    )
    assert (
        step == group
        and group == step
        and step == StepGroup(group)
        and hash(step) == hash(group)
    )
    assert step != new_group([0], "step") and copy.copy(step) == step


def test_streams_are_distinct(monkeypatch):
    """torch gives out the 32 streams of a priority in turn; others take some of them
    too."""
    made = []

    class Stream:
        def __init__(self, device, priority):
            assert priority == -2
            made.append(self)
            self.cuda_stream = 1000 + len(made) % POOL

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr("megatron_2bw.engine.streams._taken", [])
    own = []
    for number in range(POOL):
        own.append(own_stream(torch.device("cuda")).cuda_stream)
        for _ in range(number % 3):
            Stream("cuda", -2)
    assert len(set(own)) == POOL
    with pytest.raises(RuntimeError, match="32 CUDA streams of priority -2"):
        own_stream(torch.device("cuda"))


def test_more_groups_than_streams_are_one_line(world, monkeypatch):
    monkeypatch.setattr(process_groups, "POOL", 2)
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    new_group([0], "data")
    assert process_groups.streams_warning() is None
    new_group([0], "activations")
    line = process_groups.streams_warning()
    assert (
        line.startswith("> 3 process groups of NCCL share the 2 CUDA streams")
        and "--two-bw-extra-warmup" in line
    )
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    assert process_groups.streams_warning() is None
