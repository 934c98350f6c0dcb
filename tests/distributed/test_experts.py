"""Mixtures of experts: the reference's bits, and those of runs that split the same
model in another way."""

import re
from typing import NamedTuple

import pytest

from megatron_2bw.base.local_ranks import own_output, run_world
from tests.distributed.compare import (
    UNTIED,
    assert_close_losses,
    assert_same_losses,
    assert_same_runs,
    check_rule,
    run_pipeline,
)
from tests.distributed.test_checkpoint import (
    DROPOUT,
    SHARDED,
    assert_goes_on,
    interrupted,
)
from tests.distributed.test_checkpoint import RECOMPUTE as FULL
from tests.distributed.test_host_memory import HOST, fuse
from tests.distributed.test_late_step import (
    WATCHED,
    assert_only_the_step_spans_stages,
    train_with_delays,
)
from tests.distributed.test_update_rule import POISONED, SCALE, poison
from tests.distributed.training import Run, command

BIAS = "--moe-router-enable-expert-bias"
CAPACITY = "--moe-expert-capacity-factor 1.0 --moe-token-dispatcher-type alltoall"
EXPERTS = """
--disable-bias-linear --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-layer-freq [0,1,1,1]
--moe-shared-expert-intermediate-size 32 --moe-router-score-function sigmoid --moe-router-bias-update-rate 0.1
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3
--moe-token-dispatcher-type allgather
"""
PREDICT = "--two-bw-correction predict,0.25 --two-bw-sync-iterations 1"


def experts(stages, microbatches, *flags, **changes) -> list[str]:
    return command(stages, microbatches, "2bw", UNTIED, EXPERTS, *flags, **changes)


@pytest.mark.proof("two")
@pytest.mark.parametrize(
    "stages, flags, rule",
    [
        (2, BIAS, {}),
        (1, BIAS, {}),
        (4, f"{BIAS} --clip-grad 0", {}),
        (2, f"{BIAS} --bf16 --two-bw-late 1", dict(late=1)),
        (2, f"{BIAS} --bf16 --two-bw-memory host", {}),
        (2, f"{BIAS} --fp16 --moe-aux-loss-coeff 1", dict(poison=POISONED)),
        (2, f"{CAPACITY} --moe-router-load-balancing-type seq_aux_loss", {}),
        (2, f"{BIAS} {PREDICT}", dict(sync=1, ahead=0.25, known=(3, 4))),
    ],
    ids=["two", "one", "four", "late", "host", "fp16", "capacity", "predicted"],
)
def test_the_reference(stages, flags, rule):
    prepare = poison if "poison" in rule else None
    words = (UNTIED, EXPERTS, flags)
    check_rule(stages, 4, *words, prepare=prepare, rule=rule, **SCALE)


SPLIT = "--expert-model-parallel-size 2"


class Pair(NamedTuple):
    """Flags of two runs of one model, which must give the same numbers.

    tolerance: 0 where the additions have one order
    """

    flags: str
    others: str
    tolerance: float = 0
    ranks: int = 4
    prepare: object = None  # of the others


PAIRS = {
    "megatron": Pair(
        f"{BIAS} {SPLIT} --pipeline-schedule pipedream-flush",
        f"{BIAS} {SPLIT} --pipeline-schedule megatron",
    ),
    "recomputed": Pair(f"{BIAS} {SPLIT} {FULL}", f"{BIAS} {SPLIT}"),
    "one slot, evaluations": Pair(
        f"{SPLIT} --two-bw-memory one-slot --eval-interval 2 --eval-iters 1", SPLIT
    ),
    "split": Pair(
        f"{BIAS} {SPLIT} --moe-token-dispatcher-type alltoall", BIAS, tolerance=1e-5
    ),
    "shards": Pair(
        f"{BIAS} {SPLIT} {SHARDED} --overlap-grad-reduce",
        f"{BIAS} {SPLIT}",
        tolerance=1e-5,
    ),
    "predicted": Pair(
        f"{BIAS} {SPLIT} {SHARDED} {PREDICT}", f"{BIAS} {PREDICT}", tolerance=1e-5
    ),
    "one slot of shards": Pair(
        f"{SPLIT} {SHARDED} --two-bw-memory shard", f"{SPLIT} {SHARDED}"
    ),
    "on the host": Pair(
        f"{BIAS} {SPLIT} {SHARDED} --bf16 {HOST}",
        f"{BIAS} {SPLIT} {SHARDED} --bf16",
        prepare=fuse,
    ),
    "first stage dense": Pair(
        f"{SPLIT} --moe-layer-freq [0,0,1,1]",
        "--moe-layer-freq [0,0,1,1]",
        tolerance=1e-5,
    ),
    "tensor parallel": Pair(
        f"{SPLIT} --tensor-model-parallel-size 2 --sequence-parallel",
        "",
        tolerance=1e-5,
        ranks=8,
    ),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_splits_and_choices_of_memory_change_nothing(pair):
    runs = run_pipeline(experts(2, 2, pair.flags, width=2), pair.ranks)
    others = run_pipeline(experts(2, 2, pair.others, width=2), 4, pair.prepare)
    # with tensor ranks a rank has slices of the weights
    compare = assert_same_runs if pair.ranks == 4 else assert_same_losses
    compare(runs, others, pair.tolerance)


def test_no_collective_of_the_training_thread_spans_stages():
    flags = f"{BIAS} {SPLIT} {SHARDED} --overlap-grad-reduce {WATCHED}"
    assert_only_the_step_spans_stages(experts(2, 2, flags, width=2))


def test_random_timings_change_nothing():
    flags = f"{BIAS} {SPLIT} {SHARDED}"
    argv = experts(2, 2, flags, width=2, train_iters=20)
    delayed = run_world(4, train_with_delays, argv, 0.006, timeout=250)
    assert_same_runs(delayed, run_pipeline(argv, 4))


@pytest.mark.parametrize("form", ["torch_dist", "torch"])
def test_a_resumed_run_is_the_uninterrupted_one(form, tmp_path):
    flags = f"{BIAS} {SPLIT} {SHARDED} --bf16 --ckpt-format {form}"
    argv = experts(2, 2, flags, width=2, **DROPOUT)
    assert_goes_on(*interrupted(tmp_path, 4, argv))


@pytest.mark.parametrize(
    "flags", [BIAS, f"{BIAS} {SHARDED} --dist-ckpt-optim-fully-reshardable"]
)
def test_a_resumed_run_may_split_experts_otherwise(flags, tmp_path):
    """The second from what the first has saved. Sums are rounded in another order."""

    def run(split: int, load: str = "") -> Run:
        save = f"--save {tmp_path} --save-interval 2"
        split = f"--expert-model-parallel-size {split}"
        return run_pipeline(experts(1, 2, flags, save, split, load, width=4), 4)[-1]

    whole = run(2)
    for start, split in ((2, 4), (4, 2)):
        rest = run(split, f"--load {tmp_path} --ckpt-step {start}")
        assert rest.iterations == list(range(start + 1, 7))
        assert_close_losses(rest.losses, whole.losses[start:], 1e-5)


def logged(run, model) -> None:
    run.events = re.findall(r"(?:load_balancing_loss|z_loss): (\S+)", own_output())


def test_the_auxiliary_losses_of_a_line_are_those_of_its_batch():
    """One stage runs no forward before the last backward of the batch before; its
    norm's sum has another order."""
    losses = []
    for stages in (1, 2):
        argv = experts(stages, 4, BIAS, log_interval=1)
        events = run_pipeline(argv, stages, finish=logged)[-1].events
        losses.append([float(event) for event in events])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert len(set(losses[0])) > 6
