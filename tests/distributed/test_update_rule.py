"""The pipeline's losses and final weights against a single-process reference of the
update rule (design, section 2).

Equality is bitwise wherever the same numbers are added in the same order:
gradients are, because microbatches run backward in order; the gradient norm is, because
the reference adds the squares by stage. Not with tied embeddings (the pipeline adds the
batch's sum of one stage to that of the other, one process adds the two microbatch by
microbatch), and not over four stages with clipping (gloo adds four squares in an order
of its own).
"""

import itertools
import re

import pytest

from megatron_2bw.base.local_ranks import own_output
from tests.distributed.compare import SGD, UNTIED, check_rule
from tests.distributed.training import Run

SCALE = dict(initial_loss_scale=4096, hysteresis=1)  # of fp16
NO_BIAS = "--disable-bias-linear"


def assert_clipped(run: Run) -> None:
    assert max(run.grad_norms) > 1.0, "clipping must bite"


@pytest.mark.proof(
    "1-2-changes0-0", "2-2-changes1-0", "2-3-changes2-0", "4-4-changes3-1e-06"
)
@pytest.mark.parametrize(
    "stages, microbatches, changes, tolerance",
    [
        (1, 2, {}, 0),
        (2, 2, SGD, 0),
        (2, 3, {}, 0),
        (4, 4, {}, 1e-6),
        (4, 6, SGD, 1e-6),
    ],
)
def test_fp32(stages, microbatches, changes, tolerance):
    runs, expected = check_rule(
        stages, microbatches, UNTIED, tolerance=tolerance, **changes
    )
    assert_clipped(runs[0])
    assert runs[0].grad_norms == pytest.approx(expected.grad_norms, rel=1e-6)


@pytest.mark.proof
def test_four_stages_without_clipping_are_exact():
    check_rule(4, 4, UNTIED, clip_grad=0)


@pytest.mark.proof("2-3-1")
@pytest.mark.parametrize(
    "stages, microbatches, extra", [(2, 3, "1"), (2, 6, "3"), (4, 6, "0,2,0")]
)
def test_extra_warmup(stages, microbatches, extra):
    """Forwards that run further ahead read the same versions: nothing changes."""
    own = f"--two-bw-extra-warmup {extra}"
    clip = 0 if stages == 4 else 1.0
    check_rule(stages, microbatches, UNTIED, own=own, clip_grad=clip)


@pytest.mark.proof("2-changes0", "4-changes1")
@pytest.mark.parametrize("stages, changes", [(2, {}), (4, SGD)])
def test_tied_embeddings(stages, changes):
    """First and last stage hold copies of the embedding; `full_weights` checks that
    they stay equal bit for bit.

    Without biases: the gradient of the keys' bias is zero but for rounding, and Adam
    would blow the rounding up.
    """
    runs, _ = check_rule(stages, 4, NO_BIAS, tolerance=1e-6, **changes)
    assert_clipped(runs[0])


def test_tied_embeddings_on_one_stage_are_exact():
    check_rule(1, 3)


@pytest.mark.proof
@pytest.mark.parametrize("precision", ["--bf16", "--fp16"])
def test_mixed_precision(precision):
    check_rule(2, 4, UNTIED, precision, initial_loss_scale=4096)


POISONED = 3
SKIPPED = [0, 0, 0, 1, 0, 0]  # of a run in which POISONED has an inf


def poison(
    model, optimizer, stage: int = 0, poisoned: tuple[int, ...] = (POISONED,)
) -> None:
    """Put an inf into the gradients of one stage in some batches, before the statistics
    are taken."""
    from megatron.core import mpu
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.utils import get_model_config

    batches = itertools.count()

    def finalize(chunks, *args, **kwargs):
        finalize_model_grads(chunks, *args, **kwargs)
        here = mpu.get_pipeline_model_parallel_rank() == stage
        if next(batches) in poisoned and here:
            next(iter(chunks[0].parameters())).main_grad.view(-1)[0] = float("inf")

    get_model_config(model[0]).finalize_model_grads_func = finalize


