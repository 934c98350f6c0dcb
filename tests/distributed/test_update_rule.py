"""The pipeline's losses and final weights against a single-process reference of the
update rule (design, section 2).

Equality is bitwise (`exact`) wherever the same numbers are added in the same order:
gradients are, because microbatches run backward in order; the gradient norm is, because
the reference adds the squares by stage. Not with tied embeddings (the pipeline adds the
batch's sum of one stage to that of the other, one process adds the two microbatch by
microbatch), and not over four stages with clipping (gloo adds four squares in an order
of its own).
"""

from __future__ import annotations

import re

import pytest

from megatron_2bw.base.local_ranks import own_output
from tests.distributed.compare import (
    SGD,
    UNTIED,
    assert_same,
    run_pipeline,
    run_reference,
)
from tests.distributed.training import command


@pytest.mark.proof("1-2-adam", "2-2-sgd", "2-3-adam", "4-4-adam")
@pytest.mark.parametrize(
    "stages, microbatches, optimizer",
    [(1, 2, "adam"), (2, 2, "sgd"), (2, 3, "adam"), (4, 4, "adam"), (4, 6, "sgd")],
)
def test_fp32(stages, microbatches, optimizer):
    changes = SGD if optimizer == "sgd" else {}
    runs = run_pipeline(command(stages, microbatches, "2bw", UNTIED, **changes), stages)
    argv = command(1, microbatches, "2bw", UNTIED, **changes)
    expected = run_reference(runs, argv, microbatches, optimizer=optimizer)
    assert max(runs[0].grad_norms) > 1.0, "clipping must bite"
    assert_same(runs, expected, exact=stages < 4)
    assert runs[0].grad_norms == pytest.approx(expected.grad_norms, rel=1e-6)


@pytest.mark.proof
def test_four_stages_without_clipping_are_exact():
    runs = run_pipeline(command(4, 4, "2bw", UNTIED, clip_grad=0), 4)
    assert_same(
        runs,
        run_reference(runs, command(1, 4, "2bw", UNTIED, clip_grad=0), 4),
        exact=True,
    )


@pytest.mark.proof("2-3-1")
@pytest.mark.parametrize(
    "stages, microbatches, extra", [(2, 3, "1"), (2, 6, "3"), (4, 6, "0,2,0")]
)
def test_extra_warmup(stages, microbatches, extra):
    """Forwards that run further ahead read the same versions: nothing changes."""
    changes = dict(clip_grad=0 if stages == 4 else 1.0)
    argv = command(
        stages, microbatches, "2bw", UNTIED, two_bw_extra_warmup=extra, **changes
    )
    runs = run_pipeline(argv, stages)
    assert_same(
        runs,
        run_reference(
            runs, command(1, microbatches, "2bw", UNTIED, **changes), microbatches
        ),
        exact=True,
    )


@pytest.mark.proof("2-adam", "4-sgd")
@pytest.mark.parametrize("stages, optimizer", [(2, "adam"), (4, "sgd")])
def test_tied_embeddings(stages, optimizer):
    """First and last stage hold copies of the embedding; `full_weights` checks that
    they stay equal bit for bit.

    Without biases: the gradient of the keys' bias is zero but for rounding, and Adam
    would blow the rounding up.
    """
    changes, flags = SGD if optimizer == "sgd" else {}, ("--disable-bias-linear",)
    runs = run_pipeline(command(stages, 4, "2bw", *flags, **changes), stages)
    expected = run_reference(
        runs, command(1, 4, "2bw", *flags, **changes), 4, optimizer=optimizer
    )
    assert_same(runs, expected, exact=False)
    assert max(runs[0].grad_norms) > 1.0, "clipping must bite"


def test_tied_embeddings_on_one_stage_are_exact():
    runs = run_pipeline(command(1, 3), 1)
    assert_same(runs, run_reference(runs, command(1, 3), 3), exact=True)


@pytest.mark.proof
@pytest.mark.parametrize("precision", ["--bf16", "--fp16"])
def test_mixed_precision(precision):
    flags = (UNTIED, precision)
    runs = run_pipeline(command(2, 4, "2bw", *flags, initial_loss_scale=4096), 2)
    expected = run_reference(
        runs, command(1, 4, "2bw", *flags, initial_loss_scale=4096), 4
    )
    assert_same(runs, expected, exact=True)


POISONED = 3


def poison(
    model, optimizer, stage: int = 0, poisoned: tuple[int, ...] = (POISONED,)
) -> None:
    """Put an inf into the gradients of one stage in some batches, before the statistics
    are taken."""
    from megatron.core import mpu
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.utils import get_model_config

    batches = iter(range(1000))

    def finalize(chunks, *args, **kwargs):
        finalize_model_grads(chunks, *args, **kwargs)
        if (
            next(batches) in poisoned
            and mpu.get_pipeline_model_parallel_rank() == stage
        ):
            next(iter(chunks[0].parameters())).main_grad.view(-1)[0] = float("inf")

    get_model_config(model[0]).finalize_model_grads_func = finalize


