"""Low-rank adapters: the reference's bits, those of other splits, and checkpoints that
hold the adapters alone."""

from __future__ import annotations

import re

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from megatron_2bw.base.local_ranks import WorldError
from tests.distributed.compare import assert_same, run_pipeline, run_reference
from tests.distributed.test_checkpoint import DROPOUT, RECOMPUTE, SAVED, assert_goes_on
from tests.distributed.test_experts import EXPERTS
from tests.distributed.test_host_memory import HOST
from tests.distributed.training import BERT, command

SHARDED = "--use-distributed-optimizer"
FROZEN = (
    EXPERTS.replace(
        "--moe-shared-expert-intermediate-size 32", "--lora-targets linear_fc1"
    )
    + "--moe-layer-freq"
)
LLAMA = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --group-query-attention "
    "--num-query-groups 2"
)


def lora(stages, microbatches, *flags, width=1, **changes) -> list[str]:
    more = ("--lora-rank", "4", "--lora-alpha", "6", *flags)
    return command(stages, microbatches, "2bw", *more, width=width, **changes)


@pytest.mark.proof("two")
@pytest.mark.parametrize(
    "stages, flags, rule",
    [
        (2, LLAMA, {}),
        (1, "", {}),
        (4, f"--bf16 {RECOMPUTE} --clip-grad 0", {}),
        (2, f"--bf16 {HOST} --lora-targets linear_fc1 linear_fc2", {}),
        (2, "--two-bw-correction extrapolate", dict(factor=1)),
        (2, EXPERTS, {}),
        (2, f"{FROZEN} [0,0,1,1]", {}),
        (2, f"{FROZEN} [1,1,0,0]", {}),
    ],
    ids=[
        "two",
        "one",
        "four",
        "host",
        "corrected",
        "experts",
        "frozen last stage",
        "frozen first stage",
    ],
)
def test_the_reference(stages, flags, rule):
    argv = lambda stages: lora(stages, 4, *flags.split())
    runs = run_pipeline(argv(stages), stages)
    assert_same(runs, run_reference(runs, argv(1), 4, **rule), exact=True)


# Stages, microbatches, width, tensor ranks and flags; of those with tensor ranks and
# stages the losses are compared.
SPLITS = {
    "shards": (2, 2, 2, 1, f"{SHARDED} --two-bw-gradient-slots shard"),
    "tensor parallel": (2, 4, 1, 2, ""),
    "sequence parallel": (2, 4, 1, 2, "--sequence-parallel"),
    "BERT": (2, 4, 1, 2, ""),
}


@pytest.mark.parametrize("name", SPLITS)
def test_splits_change_nothing(name):
    stages, microbatches, width, tensor, flags = SPLITS[name]
    script, model = (
        [BERT] * (name == "BERT"),
        LLAMA.removeprefix("--swiglu").split() if name != "BERT" else (),
    )
    split = [
        *lora(stages, microbatches, *model, *flags.split(), width=width),
        f"--tensor-model-parallel-size={tensor}",
    ]
    found = run_pipeline(script + split, stages * width * tensor)[-1].losses
    expected = run_pipeline(script + lora(1, 4, *model), 1)[-1].losses
    assert len({float(loss) for loss in found}) == len(found), "the losses stand still"
    torch.testing.assert_close(
        torch.stack(found), torch.stack(expected), rtol=1e-5, atol=0
    )


def saved(folder, model: str) -> str:
    once = dict(save=folder, save_interval=1, train_iters=1, lr_warmup_iters=0)
    run_pipeline(command(1, 4, "megatron", *model.split(), **once), 1)
    return str(folder)


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> str:
    return saved(tmp_path_factory.mktemp("base"), LLAMA)


@pytest.mark.parametrize("form", ["torch_dist", "torch"])
def test_a_resumed_run_is_the_uninterrupted_one(form, base, tmp_path):
    flags = (
        *LLAMA.split(),
        "--bf16",
        SHARDED,
        "--ckpt-format",
        form,
        "--lora-base",
        base,
    )
    argv = lora(2, 2, *flags, width=2, **DROPOUT)
    whole = run_pipeline(
        [*argv, "--save", str(tmp_path), "--save-interval", str(SAVED)], 4
    )
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    assert_goes_on(whole, run_pipeline([*argv, "--load", str(tmp_path)], 4))
    adapters = [name for name in whole[0].weights if "_adapter." in name]
    if form == "torch":
        held = torch.load(
            tmp_path / f"iter_{SAVED:07d}/mp_rank_00_000/model_optim_rng.pt",
            weights_only=False,
        )["model"]
        assert len(held) == len(adapters) == 4 * 2 * 2
    else:
        held = (
            FileSystemReader(tmp_path / f"iter_{SAVED:07d}")
            .read_metadata()
            .state_dict_metadata
        )
        held = [
            name
            for name in held
            if not re.match("two_bw|optimizer|rng|rerun|common", name)
        ]
        assert held and all("_adapter." in name for name in held)


def test_a_run_with_a_frozen_stage_resumes_or_is_refused(tmp_path):
    model = f"{FROZEN} [0,0,1,1]"
    keep = (
        *model.split(),
        "--lora-base",
        saved(tmp_path / "base", model.replace("--lora-targets linear_fc1", "")),
    )
    argv = [
        *lora(2, 4, *keep),
        "--save",
        str(tmp_path / "run"),
        "--save-interval",
        str(SAVED),
    ]
    whole = run_pipeline(argv, 2)
    assert_goes_on(
        whole,
        run_pipeline(
            [*argv, "--load", str(tmp_path / "run"), "--ckpt-step", str(SAVED)], 2
        ),
    )
    assert run_pipeline([*lora(2, 4, *keep), SHARDED], 2)[-1].losses == whole[-1].losses
    with pytest.raises(
        WorldError,
        match="--lora-targets: Megatron cannot save a stage without adapters",
    ):
        run_pipeline([*argv, SHARDED], 2)


def test_other_sizes(base, tmp_path):
    """The base and the adapters are cut anew, also SwiGLU's two halves."""
    keep = (
        *LLAMA.split(),
        "--lora-base",
        base,
        "--save",
        str(tmp_path),
        "--save-interval",
        str(SAVED),
    )
    whole = run_pipeline([*lora(2, 4, *keep), "--tensor-model-parallel-size", "2"], 4)[
        -1
    ].losses
    one = run_pipeline(
        [*lora(1, 4, *keep), "--load", str(tmp_path), "--ckpt-step", str(SAVED)], 1
    )[-1]
    torch.testing.assert_close(
        torch.stack(one.losses), torch.stack(whole[SAVED:]), rtol=1e-5, atol=0
    )
    again = run_pipeline(lora(1, 4, *LLAMA.split(), "--lora-base", base), 1)[-1].losses
    torch.testing.assert_close(
        torch.stack(again), torch.stack(whole), rtol=1e-5, atol=0
    )
