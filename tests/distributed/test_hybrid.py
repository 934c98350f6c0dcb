"""Megatron's HybridModel under 2bw: the reference's bits, and a GPT's where its layers
are a GPT's."""

import pytest

from tests.distributed.compare import (
    UNTIED,
    assert_same,
    assert_same_losses,
    run_pipeline,
    run_reference,
)
from tests.distributed.training import command

EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 32 --moe-aux-loss-coeff 1e-2 --disable-bias-linear"


def hybrid(stages: int, pattern: str, *flags: str) -> list[str]:
    layers = f"--hybrid-layer-pattern {pattern}"
    return command(stages, 4, "2bw", UNTIED, layers, *flags, num_layers=None)


@pytest.mark.proof("1-*-*-*E*E-")
@pytest.mark.parametrize(
    "stages, pattern, flags",
    [
        (2, "*-|*-|*E|*E", ""),  # two chunks a stage, which are joined
        (1, "*-*-*E*E", ""),
        (
            4,
            "*-|*-|E|*-",
            "--bf16 --normalization RMSNorm --recompute-granularity full "
            "--recompute-method uniform --recompute-num-layers 1",
        ),
    ],
)
def test_the_references_bits(stages, pattern, flags):
    runs = run_pipeline(hybrid(stages, pattern, EXPERTS, flags), stages)
    argv = hybrid(1, pattern.replace("|", ""), EXPERTS, flags)
    assert_same(runs, run_reference(runs, argv, 4))


def test_attention_and_mlps_are_a_gpt(tmp_path):
    gpt = command(2, 4, "2bw", UNTIED)
    run_pipeline([*gpt, "--save", str(tmp_path), "--save-interval", "6"], 2)
    load = ["--load", str(tmp_path), "--finetune", "--no-load-optim"]
    runs = run_pipeline([*gpt, *load], 2)
    assert_same_losses(run_pipeline(hybrid(2, "*-*-|*-*-", *load), 2), runs)
    assert len({loss.item() for loss in runs[-1].losses}) == 6
