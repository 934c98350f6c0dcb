"""Megatron's HybridModel under 2bw: the reference's bits, and a GPT's where its layers
are a GPT's."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.compare import UNTIED, assert_same, run_pipeline, run_reference
from tests.distributed.training import command

EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 32 --moe-aux-loss-coeff 1e-2 --disable-bias-linear"


def hybrid(stages: int, pattern: str, *flags: str) -> list[str]:
    return command(
        stages,
        4,
        "2bw",
        UNTIED,
        "--hybrid-layer-pattern",
        pattern,
        *flags,
        num_layers=None,
    )


@pytest.mark.parametrize(
    "stages, pattern, flags",
    [
        (2, "*-|*-|*E|*E", EXPERTS),  # two chunks a stage, which are joined
        (1, "*-*-*E*E", EXPERTS),
        (4, "*-|*-|E|*-", f"{EXPERTS} --bf16 --normalization RMSNorm --recompute-granularity full "
         "--recompute-method uniform --recompute-num-layers 1"),
    ],
)  # fmt: skip
def test_the_references_bits(stages, pattern, flags):
    runs = run_pipeline(hybrid(stages, pattern, *flags.split()), stages)
    reference = hybrid(1, pattern.replace("|", ""), *flags.split())
    assert_same(runs, run_reference(runs, reference, 4), exact=True)


@pytest.mark.proof
def test_attention_and_mlps_are_a_gpt(tmp_path):
    gpt = command(2, 4, "2bw", UNTIED)
    run_pipeline([*gpt, "--save", str(tmp_path), "--save-interval", "6"], 2)
    load = ["--load", str(tmp_path), "--finetune", "--no-load-optim"]
    runs = (
        run_pipeline([*gpt, *load], 2),
        run_pipeline(hybrid(2, "*-*-|*-*-", *load), 2),
    )
    one, other = (torch.stack(run[-1].losses) for run in runs)
    assert torch.equal(one, other) and len({*one.tolist()}) == 6
