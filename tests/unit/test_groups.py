"""Groups with names of their own, and groups for the step's thread: on one rank, with a
stand-in for the GPU."""

import copy
import itertools
from collections import Counter
from unittest import mock

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
    stream = mock.Mock()
    monkeypatch.setattr(torch.cuda, "is_initialized", mock.Mock(return_value=True))
    monkeypatch.setattr(torch.cuda, "current_stream", mock.Mock(return_value=stream))
    return stream.synchronize


@pytest.mark.parametrize("before", [(), ("other",), ("other", "other", "third")])
def test_a_name_depends_on_ranks_and_purpose_alone(world, monkeypatch, before):
    """So the two ends of a boundary agree, however many other groups each of them is
    in."""
    monkeypatch.setattr(process_groups, "_made", Counter())
    first = new_group([0], "data").group_name
    monkeypatch.setattr(process_groups, "_made", Counter())
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    names = [new_group([0], name).group_name for name in before]
    dist.new_group([0])
    assert new_group([0], "data").group_name == first
    names += [first, new_group([0], "data").group_name]
    assert len(set(names)) == len(names)


VALUES = torch.arange(3.0)


def arguments(group, result: torch.Tensor) -> dict[str, tuple]:
    """Each collective that Megatron or an optimizer calls in the step's thread."""
    values = VALUES.clone()
    add = dist.ReduceOp.SUM
    return {
        "barrier": (group,),
        "all_reduce": (values, add, group),
        "broadcast": (values, 0, group),
        "all_gather": ([result], values, group),
        "all_gather_into_tensor": (result, values, group),
        "reduce_scatter_tensor": (result, values, add, group),
    }


@pytest.mark.parametrize("name", arguments(None, VALUES))
def test_every_collective_ends_with_a_wait(name, world, waits):
    result = torch.empty(3)
    group = StepGroup(new_group([0], "step"))
    getattr(dist, name)(*arguments(group, result)[name])
    if "gather" in name or "scatter" in name:
        assert torch.equal(result, VALUES)
    waits.assert_called_once_with()


@pytest.mark.parametrize("async_ops", [False, True])
def test_coalesced_collectives_end_with_one_wait(world, waits, async_ops):
    """Megatron's bucket groups reduce so; with --overlap-grad-reduce the handle is
    waited for later."""
    group = StepGroup(new_group([0], "step"))
    tensors = [torch.arange(3.0), torch.ones(2)]
    with dist._coalescing_manager(group, async_ops=async_ops) as handle:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group, async_op=async_ops)
    if async_ops:
        waits.assert_not_called()
        handle.wait()
    waits.assert_called_once_with()
    assert torch.equal(tensors[0], VALUES)


def test_asked_for_its_ranks_it_answers_as_the_group(world):
    group = new_group([0], "step")
    step = StepGroup(group)
    assert (step.size(), step.rank(), dist.get_backend(step)) == (1, 0, "gloo")
    assert dist.get_process_group_ranks(step) == [0]
    assert dist.get_group_rank(step, 0) == 0
    assert step == group == step == StepGroup(group) == copy.copy(step)
    assert hash(step) == hash(group)
    assert step != new_group([0], "step")


def test_streams_are_distinct(monkeypatch):
    """torch gives out the 32 streams of a priority in turn; others take some of them
    too."""
    handles = itertools.cycle(range(POOL))

    class Stream:
        def __init__(self, device, priority):
            assert priority == -2
            self.cuda_stream = next(handles)

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr("megatron_2bw.engine.streams._taken", [])
    device = torch.device("cuda")
    taken = set()
    for number in range(POOL):
        taken.add(own_stream(device).cuda_stream)
        for _ in range(number % 3):
            Stream("cuda", -2)
    assert len(taken) == POOL
    with pytest.raises(RuntimeError, match="32 CUDA streams of priority -2"):
        own_stream(device)


def test_more_groups_than_streams_are_one_line(world, monkeypatch):
    backend = mock.Mock(return_value="nccl")
    monkeypatch.setattr(process_groups, "POOL", 2)
    monkeypatch.setattr(dist, "get_backend", backend)
    new_group([0], "data")
    assert process_groups.streams_warning() is None
    new_group([0], "activations")
    line = process_groups.streams_warning()
    assert line.startswith("> 3 process groups of NCCL share the 2 CUDA streams")
    assert "--two-bw-extra-warmup" in line
    backend.return_value = "gloo"
    assert process_groups.streams_warning() is None