@pytest.mark.proof
def test_fp16_skips_a_step_with_inf_and_versions_still_advance():
    """After a skipped step W(j+1) = W(j); the batches after it name the same versions
    as ever."""
    changes = dict(initial_loss_scale=4096, hysteresis=1)
    runs = run_pipeline(command(2, 4, "2bw", UNTIED, "--fp16", **changes), 2, poison)
    expected = run_reference(
        runs, command(1, 4, "2bw", UNTIED, "--fp16", **changes), 4, poison=POISONED
    )
    assert (
        [run.skipped for run in runs]
        == [[0, 0, 0, 1, 0, 0]] * 2
        == [expected.skipped] * 2
    )
    assert runs[0].scales == expected.scales == [4096.0] * 3 + [2048.0] * 3
    assert_same(runs, expected, exact=True)


@pytest.mark.parametrize(
    "stages, flags", [(1, UNTIED), (2, UNTIED), (2, "--bf16"), (1, "--fp16")]
)
def test_heads_that_predict_several_tokens(stages, flags):
    """The last stage has a copy of the embedding for them; the log has their losses of
    each batch."""
    changes = dict(
        mtp_num_layers=2,
        position_embedding_type="rope",
        initial_loss_scale=4096,
        hysteresis=1,
    )
    argv = lambda stages: command(
        stages, 4, "2bw", flags, "--disable-bias-linear", **changes
    )
    poisoned = dict(poison=POISONED) if flags == "--fp16" else {}
    runs = run_pipeline(argv(stages), stages, poison if poisoned else None, heads)
    assert_same(
        runs,
        run_reference(runs, argv(1), 4, **poisoned),
        exact=stages == 1,
        tolerance=1e-2 if "bf16" in flags else 1e-6,
    )
    assert len(runs[-1].events) == 12 == len({*runs[-1].events})


def heads(run, model) -> None:
    run.events = re.findall(r"mtp_[12] loss: (\S+)", own_output())


@pytest.mark.proof("4-2")
@pytest.mark.parametrize("stages, microbatches", [(2, 1), (4, 2)])
def test_pipedream(stages, microbatches):
    """Each stage's newest weights at a forward, kept for its backward, the norm of each
    stage by itself."""
    runs = run_pipeline(command(stages, microbatches, "pipedream", UNTIED), stages)
    argv = command(1, microbatches, "pipedream", UNTIED)
    expected = run_reference(runs, argv, microbatches, per_stage=True)
    assert_same(runs, expected, exact=True)
    assert runs[0].grad_norms == pytest.approx(expected.grad_norms, rel=1e-6), (
        "the log shows the largest stage's norm"
    )


def test_pipedream_skips_the_step_of_the_stage_with_inf():
    """A constant loss scale; stage 0 meets an inf in one batch and alone keeps its
    weights."""
    flags, changes = (UNTIED, "--fp16"), dict(loss_scale=256)
    runs = run_pipeline(command(2, 2, "pipedream", *flags, **changes), 2, poison)
    argv = command(1, 2, "pipedream", *flags, **changes)
    expected = run_reference(runs, argv, 2, per_stage=True, poison=POISONED)
    assert runs[0].skipped == expected.skipped == [0, 0, 0, 1, 0, 0]
    assert_same(runs, expected, exact=True)


# of two samples each
SIZED = dict(
    global_batch_size=None, train_iters=8, step_batch_size_schedule="0:4 128:8 640:10"
)


COUNTS = (2, 2, 4, 4, 4, 4, 5, 5)
BY_SIZE = dict(  # all microbatches are late, or two of four, or two of five
    late=(2,) * 8,
    factor=(1.5, 1.5, 0.75, 0.75, 0.75, 0.75, 0.65, 0.65),
    gradient=(2, 2, 0.75, 0.75, 0.75, 0.75, 0.65, 0.65),
)


@pytest.mark.proof("late")
@pytest.mark.parametrize(
    "stages, flags, rule",
    [
        (2, "", {}),
        (1, "--bf16 --two-bw-correction extrapolate", dict(factor=1.0)),
        (2, "--fp16 --eval-interval 3 --eval-iters 1", {}),
        (2, "--two-bw-late-microbatches 2", dict(late=2)),
        (2, "--bf16 --two-bw-correction auto --two-bw-sync-iterations 0", BY_SIZE),
    ],
    ids=["two", "corrected", "evaluated", "late", "auto"],
)
def test_batches_of_several_sizes(stages, flags, rule):
    """The pipeline drains before a batch of another size; late microbatches and the
    correction follow each batch."""
    argv = lambda stages: command(stages, 2, "2bw", UNTIED, *flags.split(), **SIZED)
    runs = run_pipeline(argv(stages), stages)
    assert_same(runs, run_reference(runs, argv(1), COUNTS, **rule), exact=True)
