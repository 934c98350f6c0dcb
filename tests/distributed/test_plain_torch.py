"""The plain-torch example with real ranks over gloo: the reference's bits under all schedules, no Megatron."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_2bw import SCHEDULES, Shape, connect
from megatron_2bw.local_ranks import run_world
from tests.plain import assert_same, example, make_update, reference, schedule

pytestmark = pytest.mark.cpu


def stage(rank: int, name: str, shape: Shape):
    dist.init_process_group("gloo")
    neighbours, group = connect(list(range(shape.stages)), rank), dist.new_group()

    def gather(tensor: torch.Tensor) -> list[torch.Tensor]:
        if name == "pipedream":  # a stage clips alone
            return [tensor]
        tensors = [torch.empty_like(tensor) for _ in range(shape.stages)]
        dist.all_gather(tensors, tensor, group=group)
        return tensors

    return example.train(schedule(name), shape, rank, neighbours, gather, make_update)


def expected(rank: int, name: str, shape: Shape):
    return reference(name, shape)


@pytest.mark.proof("2bw-4", "pipedream-4", "gpipe-2")
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_references_bits(name, stages):
    shape = Shape(stages, 4, 0, 6)
    results = run_world(stages, stage, name, shape)
    found = results[-1][0], [weights for _, weights in results]
    assert_same(found, run_world(1, expected, name, shape)[0])
