"""The README's lines of plain torch train a small network on two ranks."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_2bw.base.local_ranks import run_world
from tests.plain import example

pytestmark = pytest.mark.cpu

README = Path(__file__).parents[2] / "README.md"


def my_stage(rank: int):
    layers = example.layers_of(rank, stages=2)
    return example.ModuleStage(layers, is_last=rank == 1)


def losses(rank: int, code: str) -> list[torch.Tensor]:
    dist.init_process_group("gloo")
    names = {"rank": rank, "MyStage": my_stage}
    exec(code, names)
    return list(names["stage"].losses.values())


@pytest.mark.proof
def test_the_plain_torch_lines():
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    first, *_, last = run_world(2, losses, code)[1]
    assert last < 0.5 * first
