"""What must not change the losses: depth, split, width, tensor parallelism, recompute,
evaluation, a flush.

Bitwise where the additions keep their order; the tests say why where they do not.
"""

import pytest

from tests.distributed.compare import (
    UNTIED,
    assert_equal_weights,
    assert_same_losses,
    assert_same_runs,
    run_pipeline,
)
from tests.distributed.training import command
from tests.session import once_a_session

# the keys' bias has a gradient of rounding only, which Adam would blow up
NO_BIAS = "--disable-bias-linear"
DROPOUT = dict(attention_dropout=0.1, hidden_dropout=0.1)
FULL = dict(
    recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
)


@once_a_session
def two_stages(*flags: str, schedule: str = "2bw", **changes):
    """A run on two stages, made once for all tests that compare with it."""
    return run_pipeline(command(2, 4, schedule, *flags, **changes), 2)


@pytest.mark.proof
@pytest.mark.parametrize("stages", [1, 4])
def test_depth(stages):
    """The delay is 1 whatever the depth, so one device, two and four give the same
    losses and weights.

    Without clipping nothing is added in another order.
    """
    runs = run_pipeline(command(stages, 4, "2bw", UNTIED, clip_grad=0), stages)
    assert_same_runs(runs, two_stages(UNTIED, clip_grad=0))


@pytest.mark.proof
def test_uneven_stages():
    """Three layers on the first stage, one on the last: the same numbers as two and
    two."""
    runs = two_stages(UNTIED, clip_grad=0, decoder_first_pipeline_num_layers=3)
    assert_same_runs(runs, two_stages(UNTIED, clip_grad=0))


@pytest.mark.proof("-")
@pytest.mark.parametrize(
    "flags, overlap",
    [("", ""), ("--calculate-per-token-loss", "--overlap-grad-reduce")],
)
def test_width(flags, overlap):
    """Two pipelines of two microbatches each: the same batch, its gradients added by
    pairs. The number of tokens is summed over the pipelines; the gradients too, inside
    the batch's last backward."""
    flags = (UNTIED, NO_BIAS, flags)
    runs = run_pipeline(command(2, 2, "2bw", *flags, overlap, width=2), 4)
    assert_equal_weights(runs[0], runs[1])
    assert_same_runs(runs[0::2], two_stages(*flags), tolerance=1e-6)


@pytest.mark.proof
def test_tensor_parallel():
    """Row-parallel layers add their partial sums over the ranks, so equal to rounding
    only."""
    flags = (UNTIED, NO_BIAS)
    runs = run_pipeline(command(2, 4, "2bw", *flags, tensor_model_parallel_size=2), 4)
    expected = two_stages(*flags)
    assert_same_losses(runs, expected, tolerance=1e-6)
    assert runs[0].grad_norms == pytest.approx(expected[0].grad_norms, rel=1e-5)


@pytest.mark.proof("full", "selective")
@pytest.mark.parametrize(
    "recompute",
    [FULL, dict(recompute_granularity="selective")],
    ids=["full", "selective"],
)
def test_recompute_with_dropout(recompute):
    """The recompute of a microbatch in flight sees the weights and the dropout mask of
    its forward."""
    plain = two_stages(UNTIED, **DROPOUT)
    assert_same_runs(two_stages(UNTIED, **DROPOUT, **recompute), plain)
    without = two_stages(UNTIED)
    assert plain[-1].losses != without[-1].losses, "dropout must do something"


@pytest.mark.proof
def test_evaluation_leaves_the_pipeline_as_it_is():
    """Evaluation runs while microbatches and a received message wait; training goes on
    as without it, dropout too."""
    evaluated = two_stages(UNTIED, eval_interval=1, eval_iters=2, **DROPOUT)
    assert_same_runs(evaluated, two_stages(UNTIED, **DROPOUT))


@pytest.mark.proof
@pytest.mark.parametrize(
    "schedule, size",
    [("pipedream-flush", None), ("gpipe", None), ("gpipe", 3), ("no-pipelining", None)],
)
def test_flush_schedules_are_megatrons(schedule, size):
    """Tied embeddings, dropout, clipping and full recompute: losses, weights and norms
    of Megatron's own schedule.

    size: of a round of gpipe; of four microbatches one is in a round of its own.
    """
    runs = two_stages(schedule=schedule, gpipe_round=size, **DROPOUT, **FULL)
    expected = two_stages(schedule="megatron", **DROPOUT, **FULL)
    assert_same_runs(runs, expected)
    assert runs[0].grad_norms == expected[0].grad_norms


def test_gpipe_in_rounds_with_the_distributed_optimizer():
    """Its reduction starts in the last round's last backward: one in a batch, as with
    Megatron's schedule."""
    flags = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    argv = command(2, 3, "gpipe", flags, width=2, gpipe_round=2)
    runs = run_pipeline(argv, 4)
    expected = run_pipeline(command(2, 3, "megatron", flags, width=2), 4)
    assert_same_runs(runs[0::2], expected[0::2])


def test_megatrons_interleaved_stages():
    """The entry script feeds Megatron's interleaved schedule too: two chunks a stage,
    the same numbers."""
    changes = dict(schedule="megatron", clip_grad=0)
    runs = two_stages(UNTIED, num_virtual_stages_per_pipeline_rank=2, **changes)
    assert_same_runs(runs, two_stages(UNTIED, **changes))


@pytest.mark.proof("2bw")
@pytest.mark.parametrize(
    "schedule, chunks, one",
    [
        (
            "2bw",
            "--pipeline-model-parallel-layout E|t*3|t|L",
            "--pipeline-model-parallel-layout Ettt|tL",
        ),
        ("pipedream", "--num-virtual-stages-per-pipeline-rank 2", ""),
        (
            "gpipe",
            "--num-layers-per-virtual-pipeline-stage 1 "
            "--microbatch-group-size-per-virtual-pipeline-stage 3",
            "",
        ),
    ],
    ids=("2bw", "pipedream", "gpipe"),
)
def test_a_stage_is_one_chunk(schedule, chunks, one):
    """Flags of interleaving change nothing: a stage has the same layers, as one
    chunk."""
    runs = two_stages(UNTIED, chunks, schedule=schedule)
    assert_same_runs(runs, two_stages(UNTIED, one, schedule=schedule))
