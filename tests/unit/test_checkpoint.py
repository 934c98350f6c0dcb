"""What a checkpoint needs of torch's optimizers."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch

from megatron_2bw.checkpoints import optimizer_state

OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "sgd with momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_from_a_completed_state_have_the_same_bits(name):
    """Also with a gradient of zero, whose sign a sum with zeros could change."""
    torch.manual_seed(1)
    start = torch.randn(50)
    params = [torch.nn.Parameter(start.clone()) for _ in range(2)]
    optimizers = [OPTIMIZERS[name]([param]) for param in params]
    part = SimpleNamespace(optimizer=optimizers[0], init_state_fn=None)
    optimizer_state.complete_optimizer(part)
    assert part.init_state_fn("any", "arguments") is None
    assert bool(optimizers[0].state[params[0]]) == (name != "sgd")
    for _ in range(4):
        gradient = torch.randn(50)
        gradient[:5] = 0
        for param, optimizer in zip(params, optimizers):
            param.grad = gradient.clone()
            optimizer.step()
        assert torch.equal(params[0], params[1])


def test_state_that_is_there_is_left_alone():
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([param])
    param.grad = torch.ones(3)
    optimizer.step()
    before = copy.deepcopy(optimizer.state[param])
    optimizer_state.complete_optimizer(SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=optimizer)]))
    assert all(torch.equal(before[key], value) for key, value in optimizer.state[param].items())


def test_every_parameter_has_a_step_of_its_own():
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = torch.optim.AdamW(params)
    step = torch.tensor(5.0)
    for param in params:
        optimizer.state[param] = {"step": step, "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
        param.grad = torch.ones(3)
    optimizer_state.unshare_steps(SimpleNamespace(optimizer=optimizer))
    optimizer.step()
    assert [float(optimizer.state[param]["step"]) for param in params] == [6.0, 6.0]


def test_a_common_step_of_zero_is_saved():
    part = SimpleNamespace(optimizer=torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))]))
    content = {"state": {0: {"exp_avg": 1}}, "param_groups": []}
    optimizer_state.name_step_zero({"optimizer": content}, part)
    assert float(content["state"]["common_step"]) == 0
    kept = {"state": {0: {"exp_avg": 1}, "common_step": torch.tensor(4.0)}, "param_groups": []}
    optimizer_state.name_step_zero(kept, part)
    assert float(kept["state"]["common_step"]) == 4
