"""The optimizer in host memory, and shards of gradients: the reference's bits, and
those of the device's two slots."""

import itertools
import random
import threading
import time

import pytest

from megatron_2bw.base.local_ranks import WorldError, run_world
from tests.distributed.compare import (
    SGD,
    UNTIED,
    assert_equal_weights,
    assert_same_runs,
    check_rule,
    run_pipeline,
)
from tests.distributed.test_checkpoint import DROPOUT, assert_goes_on, moved
from tests.distributed.test_update_rule import POISONED, SCALE, poison
from tests.distributed.training import Run, command, delayed, train

HOST = "--two-bw-memory host"
SHARDS = "--two-bw-memory shard"
SHARDED = "--bf16 --use-distributed-optimizer"
CORRECTED = "--two-bw-correction 1,1"


@pytest.mark.proof("bf16", "fp16")
@pytest.mark.parametrize(
    "flags, changes, prepare, rule",
    [
        ("--bf16", {}, None, {}),
        ("--bf16", SGD, None, {}),
        ("--fp16", SCALE, poison, dict(poison=POISONED)),
    ],
    ids=["bf16", "sgd", "fp16"],
)
def test_the_reference(flags, changes, prepare, rule):
    check_rule(2, 4, UNTIED, HOST, flags, prepare=prepare, rule=rule, **changes)


def fuse(model, optimizer) -> None:
    """The kernels of the host, which round otherwise than torch's others."""
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            group["fused"] = True
            group["foreach"] = False


# The width and the flags.
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
        "--bf16 --two-bw-late 1 --log-num-zeros-in-grad",
    ),
    "sequence parallel": (
        1,
        f"--bf16 {UNTIED} --tensor-model-parallel-size 2 --sequence-parallel",
    ),
}
KEPT = [(name, HOST) for name in CASES]
KEPT += [(name, SHARDS) for name in CASES if "distributed" in CASES[name][1]]


@pytest.mark.proof(f"sharded, overlapped-{HOST}", f"sharded, overlapped-{SHARDS}")
@pytest.mark.parametrize("name, kept", KEPT)
def test_the_device(name, kept):
    width, flags = CASES[name]
    argv = command(2, 2, "2bw", flags, width=width)
    ranks = 4 if name == "sequence parallel" else 2 * width
    expected = run_pipeline(argv, ranks, fuse if kept == HOST else None)
    runs = run_pipeline(argv + kept.split(), ranks)
    for host, device in zip(runs, expected):
        assert host.losses == device.losses
        assert host.weights
        assert_equal_weights(host, device)


def train_with_delays(rank: int, argv: list[str], mutate) -> Run:
    """Each copy and step is delayed at random; gradients are copied in many portions.

    With a planted fault the first copy comes after the next backward, on a busy machine
    too.
    """
    from megatron_2bw.mcore import complete_gradients
    from megatron_2bw.mcore.host_memory import HostMemory
    from megatron_2bw.mcore.late_step import LateStep

    Portion = complete_gradients.Portion
    draw = random.Random(rank)
    for owner, name in ((Portion, "take"), (HostMemory, "give"), (LateStep, "run_job")):
        calls = itertools.count()

        def delay(calls=calls) -> None:
            first = next(calls) == 0
            time.sleep(3 if mutate and first else draw.choice([0, 0, 0.002, 0.01]))

        delayed(owner, name, delay)
    complete_gradients.PORTION = 4000
    if mutate is not None:
        mutate(Portion, HostMemory)
    return train(rank, argv)


def no_wait(portion, memory) -> None:
    portion.wait = lambda self: None


def early_release(portion, memory) -> None:
    delayed_take = portion.take

    def take(self) -> None:
        self._released.set()
        delayed_take(self)

    portion.take = take


def no_zeros(portion, memory) -> None:
    def take(self) -> None:
        self._copy.copy_(self._mine)
        self._released.set()

    portion.take = take


def late_weights(portion, memory) -> None:
    delayed_give = memory.give

    def give(self, views) -> None:
        threading.Timer(0.2, delayed_give, (self, views)).start()

    memory.give = give


def test_no_timing_changes_a_bit():
    argv = command(2, 2, "2bw", HOST, "--bf16", train_iters=50)
    runs = run_world(2, train_with_delays, argv, None)
    assert_same_runs(runs, run_pipeline(argv, 2))


@pytest.mark.parametrize("mutate", [no_wait, early_release, no_zeros, late_weights])
def test_a_planted_fault_is_found(mutate):
    argv = command(2, 2, "2bw", HOST, "--bf16", train_iters=8)
    expected = run_pipeline(argv, 2)
    with pytest.raises(AssertionError, match="differs by|NaN"):
        assert_same_runs(run_world(2, train_with_delays, argv, mutate), expected)


def fail_in_a_step(model, optimizer) -> None:
    from megatron_2bw.mcore.complete_gradients import Portion

    def take(self) -> None:
        raise RuntimeError("planted")

    Portion.take = take


def test_an_error_of_a_step_ends_the_run():
    """The next batch's backward waits for what the step would have released."""
    with pytest.raises(WorldError, match="planted"):
        run_pipeline(command(1, 2, "2bw", HOST, "--bf16"), 1, fail_in_a_step)


@pytest.mark.parametrize("to_host", [True, False])
@pytest.mark.parametrize("flags", [f"--bf16 --ckpt-format torch {CORRECTED}", SHARDED])
def test_a_resumed_run_may_move(flags, to_host, tmp_path):
    argv = command(2, 2, "2bw", flags, width=2, **DROPOUT)
    assert_goes_on(*moved(tmp_path, argv, to_host, prepare=fuse))
