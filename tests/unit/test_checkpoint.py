"""What a checkpoint needs of torch's optimizers, and which checkpoints a run refuses."""

from __future__ import annotations

import argparse
import copy
from types import SimpleNamespace

import pytest
import torch

from megatron_2bw.checkpoints import optimizer_state
from megatron_2bw.checkpoints import state as checkpoint
from megatron_2bw.errors import UserError

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


def test_without_an_optimizer():
    optimizer_state.complete_optimizer(None)
    optimizer_state.unshare_steps(None)


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


# --- which checkpoints are refused -----------------------------------------------------------------------------------

SAVED = dict(
    num_layers=4,
    hidden_size=32,
    num_attention_heads=4,
    vocab_size=127,
    max_position_embeddings=16,
    swiglu=False,
    position_embedding_type="learned_absolute",
    fp16=False,
    bf16=True,
    use_distributed_optimizer=True,
    optimizer="adam",
    tensor_model_parallel_size=1,
    pipeline_model_parallel_size=2,
    no_save_optim=None,
)
RUN = dict(SAVED, load="folder", finetune=False, no_load_optim=None)
DISTRIBUTED = {"distrib_optim_sharding_type": "dp_reshardable"}


def refusal(run: dict | None = None, then: dict | None = None, metadata: dict | None = None) -> str | None:
    head = {"args": argparse.Namespace(**SAVED | (then or {})), "content_metadata": metadata}
    try:
        checkpoint.check_head(argparse.Namespace(**RUN | (run or {})), head)
    except UserError as fault:
        assert "\n" not in str(fault) and str(fault).startswith("--load folder: ")
        return str(fault)
    return None


@pytest.mark.parametrize(
    "run, then, expected",
    [
        (dict(num_layers=8), {}, "it was saved with --num-layers 4, but this run is with --num-layers 8"),
        (dict(hidden_size=64), {}, "with --hidden-size 32, but"),
        (dict(vocab_size=500), {}, "with --vocab-size 127, but"),
        (dict(max_position_embeddings=32), {}, "with --max-position-embeddings 16, but"),
        (dict(swiglu=True), {}, "it was saved without --swiglu, but this run is with --swiglu"),
        (dict(bf16=False), {}, "its optimizer state was saved with --bf16 or --fp16, but this run is in fp32"),
        (dict(use_distributed_optimizer=False), {}, "with --use-distributed-optimizer, but this run is without"),
        (dict(optimizer="sgd"), {}, "with --optimizer adam, but this run is with --optimizer sgd"),
        (
            dict(pipeline_model_parallel_size=4),
            {},
            "with --pipeline-model-parallel-size 2, and cannot be split otherwise",
        ),
        (dict(tensor_model_parallel_size=2), {}, "--dist-ckpt-optim-fully-reshardable can change its sizes"),
    ],
)
def test_a_checkpoint_that_does_not_fit(run, then, expected):
    message = refusal(run, then, DISTRIBUTED)
    assert message is not None and expected in message
    assert ("--no-load-optim" in message) == ("optimizer" in message)


@pytest.mark.parametrize(
    "run, then, metadata",
    [
        ({}, {}, DISTRIBUTED),
        (dict(no_load_optim=True, bf16=False), {}, DISTRIBUTED),
        (dict(finetune=True, vocab_size=500, optimizer="sgd", num_layers=2), {}, DISTRIBUTED),
        (dict(bf16=False, fp16=True), {}, DISTRIBUTED),
        (dict(optimizer="sgd"), dict(no_save_optim=True), DISTRIBUTED),
        (dict(pipeline_model_parallel_size=4), {}, {"distrib_optim_sharding_type": "fully_reshardable"}),
        (dict(position_embedding_type="rope", max_position_embeddings=64), dict(position_embedding_type="rope"), None),
    ],
)
def test_a_checkpoint_that_fits(run, then, metadata):
    assert refusal(run, then, metadata) is None


def test_released_weights_have_no_optimizer():
    head = {"args": argparse.Namespace(**SAVED | dict(optimizer="sgd"))}
    checkpoint.check_head(argparse.Namespace(**RUN), head, release=True)


def test_a_checkpoint_without_arguments_is_left_to_megatron():
    checkpoint.check_head(argparse.Namespace(**RUN), {})
