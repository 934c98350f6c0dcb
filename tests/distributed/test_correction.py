"""A synchronous start, late microbatches and working copies, against the single-process
reference of the update rule.

Bitwise, for the reasons that test_update_rule.py gives.
"""

import functools
import re

import pytest
import torch

from bench.faults import tensors
from megatron_2bw.base.local_ranks import run_world
from megatron_2bw.mcore.checkpoints.folder import checkpoint_name
from tests.distributed.compare import (
    SGD,
    UNTIED,
    assert_equal_weights,
    assert_same,
    assert_same_losses,
    assert_same_runs,
    check_rule,
    run_pipeline,
    run_reference,
)
from tests.distributed.test_checkpoint import (
    ASYNCHRONOUS,
    DROPOUT,
    EVALUATED,
    SAVED,
    SHARDED,
    assert_goes_on,
    check_resumed,
    interrupted,
    run_loading,
    run_saving,
)
from tests.distributed.test_late_step import OVERLAP
from tests.distributed.test_update_rule import NO_BIAS, POISONED, SCALE, poison
from tests.distributed.training import Run, command, train

FEEDBACK = "--two-bw-correction 1"
AUTO = "--two-bw-correction auto --two-bw-late 2"
PREDICT = "--two-bw-correction predict,0.25"


@pytest.mark.proof("4-3-")
@pytest.mark.parametrize(
    "microbatches, sync, extra", [(4, 3, ""), (3, 4, "--two-bw-extra-warmup 1")]
)
def test_synchronous_start(microbatches, sync, extra):
    own = f"--two-bw-sync-iterations {sync} {extra}"
    check_rule(2, microbatches, UNTIED, own=own, rule=dict(sync=sync))


@pytest.mark.proof("4-5-3---bf16-", "4-3-2---clip-grad 0---two-bw-memory one-slot")
@pytest.mark.parametrize(
    "stages, microbatches, late, flags, slots",
    [
        (4, 5, 3, "--bf16", ""),
        (2, 6, 2, "", "--two-bw-memory one-slot"),
        (1, 3, 0, "", ""),
        (4, 4, 1, "--clip-grad 0", ""),
        (4, 5, 2, "--bf16", "--two-bw-extra-warmup 1"),
        (4, 3, 2, "--clip-grad 0", "--two-bw-memory one-slot"),
        (4, 2, 2, "--bf16", ""),
        (4, 2, 0, "--clip-grad 0", ""),
    ],
)
def test_only_the_first_microbatches_are_late(stages, microbatches, late, flags, slots):
    """With the correction and after a synchronous start; the others run on the newest
    working copy."""
    own = (
        f"--two-bw-correction 0.5,0.5 {slots} --two-bw-late {late} "
        "--two-bw-sync-iterations 2"
    )
    rule = dict(late=late, sync=2, factor=0.5, gradient=0.5)
    if late == 0:  # nothing is corrected
        rule = dict(late=0)
    check_rule(stages, microbatches, UNTIED, flags, own=own, rule=rule)


@pytest.mark.proof
def test_gradient_term_of_sgd():
    own = "--two-bw-correction 1.5,2"
    rule = dict(factor=1.5, gradient=2)
    check_rule(2, 4, UNTIED, own=own, rule=rule, train_iters=8, **SGD)


@pytest.mark.proof
@pytest.mark.parametrize(
    "microbatches, late, rule",
    [
        (3, "all", dict(ahead=0.5, known=(2, 3))),
        (8, None, dict(factor=0.5, gradient=0.5, late=2)),
    ],
)
def test_auto(microbatches, late, rule):
    """All microbatches are late, on predicted weights; or a quarter, by default."""
    own = dict(two_bw_late=late, two_bw_correction=None, two_bw_sync_iterations=0)
    runs = run_pipeline(command(2, microbatches, "2bw", UNTIED, "--bf16", **own), 2)
    argv = command(1, microbatches, "2bw", UNTIED, "--bf16")
    assert_same(runs, run_reference(runs, argv, microbatches, **rule))


BY_AUTO = dict(factor=0.75, gradient=0.75, late=2)


