"""Flags whose effect depends on others."""

from __future__ import annotations

import pytest

from tests.distributed.training import BERT, command
from tests.unit.command_lines import complaint

pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.mark.parametrize(
    "flags",
    [
        ["--position-embedding-type", "rope", "--rotary-base", "100"],
        ["--optimizer", "sgd", "--sgd-momentum", "0.5"],
        ["--optimizer", "muon", "--muon-momentum", "0.8", "--adam-beta2", "0.95"],
        ["--optimizer", "muon", "--muon-scalar-optimizer", "lion", "--lion-beta1", "0.9"],
        ["--lr-decay-style", "WSD", "--lr-wsd-decay-iters", "2"],
        ["--use-mup", "--mup-base-hidden-size", "16"],
        ["--recompute-activations", "--recompute-modules", "core_attn"],
        ["--manual-gc", "--manual-gc-interval", "2"],
        ["--null-tokenizer-pad-id", "3"],
        ["--reset-position-ids", "--eod-mask-loss"],
        ["--rotary-percent=0.5", "--use-rotary-position-embeddings"],
        ["--fp16", "--initial-loss-scale", "64", "--min-loss-scale", "2", "--loss-scale-window", "5", "--hysteresis=1"],
        ["--bf16", "--loss-scale", "64"],
        ["--use-distributed-optimizer", "--loss-scale", "64"],
        ["--swiglu", "--no-bias-swiglu-fusion"],
        ["--save", "folder", "--save-interval", "2", "--ckpt-format", "torch"],
        [
            "--save",
            "new",
            "--save-interval=2",
            "--load",
            "new",
            "--no-load-optim",
            "--no-load-rng",
            "--ckpt-format=torch",
        ],
        ["--clip-grad", "inf"],
        ["--seed", "1"],
    ],
    ids=" ".join,
)
def test_flags_with_effect_are_accepted(flags):
    assert complaint(command(2, 2, "2bw", *flags), 2) is None


@pytest.mark.parametrize(
    "flags, expected",
    [
        (["--mask-prob", "0"], "--mask-prob 0.0: it must be greater than 0 and less than 1"),
        (["--short-seq-prob", "1.5"], "--short-seq-prob 1.5: it must be at least 0 and at most 1"),
        (
            ["--seq-length", "4"],
            "--seq-length 4 is too short for a pair of sentences: --mock-data of a BERT needs 5 or more",
        ),
        (["--seq-length", "5"], None),
    ],
    ids=lambda case: " ".join(case) if isinstance(case, list) else None,
)
def test_numbers_of_a_bert(flags, expected):
    assert complaint([BERT, *command(2, 2, "2bw", *flags)], 2) == expected


@pytest.mark.parametrize(
    "extra, level, backend, fits",
    [(2, 2, "nccl", False), (1, 2, "nccl", True), (2, 1, "nccl", True), (2, 2, "gloo", True)],
)
def test_timers_that_wait_for_the_gpu_allow_one_more_forward_ahead(extra, level, backend, fits, monkeypatch):
    argv = command(
        2,
        6,
        "2bw",
        "--no-barrier-with-level-1-timing",
        two_bw_extra_warmup=extra,
        timing_log_level=level,
        distributed_backend=backend,
    )
    message = complaint(argv, 2)
    assert message is None if fits else message.startswith("--two-bw-extra-warmup of 2 or more does not work with")


@pytest.mark.parametrize(
    "flags",
    [
        ["--bert-no-binary-head"],
        ["--mask-prob", "0.2", "--short-seq-prob", "0"],
        ["--position-embedding-type", "rope", "--rotary-percent", "0.5"],
        ["--swiglu", "--normalization", "RMSNorm"],
    ],
    ids=" ".join,
)
def test_flags_with_effect_in_a_bert_are_accepted(flags):
    assert complaint([BERT, *command(2, 2, "2bw", *flags)], 2) is None


@pytest.mark.parametrize("schedule", ["2bw", "pipedream-flush", "megatron"])
@pytest.mark.parametrize("name", ["pp", "dp_cp", "embd", "tp"])
@pytest.mark.parametrize("flag", ["--nccl-communicator-config-path", "--high-priority-stream-groups"])
def test_settings_of_communicators_that_a_schedule_replaces(flag, name, schedule, tmp_path, monkeypatch):
    (tmp_path / "nccl.yaml").write_text(f"{name}:\n  max_ctas: 4\n")
    given = name if flag.endswith("groups") else str(tmp_path / "nccl.yaml")
    message = complaint(command(2, 2, schedule, flag, given), 2)
    replaced = {"2bw": {"pp", "dp_cp", "embd"}, "pipedream-flush": {"pp"}, "megatron": set()}[schedule]
    assert (message is not None) == (name in replaced)
    assert message is None or message.startswith(flag) and message.endswith(f"take {name} out")


def test_settings_of_communicators_that_are_no_yaml(tmp_path, monkeypatch):
    (tmp_path / "nccl.yaml").write_text("{dp_cp: [")
    message = complaint(command(2, 2, "2bw", nccl_communicator_config_path=tmp_path / "nccl.yaml"), 2)
    assert message.startswith(f"--nccl-communicator-config-path {tmp_path}/nccl.yaml: ") and "\n" not in message
