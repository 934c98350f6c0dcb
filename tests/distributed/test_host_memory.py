"""The optimizer in host memory, and shards of gradients: the reference's bits, and
those of the device's two slots."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time

import pytest
import torch

from megatron_2bw.base.local_ranks import WorldError, run_world
from tests.distributed.compare import (
    SGD,
    UNTIED,
    assert_same,
    assert_same_runs,
    run_pipeline,
    run_reference,
)
from tests.distributed.test_checkpoint import DROPOUT, SAVED, assert_goes_on
from tests.distributed.test_update_rule import POISONED, poison
from tests.distributed.training import Run, command, train

HOST = "--two-bw-optimizer host"
SHARDS = "--two-bw-gradient-slots shard"
SHARDED = "--bf16 --use-distributed-optimizer"
CORRECTED = "--two-bw-correction extrapolate --two-bw-correction-gradient 1"


@pytest.mark.proof("bf16", "fp16")
@pytest.mark.parametrize(
    "flags, changes, rule",
    [
        ("--bf16", {}, {}),
        ("--bf16", SGD, dict(optimizer="sgd")),
        ("--fp16", dict(initial_loss_scale=4096, hysteresis=1), dict(poison=POISONED)),
    ],
    ids=["bf16", "sgd", "fp16"],
)
def test_the_reference(flags, changes, rule):
    flags = (UNTIED, *HOST.split(), *flags.split())
    runs = run_pipeline(
        command(2, 4, "2bw", *flags, **changes),
        2,
        poison if rule.get("poison") else None,
    )
    assert_same(
        runs,
        run_reference(runs, command(1, 4, "2bw", *flags, **changes), 4, **rule),
        exact=True,
    )


def fuse(model, optimizer) -> None:
    """The kernels of the host, which round otherwise than torch's others."""
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            group["fused"], group["foreach"] = True, False


CASES = {
    "fp32, corrected": (1, CORRECTED),
    "replicas": (2, "--bf16 --grad-reduce-in-bf16"),
    "sharded, overlapped": (
        2,
        f"{SHARDED} --overlap-grad-reduce --ddp-bucket-size 20000",
    ),
    "sharded, tokens, corrected": (
        2,
        f"{SHARDED} --calculate-per-token-loss {CORRECTED} --two-bw-sync-iterations 2",
    ),
    "sharded, fp32": (2, "--use-distributed-optimizer"),
    "evaluations": (
        1,
        f"--bf16 {CORRECTED} --eval-interval 2 --eval-iters 1 --log-params-norm",
    ),
    "some late, zeros": (
        1,
        "--bf16 --two-bw-late-microbatches 1 --log-num-zeros-in-grad",
    ),
    "sequence parallel": (
        1,
        f"--bf16 {UNTIED} --tensor-model-parallel-size 2 --sequence-parallel",
    ),
}


def fits(name: str, kept: str) -> bool:
    return kept == HOST or "distributed" in CASES[name][1]


@pytest.mark.proof(f"sharded, overlapped-{HOST}", f"sharded, overlapped-{SHARDS}")
@pytest.mark.parametrize(
    "name, kept",
    [(name, kept) for name in CASES for kept in (HOST, SHARDS) if fits(name, kept)],
)
def test_the_device(name, kept):
    width, flags = CASES[name]
    argv = command(2, 2, "2bw", *flags.split(), width=width)
    ranks = 2 * width * (1 + ("--sequence-parallel" in argv))
    expected = run_pipeline(argv, ranks, fuse if kept == HOST else None)
    for host, device in zip(run_pipeline([*argv, *kept.split()], ranks), expected):
        assert torch.equal(torch.tensor(host.losses), torch.tensor(device.losses))
        assert host.weights and all(
            torch.equal(weight, device.weights[name])
            for name, weight in host.weights.items()
        )


def train_with_delays(rank: int, argv: list[str], mutate) -> Run:
    """Each copy and step is delayed at random; gradients are copied in many portions.

    With a planted fault the first copy comes after the next backward, on a busy machine
    too.
    """
    from megatron_2bw.mcore import complete_gradients
    from megatron_2bw.mcore.host_memory import HostMemory
    from megatron_2bw.mcore.late_step import LateStep

    draw = random.Random(rank)

    def delayed(owner: type, name: str) -> None:
        call, calls = getattr(owner, name), itertools.count()

        def later(*args):
            time.sleep(
                3 if mutate and next(calls) == 0 else draw.choice([0, 0, 0.002, 0.01])
            )
            return call(*args)

        setattr(owner, name, later)

    complete_gradients.PORTION = 4000
    for owner, name in (
        (complete_gradients.Portion, "take"),
        (HostMemory, "give"),
        (LateStep, "run_job"),
    ):
        delayed(owner, name)
    if mutate is not None:
        mutate(complete_gradients.Portion, HostMemory)
    return train(rank, argv)


def no_wait(portion, memory) -> None:
    portion.wait = lambda self: None


def early_release(portion, memory) -> None:
    take = portion.take
    portion.take = lambda self: (self._released.set(), take(self))


def no_zeros(portion, memory) -> None:
    portion.take = lambda self: (self._copy.copy_(self._mine), self._released.set())


def late_weights(portion, memory) -> None:
    give = memory.give
    memory.give = lambda self, views: threading.Timer(0.2, give, (self, views)).start()


@pytest.mark.parametrize(
    "mutate", [None, no_wait, early_release, no_zeros, late_weights]
)
def test_no_timing_changes_a_bit(mutate):
    argv = command(
        2, 2, "2bw", *f"{HOST} --bf16".split(), train_iters=50 if mutate is None else 8
    )
    expected = run_pipeline(argv, 2)
    with (
        contextlib.nullcontext()
        if mutate is None
        else pytest.raises(AssertionError, match="differs by|NaN")
    ):
        assert_same_runs(
            run_world(2, train_with_delays, argv, mutate), expected, exact=True
        )


def fail_in_a_step(model, optimizer) -> None:
    from megatron_2bw.mcore.complete_gradients import Portion

    def take(self) -> None:
        raise RuntimeError("planted")

    Portion.take = take


def test_an_error_of_a_step_ends_the_run():
    """The next batch's backward waits for what the step would have released."""
    with pytest.raises(WorldError, match="planted"):
        run_pipeline(command(1, 2, "2bw", *f"{HOST} --bf16".split()), 1, fail_in_a_step)


@pytest.mark.parametrize("to_host", [True, False])
@pytest.mark.parametrize("flags", [f"--bf16 --ckpt-format torch {CORRECTED}", SHARDED])
def test_a_resumed_run_may_move(flags, to_host, tmp_path):
    argv = command(2, 2, "2bw", *flags.split(), width=2, **DROPOUT)
    here, there = ([*argv, *HOST.split()], None), (argv, fuse)
    (before, prepare), (after, prepare_rest) = (
        (there, here) if to_host else (here, there)
    )
    whole = run_pipeline(
        [*before, "--save", str(tmp_path), "--save-interval", str(SAVED)], 4, prepare
    )
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    assert_goes_on(
        whole, run_pipeline([*after, "--load", str(tmp_path)], 4, prepare_rest)
    )