@pytest.mark.parametrize(
    "sync, correction, ahead",
    [
        (0, AUTO, BY_AUTO),
        (1, PREDICT, dict(ahead=0.25, known=(3, 4))),
        (3, FEEDBACK, dict(factor=1.0)),
        (POISONED + 1, AUTO, BY_AUTO),
    ],
)
def test_skipped_step(sync, correction, ahead):
    """After a skipped step W(j+1) = W(j), and the working copy is W(j) too; each batch
    has the scale of its weights."""
    runs, expected = check_rule(
        2,
        4,
        UNTIED,
        "--fp16",
        own=f"{correction} --two-bw-sync-iterations {sync}",
        prepare=poison,
        rule=dict(poison=POISONED, sync=sync, **ahead),
        train_iters=7,
        **SCALE,
    )
    assert expected.skipped == [0, 0, 0, 1, 0, 0, 0]
    assert runs[0].scales == expected.scales


def test_a_skipped_step_with_the_distributed_optimizer_and_evaluations():
    changes = dict(width=2, clip_grad=0, **SCALE)
    argv = command(2, 2, "2bw", "--fp16", AUTO, **changes)
    plain = run_pipeline(argv, 4, poison)
    sharded = f"{SHARDED} {OVERLAP} {EVALUATED}"
    runs = run_pipeline(argv + sharded.split(), 4, poison)
    assert runs[0].skipped == plain[0].skipped
    assert 1 in plain[0].skipped
    assert_same_runs(runs[0::2], plain[0::2])
    assert_equal_weights(runs[0], runs[1])


# Stages, microbatches, width; flags.
CASES = {
    "fp32, tied": ((2, 2, 1), FEEDBACK),
    "bf16, distributed optimizer": (
        (2, 4, 2),
        f"--bf16 {SHARDED} --overlap-grad-reduce {AUTO}",
    ),
    "asynchronous, with evaluations": (
        (2, 5, 1),
        f"--bf16 {ASYNCHRONOUS} {EVALUATED} {AUTO}",
    ),
    "at its end": ((2, 2, 1), f"--two-bw-sync-iterations {SAVED} {FEEDBACK}"),
    "predicted, fp16": ((2, 3, 1), f"--fp16 --clip-grad 0.1 {PREDICT}"),
    "predicted over replicas": (
        (2, 4, 2),
        f"--bf16 {SHARDED} --overlap-grad-reduce {EVALUATED} {PREDICT}",
    ),
}


@pytest.mark.proof("fp32, tied")
@pytest.mark.parametrize("name", CASES)
def test_resumed_run_is_the_uninterrupted_one(name, tmp_path):
    check_resumed(tmp_path, *CASES[name])


@pytest.mark.parametrize("before, after", [(0, 3), (3, 1)])
def test_resumed_into_another_number_of_late_microbatches(before, after, tmp_path):
    """The rest of the run is the reference's that changes the number there."""
    argv = command(2, 4, "2bw", UNTIED, "--clip-grad 0")
    run_saving(tmp_path, 2, [*argv, "--two-bw-late", str(before)])
    rest = run_loading(tmp_path, 2, [*argv, "--two-bw-late", str(after)])
    late = (before,) * SAVED + (after,) * 3
    alone = command(1, 4, "2bw", UNTIED, "--clip-grad 0")
    expected = run_reference(rest, alone, 4, late=late)
    expected.losses = expected.losses[SAVED:]
    assert_same(rest, expected)


def test_one_plan_for_all_saves(tmp_path):
    """The first save is in the synchronous start; Megatron takes its list of tensors
    for the later ones too.

    A resumed run has the length of start of its checkpoint, not that of its command
    line.
    """
    flags = f"--ckpt-assume-constant-structure {FEEDBACK}"
    argv = command(2, 2, "2bw", flags, two_bw_sync_iterations=3)
    saves = f"--save {tmp_path} --save-interval 2"
    whole = run_pipeline(argv + saves.split(), 2)
    load = f"--two-bw-sync-iterations 6 --load {tmp_path} --ckpt-step 4"
    rest = run_pipeline(argv + load.split(), 2)
    for run in whole:
        run.losses = run.losses[4:]
    assert len(rest[-1].losses) == 2
    assert_same_runs(rest, whole)


