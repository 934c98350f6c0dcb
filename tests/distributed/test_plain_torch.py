"""The plain-torch example with real ranks over gloo: the reference's bits, no
Megatron."""

import pytest
import torch
import torch.distributed as dist

from megatron_2bw import Shape, connect, schedule_of
from megatron_2bw.base.local_ranks import run_world
from tests.plain import assert_same, example, make_update, reference

pytestmark = pytest.mark.cpu


def stage(rank: int, name: str, shape: Shape):
    dist.init_process_group("gloo")
    neighbours = connect(list(range(shape.stages)), rank)
    group = dist.new_group()

    def gather(tensor: torch.Tensor) -> list[torch.Tensor]:
        if name == "pipedream":  # a stage clips alone
            return [tensor]
        tensors = [torch.empty_like(tensor) for _ in range(shape.stages)]
        dist.all_gather(tensors, tensor, group=group)
        return tensors

    schedule = schedule_of(name)
    losses, weights = example.train(
        schedule, shape, rank, neighbours, gather, make_update
    )
    return losses, weights, reference(name, shape)


@pytest.mark.proof
@pytest.mark.parametrize("name, stages", [("2bw", 4), ("pipedream", 4), ("gpipe", 2)])
def test_the_references_bits(name, stages):
    shape = Shape(stages, 4, 0, 6)
    results = run_world(stages, stage, name, shape)
    losses, _, expected = results[-1]
    assert_same((losses, [weights for _, weights, _ in results]), expected)
