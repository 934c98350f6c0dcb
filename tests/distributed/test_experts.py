"""Mixtures of experts: the reference's bits, and those of runs that split the same
model in another way."""

from __future__ import annotations

import re

import pytest
import torch

from megatron_2bw.base.local_ranks import own_output, run_world
from tests.distributed.compare import (
    UNTIED,
    assert_close,
    assert_same,
    assert_same_runs,
    run_pipeline,
    run_reference,
)
from tests.distributed.test_checkpoint import DROPOUT, SAVED, assert_goes_on
from tests.distributed.test_host_memory import HOST, fuse
from tests.distributed.test_late_step import WATCHED, train_with_delays, watch
from tests.distributed.test_update_rule import POISONED, poison
from tests.distributed.training import command

BIAS = "--moe-router-enable-expert-bias"
CAPACITY = "--moe-expert-capacity-factor 1.0 --moe-token-dispatcher-type alltoall"
EXPERTS = """
--disable-bias-linear --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-layer-freq [0,1,1,1]
--moe-shared-expert-intermediate-size 32 --moe-router-score-function sigmoid --moe-router-bias-update-rate 0.1
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3
--moe-token-dispatcher-type allgather
"""


def experts(stages, microbatches, *flags, width=1, **changes) -> list[str]:
    return command(
        stages,
        microbatches,
        "2bw",
        UNTIED,
        *EXPERTS.split(),
        *flags,
        width=width,
        **changes,
    )


@pytest.mark.proof("two")
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
            f"{BIAS} --fp16 --moe-aux-loss-coeff 1",
            dict(initial_loss_scale=4096, hysteresis=1),
            dict(poison=POISONED),
        ),
        (2, f"{CAPACITY} --moe-router-load-balancing-type seq_aux_loss", {}, {}),
    ],
    ids=["two", "one", "four", "late", "host", "fp16", "capacity"],
)
def test_the_reference(stages, flags, changes, rule):
    argv = lambda stages: experts(stages, 4, *flags.split(), **changes)
    runs = run_pipeline(argv(stages), stages, poison if rule.get("poison") else None)
    assert_same(runs, run_reference(runs, argv(1), 4, **rule), exact=True)


SPLIT = "--expert-model-parallel-size 2"
SHARDED = "--use-distributed-optimizer"
FULL = (
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
)
FLUSH = "--pipeline-schedule"
# Of one model: flags, and others that give the same numbers. Equal bits, if the
# additions have one order.
PAIRS = {
    "megatron": (
        f"{BIAS} {SPLIT} --pipeline-schedule pipedream-flush",
        f"{BIAS} {SPLIT} --pipeline-schedule megatron",
        True,
    ),
    "recomputed": (f"{BIAS} {SPLIT} {FULL}", f"{BIAS} {SPLIT}", True),
    "one slot, evaluations": (
        f"{SPLIT} --two-bw-gradient-slots 1 --eval-interval 2 --eval-iters 1",
        SPLIT,
        True,
    ),
    "split": (f"{BIAS} {SPLIT} --moe-token-dispatcher-type alltoall", BIAS, False),
    "shards": (
        f"{BIAS} {SPLIT} {SHARDED} --overlap-grad-reduce",
        f"{BIAS} {SPLIT}",
        False,
    ),
    "one slot of shards": (
        f"{SPLIT} {SHARDED} --two-bw-gradient-slots shard",
        f"{SPLIT} {SHARDED}",
        True,
    ),
    "on the host": (
        f"{BIAS} {SPLIT} {SHARDED} --bf16 {HOST}",
        f"{BIAS} {SPLIT} {SHARDED} --bf16",
        True,
    ),
    "first stage dense": (
        f"{SPLIT} --moe-layer-freq [0,0,1,1]",
        "--moe-layer-freq [0,0,1,1]",
        False,
    ),
    "tensor parallel": (
        f"{SPLIT} --tensor-model-parallel-size 2 --sequence-parallel",
        "",
        False,
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_splits_and_choices_of_memory_change_nothing(name):
    *both, exact = PAIRS[name]
    argvs = [[*experts(2, 2, width=2), *flags.split()] for flags in both]
    ranks, prepare = (
        4 * (1 + ("--sequence-parallel" in argvs[0])),
        fuse if name == "on the host" else None,
    )
    found, expected = (
        run_pipeline(argvs[0], ranks),
        run_pipeline(argvs[1], min(ranks, 4), prepare),
    )
    tolerance = 1e-5
    if "--sequence-parallel" in argvs[0]:  # a rank has slices of the weights
        assert_close(
            *(torch.stack(runs[-1].losses) for runs in (found, expected)),
            "losses",
            exact,
            tolerance,
        )
    else:
        assert_same_runs(found, expected, exact, tolerance)


def test_no_collective_of_the_training_thread_spans_stages():
    argv = experts(
        2,
        2,
        *f"{BIAS} {SPLIT} {SHARDED} --overlap-grad-reduce".split(),
        *WATCHED,
        width=2,
    )
    for run in run_world(4, watch, argv):
        assert run.events and all(
            event.startswith("2bw step: ") for event in run.events
        ), run.events


def test_random_timings_change_nothing():
    argv = experts(2, 2, *f"{BIAS} {SPLIT} {SHARDED}".split(), width=2, train_iters=20)
    assert_same_runs(
        run_world(4, train_with_delays, argv, 0.006, timeout=250),
        run_pipeline(argv, 4),
        exact=True,
    )


@pytest.mark.parametrize("form", ["torch_dist", "torch"])
def test_a_resumed_run_is_the_uninterrupted_one(form, tmp_path):
    argv = experts(
        2,
        2,
        *f"{BIAS} {SPLIT} {SHARDED} --bf16 --ckpt-format {form}".split(),
        width=2,
        **DROPOUT,
    )
    whole = run_pipeline(
        [*argv, "--save", str(tmp_path), "--save-interval", str(SAVED)], 4
    )
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    assert_goes_on(whole, run_pipeline([*argv, "--load", str(tmp_path)], 4))


@pytest.mark.parametrize(
    "flags", [BIAS, f"{BIAS} {SHARDED} --dist-ckpt-optim-fully-reshardable"]
)
def test_a_resumed_run_may_split_experts_otherwise(flags, tmp_path):
    """The second from what the first has saved. Sums are rounded in another order."""
    argv = [
        *experts(1, 2, *flags.split(), width=4),
        "--save",
        str(tmp_path),
        "--save-interval",
        "2",
    ]
    whole = run_pipeline([*argv, "--expert-model-parallel-size", "2"], 4)
    for start, split in ((2, "4"), (4, "2")):
        more = [
            "--load",
            str(tmp_path),
            "--ckpt-step",
            str(start),
            "--expert-model-parallel-size",
            split,
        ]
        rest = run_pipeline([*argv, *more], 4)
        assert rest[-1].iterations == list(range(start + 1, 7))
        assert_close(
            *(torch.stack(runs[-1].losses[start - 6 :]) for runs in (rest, whole)),
            "losses",
            False,
            1e-5,
        )


def logged(run, model) -> None:
    run.events = re.findall(r"(?:load_balancing_loss|z_loss): (\S+)", own_output())


def test_the_auxiliary_losses_of_a_line_are_those_of_its_batch():
    """One stage runs no forward before the last backward of the batch before; its
    norm's sum has another order."""
    one, two = (
        run_pipeline(experts(d, 4, BIAS, log_interval=1), d, None, logged)[-1].events
        for d in (1, 2)
    )
    assert [*map(float, one)] == pytest.approx([*map(float, two)], rel=1e-5) and len(
        set(one)
    ) > 6
