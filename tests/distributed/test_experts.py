"""Mixtures of experts: the reference's bits, and those of runs that split the same model in another way."""

from __future__ import annotations

import pytest

from tests.distributed.compare import UNTIED, assert_same, assert_same_runs, run_pipeline, run_reference
from tests.distributed.test_update_rule import POISONED, poison
from tests.distributed.training import command

BIAS = "--moe-router-enable-expert-bias"
EXPERTS = dict(
    num_experts=4,
    moe_router_topk=2,
    moe_ffn_hidden_size=32,
    moe_router_load_balancing_type="aux_loss",
    moe_aux_loss_coeff=1e-2,
    moe_z_loss_coeff=1e-3,
    moe_token_dispatcher_type="allgather",
    moe_shared_expert_intermediate_size=32,
    moe_layer_freq="[0,1,1,1]",
    moe_router_score_function="sigmoid",
    moe_router_bias_update_rate=1e-2,
)


def experts(stages, microbatches, *flags, schedule="2bw", width=1, **changes) -> list[str]:
    flags = (UNTIED, "--disable-bias-linear", *flags)
    return command(stages, microbatches, schedule, *flags, width=width, **EXPERTS | changes)


@pytest.mark.parametrize(
    "stages, flags, changes, rule",
    [
        (2, BIAS, {}, {}),
        (1, BIAS, {}, {}),
        (4, BIAS, dict(clip_grad=0), {}),
        (2, f"{BIAS} --bf16 --two-bw-late-microbatches 1", {}, dict(late=1)),
        (2, f"{BIAS} --bf16 --two-bw-optimizer host", {}, {}),
        (
            2,
            f"{BIAS} --fp16",
            dict(initial_loss_scale=4096, hysteresis=1, moe_aux_loss_coeff=1.0),
            dict(poison=POISONED),
        ),
        (
            2,
            "",
            dict(
                moe_router_load_balancing_type="seq_aux_loss",
                moe_expert_capacity_factor=1.0,
                moe_token_dispatcher_type="alltoall",
            ),
            {},
        ),
    ],
    ids=["two", "one", "four", "late", "host", "fp16", "capacity"],
)
def test_the_reference(stages, flags, changes, rule):
    argv = lambda stages: experts(stages, 4, *flags.split(), **changes)
    runs = run_pipeline(argv(stages), stages, poison if rule.get("poison") else None)
    assert_same(runs, run_reference(runs, argv(1), 4, **rule), exact=True)
