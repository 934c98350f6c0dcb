"""A synchronous start and extrapolated weights, against the single-process reference of
the update rule.

Bitwise, for the reasons that test_update_rule.py gives.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron_2bw.base.local_ranks import run_world
from tests.distributed.compare import (
    SGD,
    UNTIED,
    assert_same,
    assert_same_runs,
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
)
from tests.distributed.test_late_step import OVERLAP
from tests.distributed.test_update_rule import POISONED, poison
from tests.distributed.training import Run, command, train

EXTRAPOLATE, AUTO = (
    dict(two_bw_correction="extrapolate"),
    dict(two_bw_correction="auto"),
)


@pytest.mark.proof("4-3-None")
@pytest.mark.parametrize("microbatches, sync, extra", [(4, 3, None), (3, 4, 1)])
def test_synchronous_start(microbatches, sync, extra):
    changes = dict(two_bw_sync_iterations=sync, two_bw_extra_warmup=extra)
    runs = run_pipeline(command(2, microbatches, "2bw", UNTIED, **changes), 2)
    argv = command(1, microbatches, "2bw", UNTIED)
    assert_same(runs, run_reference(runs, argv, microbatches, sync=sync), exact=True)


@pytest.mark.proof("4-5-3-flags0")
@pytest.mark.parametrize(
    "stages, microbatches, late, flags",
    [
        (4, 5, 3, ("--bf16",)),
        (2, 6, 2, ("--two-bw-gradient-slots", "1")),
        (1, 3, 0, ()),
    ],
)
def test_only_the_first_microbatches_are_late(stages, microbatches, late, flags):
    """With the correction and after a synchronous start; the others run on the newest
    working copy."""
    rule = dict(
        two_bw_sync_iterations=2,
        two_bw_correction_factor=0.5,
        two_bw_correction_gradient=0.5,
    )
    rule |= EXTRAPOLATE | dict(two_bw_late_microbatches=late)
    argv = command(stages, microbatches, "2bw", UNTIED, *flags, **rule)
    runs = run_pipeline(argv, stages)
    argv = command(
        1, microbatches, "2bw", UNTIED, *(flag for flag in flags if "16" in flag)
    )
    same = dict(late=late, sync=2, factor=0.5, gradient=0.5)
    assert_same(runs, run_reference(runs, argv, microbatches, **same), exact=True)


@pytest.mark.proof
def test_gradient_term_of_sgd():
    changes = SGD | dict(train_iters=8)
    correction = dict(
        EXTRAPOLATE, two_bw_correction_factor=1.5, two_bw_correction_gradient=2
    )
    runs = run_pipeline(command(2, 4, "2bw", UNTIED, **changes, **correction), 2)
    argv = command(1, 4, "2bw", UNTIED, **changes)
    assert_same(
        runs,
        run_reference(runs, argv, 4, optimizer="sgd", factor=1.5, gradient=2),
        exact=True,
    )


@pytest.mark.proof
@pytest.mark.parametrize(
    "microbatches, rule",
    [(3, dict(factor=1.5, gradient=2)), (8, dict(factor=0.5, gradient=0.5, late=2))],
)
def test_auto(microbatches, rule):
    """All microbatches are late, or a quarter of them."""
    runs = run_pipeline(command(2, microbatches, "2bw", UNTIED, "--bf16", **AUTO), 2)
    argv = command(
        1,
        microbatches,
        "2bw",
        UNTIED,
        "--bf16",
        adam_beta1=0.9 if "late" in rule else 0.95,
    )
    assert_same(runs, run_reference(runs, argv, microbatches, **rule), exact=True)


@pytest.mark.parametrize(
    "sync, correction, ahead",
    [
        (0, AUTO, dict(factor=0.75, gradient=0.75, late=2)),
        (3, EXTRAPOLATE, dict(factor=1.0)),
        (POISONED + 1, AUTO, dict(factor=0.75, gradient=0.75, late=2)),
    ],
)
def test_skipped_step(sync, correction, ahead):
    """After a skipped step W(j+1) = W(j), and the working copy is W(j) too; each batch
    has the scale of its weights."""
    # typed, so `auto` keeps it
    changes = dict(initial_loss_scale=4096, hysteresis=1, train_iters=7, adam_beta1=0.9)
    flags = (UNTIED, "--fp16")
    runs = run_pipeline(
        command(
            2, 4, "2bw", *flags, **changes, **correction, two_bw_sync_iterations=sync
        ),
        2,
        poison,
    )
    rule = dict(poison=POISONED, sync=sync, **ahead)
    expected = run_reference(runs, command(1, 4, "2bw", *flags, **changes), 4, **rule)
    assert (
        [run.skipped for run in runs]
        == [[0, 0, 0, 1, 0, 0, 0]] * 2
        == [expected.skipped] * 2
    )
    assert runs[0].scales == expected.scales
    assert_same(runs, expected, exact=True)


def test_a_skipped_step_with_the_distributed_optimizer_and_evaluations():
    changes = dict(width=2, clip_grad=0, initial_loss_scale=4096, hysteresis=1, **AUTO)
    plain = run_pipeline(command(2, 2, "2bw", "--fp16", **changes), 4, poison)
    sharded = ("--fp16", SHARDED, *OVERLAP, *EVALUATED.split())
    runs = run_pipeline(command(2, 2, "2bw", *sharded, **changes), 4, poison)
    assert runs[0].skipped == plain[0].skipped and 1 in plain[0].skipped
    assert_same_runs(runs[0::2], plain[0::2], exact=True)
    for name, value in runs[0].weights.items():
        assert torch.equal(value, runs[1].weights[name]), (
            "the replicas have drifted apart"
        )


BY_1, BY_AUTO = "--two-bw-correction extrapolate", "--two-bw-correction auto"
CASES = {
    "fp32, tied": (2, 2, 1, BY_1),
    "bf16, distributed optimizer": (
        2,
        4,
        2,
        f"--bf16 {SHARDED} --overlap-grad-reduce {BY_AUTO}",
    ),
    "asynchronous, with evaluations": (
        2,
        5,
        1,
        f"--bf16 {ASYNCHRONOUS} {EVALUATED} {BY_AUTO}",
    ),
    "at its end": (2, 2, 1, f"--two-bw-sync-iterations {SAVED} {BY_1}"),
}


@pytest.mark.proof("fp32, tied")
@pytest.mark.parametrize("name", CASES)
def test_resumed_run_is_the_uninterrupted_one(name, tmp_path):
    check_resumed(tmp_path, *CASES[name])


def test_one_plan_for_all_saves(tmp_path):
    """The first save is in the synchronous start; Megatron takes its list of tensors
    for the later ones too.

    A resumed run has the length of start of its checkpoint, not that of its command
    line.
    """
    argv = command(
        2,
        2,
        "2bw",
        "--ckpt-assume-constant-structure",
        two_bw_sync_iterations=3,
        **EXTRAPOLATE,
    )
    whole = run_pipeline([*argv, "--save", str(tmp_path), "--save-interval", "2"], 2)
    longer = ["--two-bw-sync-iterations", "6"]
    rest = run_pipeline(
        [*argv, *longer, "--load", str(tmp_path), "--ckpt-step", "4"], 2
    )
    assert rest[-1].losses == whole[-1].losses[4:]
    assert_same_runs(
        rest,
        [Run(losses=run.losses[4:], weights=run.weights) for run in whole],
        exact=True,
    )


@pytest.mark.parametrize("more", [{}, dict(two_bw_sync_iterations=5)])
def test_dynamic_loss_scale_after_a_resume(more, tmp_path):
    """The step before the save is skipped."""
    argv = command(
        2,
        2,
        "2bw",
        "--fp16",
        initial_loss_scale=4096,
        hysteresis=1,
        **EXTRAPOLATE,
        **DROPOUT,
        **more,
    )
    whole, rest = interrupted(
        tmp_path, 2, argv, functools.partial(poison, poisoned=(SAVED - 1,))
    )
    assert whole[0].skipped == [0, 0, 1, 0, 0, 0]
    assert_goes_on(whole, rest)


def evaluated(rank: int, argv: list[str]) -> Run:
    """A run, and its validation losses in `events`."""
    from megatron.training import training

    evaluate, found = training.evaluate, []

    def evaluate_and_keep(*args, **kwargs):
        result = evaluate(*args, **kwargs)
        found.extend(str(float(loss)) for loss in result[0].values())
        return result

    training.evaluate = evaluate_and_keep
    run = train(rank, argv)
    run.events = found
    return run


def model_in(checkpoint: Path) -> dict[str, torch.Tensor]:
    reader = dcp.FileSystemReader(checkpoint)
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if hasattr(entry, "size") and not name.startswith(("optimizer", "two_bw"))
    }
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


@pytest.mark.proof("precision0")
@pytest.mark.parametrize("precision", [(), ("--bf16",)])
def test_evaluation_and_checkpoint_have_the_true_weights(precision, tmp_path):
    """The checkpoint's model is the reference's W(3), and Megatron alone evaluates it
    to the same loss."""
    argv = command(
        2,
        4,
        "2bw",
        UNTIED,
        *precision,
        eval_interval=SAVED,
        eval_iters=2,
        train_iters=SAVED + 1,
    )
    argv += ["--lr-decay-iters", "6", "--two-bw-correction", "extrapolate"]
    saving = [*argv, "--save", str(tmp_path), "--save-interval", str(SAVED)]
    runs = run_world(2, evaluated, saving)
    changes = dict(train_iters=SAVED, lr_decay_iters=6)
    expected = run_reference(
        runs, command(1, 4, "2bw", UNTIED, *precision, **changes), 4, factor=1.0
    )
    tensors = model_in(tmp_path / f"iter_{SAVED:07d}")
    for name, value in expected.weights.items():
        number = re.search(r"layers\.(\d+)\.", name)
        key = re.sub(r"layers\.\d+\.", "layers.", name)
        key = key.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        key = key.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        assert torch.equal(
            tensors[key][int(number[1])] if number else tensors[key], value
        ), name

    alone = command(
        2, 4, "megatron", UNTIED, *precision, eval_interval=SAVED, eval_iters=2
    )
    alone += [
        "--load",
        str(tmp_path),
        "--ckpt-step",
        str(SAVED),
        "--finetune",
        "--skip-train",
    ]
    assert runs[-1].events[0] == run_world(2, evaluated, alone)[-1].events[0]
