"""Low-rank adapters: the reference's bits, those of other splits, and checkpoints that
hold the adapters alone."""

import re

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from megatron_2bw.base.local_ranks import WorldError
from megatron_2bw.mcore.checkpoints.folder import checkpoint_name
from tests.distributed.compare import (
    assert_close_losses,
    assert_same,
    run_pipeline,
    run_reference,
)
from tests.distributed.test_checkpoint import (
    DROPOUT,
    RECOMPUTE,
    SAVED,
    assert_goes_on,
    interrupted,
)
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


def lora(stages, microbatches, *flags, **changes) -> list[str]:
    adapters = "--lora-rank 4 --lora-alpha 6"
    return command(stages, microbatches, "2bw", adapters, *flags, **changes)


CASES = {
    "two": (2, LLAMA, {}),
    "one": (1, "", {}),
    "four": (4, f"--bf16 {RECOMPUTE} --clip-grad 0", {}),
    "host": (2, f"--bf16 {HOST} --lora-targets linear_fc1 linear_fc2", {}),
    "corrected": (2, "--two-bw-correction 1", dict(factor=1)),
    "experts": (2, EXPERTS, {}),
    "frozen last stage": (2, f"{FROZEN} [0,0,1,1]", {}),
    "frozen first stage": (2, f"{FROZEN} [1,1,0,0]", {}),
}


@pytest.mark.proof("two")
@pytest.mark.parametrize("name", CASES)
def test_the_reference(name):
    stages, flags, rule = CASES[name]
    runs = run_pipeline(lora(stages, 4, flags), stages)
    expected = run_reference(runs, lora(1, 4, flags), 4, **rule)
    assert_same(runs, expected)


# Stages, microbatches, width, tensor ranks and flags; of those with tensor ranks and
# stages the losses are compared.
SPLITS = {
    "shards": (2, 2, 2, 1, f"{SHARDED} --two-bw-memory shard"),
    "tensor parallel": (2, 4, 1, 2, ""),
    "sequence parallel": (2, 4, 1, 2, "--sequence-parallel"),
    "BERT": (2, 4, 1, 2, ""),
}


@pytest.mark.parametrize("name", SPLITS)
def test_splits_change_nothing(name):
    stages, microbatches, width, tensor, flags = SPLITS[name]
    script = []
    model = LLAMA.removeprefix("--swiglu")
    if name == "BERT":
        script = [BERT]
        model = ""
    sizes = dict(width=width, tensor_model_parallel_size=tensor)
    split = lora(stages, microbatches, model, flags, **sizes)
    found = run_pipeline(script + split, stages * width * tensor)[-1].losses
    assert len({*map(float, found)}) == len(found), "the losses stand still"
    whole = run_pipeline(script + lora(1, 4, model), 1)[-1]
    assert_close_losses(found, whole.losses, 1e-5)


def saved(folder, model: str) -> str:
    once = dict(save=folder, save_interval=1, train_iters=1, lr_warmup_iters=0)
    run_pipeline(command(1, 4, "megatron", model, **once), 1)
    return str(folder)


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> str:
    return saved(tmp_path_factory.mktemp("base"), LLAMA)


@pytest.mark.parametrize("form", ["torch_dist", "torch"])
def test_a_resumed_run_is_the_uninterrupted_one(form, base, tmp_path):
    flags = f"{LLAMA} --bf16 {SHARDED} --ckpt-format {form} --lora-base {base}"
    argv = lora(2, 2, flags, width=2, **DROPOUT)
    assert_goes_on(*interrupted(tmp_path, 4, argv))
    folder = tmp_path / checkpoint_name(SAVED)
    if form == "torch":
        file = folder / "mp_rank_00_000/model_optim_rng.pt"
        names = [*torch.load(file, weights_only=False)["model"]]
        assert len(names) == 4 * 2 * 2
    else:
        others = re.compile("two_bw|optimizer|rng|rerun|common")
        metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
        names = [name for name in metadata if not others.match(name)]
    assert names and all("_adapter." in name for name in names)


def test_a_run_with_a_frozen_stage_resumes_or_is_refused(tmp_path):
    model = f"{FROZEN} [0,0,1,1]"
    base = saved(tmp_path / "base", model.replace("--lora-targets linear_fc1", ""))
    plain = lora(2, 4, model, lora_base=base)
    argv = [*plain, *f"--save {tmp_path / 'run'} --save-interval {SAVED}".split()]
    whole = run_pipeline(argv, 2)
    load = f"--load {tmp_path / 'run'} --ckpt-step {SAVED}"
    assert_goes_on(whole, run_pipeline(argv + load.split(), 2))
    assert run_pipeline(plain + [SHARDED], 2)[-1].losses == whole[-1].losses
    with pytest.raises(WorldError, match="--lora-targets: .* a stage without adapters"):
        run_pipeline(argv + [SHARDED], 2)


def test_other_sizes(base, tmp_path):
    """The base and the adapters are cut anew, also SwiGLU's two halves."""
    keep = dict(lora_base=base, save=tmp_path, save_interval=SAVED)
    split = lora(2, 4, LLAMA, tensor_model_parallel_size=2, **keep)
    whole = run_pipeline(split, 4)[-1].losses
    load = dict(load=tmp_path, ckpt_step=SAVED)
    one = run_pipeline(lora(1, 4, LLAMA, **keep, **load), 1)[-1]
    assert_close_losses(one.losses, whole[SAVED:], 1e-5)
    again = run_pipeline(lora(1, 4, LLAMA, lora_base=base), 1)[-1]
    assert_close_losses(again.losses, whole, 1e-5)