@pytest.mark.parametrize("start", ["", "--two-bw-sync-iterations 5"])
def test_dynamic_loss_scale_after_a_resume(start, tmp_path):
    """The step before the save is skipped."""
    argv = command(2, 2, "2bw", "--fp16", FEEDBACK, start, **SCALE, **DROPOUT)
    prepare = functools.partial(poison, poisoned=(SAVED - 1,))
    whole, rest = interrupted(tmp_path, 2, argv, prepare)
    assert whole[0].skipped == [0, 0, 1, 0, 0, 0]
    assert_goes_on(whole, rest)


def evaluated(rank: int, argv: list[str]) -> Run:
    """A run, and its validation losses in `events`."""
    from megatron.training import training

    evaluate = training.evaluate
    losses = []

    def evaluate_and_keep(*args, **kwargs):
        result = evaluate(*args, **kwargs)
        for loss in result[0].values():
            losses.append(str(float(loss)))
        return result

    training.evaluate = evaluate_and_keep
    run = train(rank, argv)
    run.events = losses
    return run


def saved_weight(saved: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """The checkpoint has the layers of a kind in one tensor, and norms with linears."""
    key = re.sub(r"layers\.\d+\.", "layers.", name)
    key = key.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
    key = key.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
    number = re.search(r"layers\.(\d+)\.", name)
    if number:
        return saved[key][int(number[1])]
    return saved[key]


@pytest.mark.proof("")
@pytest.mark.parametrize("precision", ["", "--bf16"])
def test_evaluation_and_checkpoint_have_the_true_weights(precision, tmp_path):
    """The checkpoint's model is the reference's W(3), and Megatron alone evaluates it
    to the same loss."""
    model = (UNTIED, precision)
    evaluate = f"--eval-interval {SAVED} --eval-iters 2"
    folder = f"{tmp_path} --save-interval {SAVED}"
    flags = f"{evaluate} {FEEDBACK} --lr-decay-iters 6 --save {folder}"
    argv = command(2, 4, "2bw", *model, flags, train_iters=SAVED + 1)
    runs = run_world(2, evaluated, argv)
    argv = command(1, 4, "2bw", *model, train_iters=SAVED, lr_decay_iters=6)
    expected = run_reference(runs, argv, 4, factor=1.0)
    saved = tensors(tmp_path / checkpoint_name(SAVED))
    for name, value in expected.weights.items():
        assert torch.equal(saved_weight(saved, name), value), name

    load = f"--load {tmp_path} --ckpt-step {SAVED} --finetune --skip-train"
    alone = command(2, 4, "megatron", *model, evaluate, load)
    megatron = run_world(2, evaluated, alone)
    assert runs[-1].events[0] == megatron[-1].events[0]


# Stages, microbatches; flags of both, and of the pipeline alone; changes.
PREDICTED = {
    "clipped": ((2, 4), UNTIED, "", {}),
    "one stage": ((1, 3), "--bf16", "", {}),
    "every share of four": ((4, 4), f"{UNTIED} --bf16 --clip-grad 0", "", {}),
    "sgd": ((4, 5), f"{UNTIED} --clip-grad 0", "", SGD),
    "muon": ((2, 4), f"{UNTIED} --muon-nesterov", "", dict(optimizer="muon")),
    "tied": ((2, 2), NO_BIAS, "--two-bw-memory one-slot", {}),
    "per token": ((2, 5), f"{UNTIED} --calculate-per-token-loss", "", {}),
    "extra warm-up": ((2, 4), UNTIED, "--two-bw-extra-warmup 1", {}),
    "distributed": (
        (2, 4),
        f"{UNTIED} --bf16",
        "--use-distributed-optimizer --two-bw-memory shard",
        {},
    ),
}


@pytest.mark.proof("clipped", "tied")
@pytest.mark.parametrize("name", PREDICTED)
def test_predicted_weights(name):
    """Where a stage knows another share of the gradient of the batch before."""
    (stages, microbatches), flags, own, changes = PREDICTED[name]
    ahead = 2 if "extra" in name else 1  # of each boundary
    known = [microbatches - ahead * (stages - 1 - stage) for stage in range(stages)]
    rule = dict(sync=2, ahead=0.25, known=tuple(known))
    tolerance = 0.0
    if name == "tied":  # see test_tied_embeddings
        rule["summed"] = ("embedding.word_embeddings.weight",)
        tolerance = 1e-6
    own += f" {PREDICT} --two-bw-sync-iterations 2"
    check_rule(
        stages, microbatches, flags, own=own, tolerance=tolerance, rule=rule, **changes
    )


@pytest.mark.parametrize(
    "microbatches, flags", [(2, ""), (3, "--use-distributed-optimizer")]
)
def test_replicas_predict_from_the_sum_of_their_gradients(microbatches, flags):
    """Two replicas are one pipeline with twice the microbatches, but for the order of
    additions. The first stage knows the first microbatch of each, and the second stage
    that of one more: the third one hides the sums."""
    model = (UNTIED, NO_BIAS)
    own = f"{flags} {PREDICT} --two-bw-sync-iterations 1"
    runs = run_pipeline(command(2, microbatches, "2bw", *model, own, width=2), 4)
    both = 2 * microbatches
    argv = command(1, both, "2bw", *model)
    rule = dict(sync=1, ahead=0.25, known=(2, 4))
    one = run_pipeline(command(2, both, "2bw", *model, PREDICT), 2)
    assert_same(runs[0::2], run_reference(one, argv, both, **rule), 1e-5)
    assert_equal_weights(runs[0], runs[1])


def test_tensor_parallel_ranks_predict_equal_copies():
    """The gradients of the norms are sums over the ranks: their mean takes their
    place."""
    model = (UNTIED, NO_BIAS)
    split = "--tensor-model-parallel-size 2 --sequence-parallel"
    own = f"{PREDICT} --two-bw-sync-iterations 1"
    runs = run_pipeline(command(2, 4, "2bw", *model, own, split), 4)
    argv = command(1, 4, "2bw", *model)
    one = run_pipeline(command(2, 4, "2bw", *model, own), 2)
    norms = []
    for run in one:
        norms += [name for name in run.weights if "norm" in name]
    rule = dict(sync=1, ahead=0.25, known=(3, 4), summed=tuple(norms))
    assert_same_losses(runs, [run_reference(one, argv, 4, **rule)], 1e-6)


@pytest.mark.parametrize("precision, optimizer", [("--bf16", {}), ("", SGD)])
def test_a_prediction_that_knows_all_is_the_step(precision, optimizer):
    """One stage without clipping is vanilla, to the bit. In a warm-up the first step's
    rate is 0: the first late batch, which is not predicted, loses nothing."""
    flags = f"--clip-grad 0 {precision}"
    own = "--two-bw-correction predict,0 --two-bw-sync-iterations 1"
    late = run_pipeline(command(1, 3, "2bw", flags, own, **optimizer), 1)
    vanilla = run_pipeline(command(1, 3, "megatron", flags, **optimizer), 1)
    assert_same_runs(late, vanilla)


def test_overflow_of_the_gradient_so_far():
    """Elements without a value take the mean of the past ones; the step is skipped."""
    changes = dict(SCALE, initial_loss_scale=2.0**17, loss_scale_window=2)
    _, expected = check_rule(
        2,
        4,
        UNTIED,
        "--fp16",
        own=f"{PREDICT} --two-bw-sync-iterations 1",
        rule=dict(sync=1, ahead=0.25, known=(3, 4)),
        train_iters=10,
        **changes,
    )
    assert 1 in expected.skipped[3:]


def test_an_overlapping_reduction_begins_after_the_prediction():
    """On one stage the last backward would start it; two replicas."""
    argv = command(1, 3, "2bw", "--bf16", PREDICT, width=2)
    plain = run_pipeline(argv, 2)
    assert_same_runs(run_pipeline([*argv, "--overlap-grad-reduce"], 2), plain)
