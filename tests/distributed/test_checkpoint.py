"""A run that is saved and resumed is the uninterrupted run: bit for bit at the same sizes, to rounding at others."""

from __future__ import annotations



import pytest
import torch

from tests.distributed.compare import assert_same_runs, run_pipeline
from tests.distributed.training import Run, command

DROPOUT = dict(hidden_dropout=0.1, attention_dropout=0.1)
RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
SAVED = 3


def interrupted(folder, ranks: int, argv, again=None, ranks_again: int | None = None, prepare=None):
    """A run that saves after iteration SAVED and goes on, and another that starts from there with `again`."""
    whole = run_pipeline([*argv, "--save", str(folder), "--save-interval", str(SAVED)], ranks, prepare)
    rest = [*(again or argv), "--load", str(folder)]
    (folder / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    return whole, run_pipeline(rest, ranks_again or ranks)


def assert_goes_on(whole: list[Run], rest: list[Run]) -> None:
    """Bit for bit, rank by rank."""
    for before, after in zip(whole, rest, strict=True):
        assert after.iterations == list(range(SAVED + 1, 7))
        assert after.scales == before.scales[SAVED:] and after.skipped == before.skipped[SAVED:]
        assert [float(loss) for loss in after.losses] == [float(loss) for loss in before.losses[SAVED:]]
        assert before.weights.keys() == after.weights.keys()
        for name, weight in before.weights.items():
            assert torch.equal(after.weights[name], weight), name


CASES = {
    "fp32": (2, command(2, 3, "2bw", **DROPOUT)),
    "one stage": (1, command(1, 2, "2bw", **DROPOUT)),
    "four stages, bf16, recompute": (4, command(4, 4, "2bw", "--bf16", *RECOMPUTE, **DROPOUT)),
    "bf16, distributed optimizer, recompute": (
        4, command(2, 2, "2bw", "--bf16", "--use-distributed-optimizer", "--overlap-grad-reduce",
                   "--recompute-activations", width=2, **DROPOUT)),
    "fp32, distributed optimizer, fully reshardable": (
        2, command(2, 2, "2bw", "--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable", **DROPOUT)),
    "tensor parallel": (4, command(2, 2, "2bw", tensor_model_parallel_size=2, **DROPOUT)),
    "torch format": (2, command(2, 2, "2bw", "--bf16", ckpt_format="torch", **DROPOUT)),
    "torch format, distributed optimizer": (
        4, command(2, 2, "2bw", "--bf16", "--use-distributed-optimizer", width=2, ckpt_format="torch", **DROPOUT)),
    "sgd, one gradient slot": (
        2, command(2, 2, "2bw", optimizer="sgd", sgd_momentum=0.9, lr=0.1, min_lr=0.01, two_bw_gradient_slots=1,
                   **DROPOUT)),
    "pipedream-flush": (2, command(2, 2, "pipedream-flush", **DROPOUT)),
}


@pytest.mark.parametrize("name", CASES)
def test_resumed_run_is_the_uninterrupted_one(name, tmp_path):
    ranks, argv = CASES[name]
    assert_goes_on(*interrupted(tmp_path, ranks, argv))