@pytest.mark.proof
def test_fp16_skips_a_step_with_inf_and_versions_still_advance():
    """After a skipped step W(j+1) = W(j); the batches after it name the same versions
    as ever."""
    rule = dict(poison=POISONED)
    runs, expected = check_rule(
        2, 4, UNTIED, "--fp16", prepare=poison, rule=rule, **SCALE
    )
    assert expected.skipped == SKIPPED
    assert runs[0].scales == expected.scales == [4096.0] * 3 + [2048.0] * 3


@pytest.mark.parametrize(
    "stages, flags, tolerance",
    [(1, UNTIED, 0), (2, UNTIED, 1e-6), (2, "--bf16", 1e-2), (1, "--fp16", 0)],
)
def test_heads_that_predict_several_tokens(stages, flags, tolerance):
    """The last stage has a copy of the embedding for them; the log has their losses of
    each batch."""
    heads = "--mtp-num-layers 2 --position-embedding-type rope"
    poisoned = {}
    if flags == "--fp16":
        poisoned = dict(prepare=poison, rule=dict(poison=POISONED))
    runs, _ = check_rule(
        stages,
        4,
        flags,
        NO_BIAS,
        heads,
        finish=losses_of_heads,
        tolerance=tolerance,
        **poisoned,
        **SCALE,
    )
    losses = runs[-1].events
    assert len(losses) == len(set(losses)) == 12


def losses_of_heads(run, model) -> None:
    run.events = re.findall(r"mtp_[12] loss: (\S+)", own_output())


@pytest.mark.proof("4-2")
@pytest.mark.parametrize("stages, microbatches", [(2, 1), (4, 2)])
def test_pipedream(stages, microbatches):
    """Each stage's newest weights at a forward, kept for its backward, the norm of each
    stage by itself."""
    runs, expected = check_rule(stages, microbatches, UNTIED, schedule="pipedream")
    norms = pytest.approx(expected.grad_norms, rel=1e-6)
    assert runs[0].grad_norms == norms, "the log shows the largest stage's norm"


def test_pipedream_skips_the_step_of_the_stage_with_inf():
    """A constant loss scale; stage 0 meets an inf in one batch and alone keeps its
    weights."""
    flags = f"{UNTIED} --fp16 --loss-scale 256"
    rule = dict(poison=POISONED)
    _, expected = check_rule(
        2, 2, flags, schedule="pipedream", prepare=poison, rule=rule
    )
    assert expected.skipped == SKIPPED


# of two samples each
SIZED = dict(
    global_batch_size=None, train_iters=8, step_batch_size_schedule="0:4 128:8 640:10"
)
COUNTS = (2, 2, 4, 4, 4, 4, 5, 5)
HALF_LATE = "--two-bw-late 50% --two-bw-correction auto"
BY_SIZE = dict(  # one of two microbatches is late, or two of four, or two of five
    late=(1, 1, 2, 2, 2, 2, 2, 2),
    factor=(0.75,) * 6 + (0.65,) * 2,
    gradient=(0.75,) * 6 + (0.65,) * 2,
)


@pytest.mark.proof("late")
@pytest.mark.parametrize(
    "stages, flags, rule",
    [
        (2, "", {}),
        (1, "--bf16 --two-bw-correction 1", dict(factor=1.0)),
        (2, "--fp16 --eval-interval 3 --eval-iters 1", {}),
        (2, "--two-bw-late 2", dict(late=2)),
        (2, f"--bf16 {HALF_LATE} --two-bw-sync-iterations 0", BY_SIZE),
    ],
    ids=["two", "corrected", "evaluated", "late", "auto"],
)
def test_batches_of_several_sizes(stages, flags, rule):
    """The pipeline drains before a batch of another size; late microbatches and the
    correction follow each batch."""
    rule = dict(microbatches=COUNTS, **rule)
    check_rule(stages, 2, UNTIED, flags, rule=rule, **SIZED)
