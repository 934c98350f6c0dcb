"""What must not change the losses: depth, split, width, tensor parallelism, recompute,
evaluation, a flush.

Bitwise where the additions keep their order; the tests say why where they do not.
"""

import pytest

from tests.distributed.compare import (
    DROPOUT,
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
FULL = dict(
    recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
)
CHUNKS = dict(num_virtual_stages_per_pipeline_rank=2)


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


# The schedule, the flags of both runs, and those that must change nothing.
UNCHANGED = {
    # three layers on the first stage, one on the last
    "uneven": ("2bw", dict(clip_grad=0), dict(decoder_first_pipeline_num_layers=3)),
    # A microbatch in flight is computed again with the weights and the mask of its
    # forward.
    "full": ("2bw", DROPOUT, FULL),
    "selective": ("2bw", DROPOUT, dict(recompute_granularity="selective")),
    # while microbatches and a received message wait
    "evaluation": ("2bw", DROPOUT, dict(eval_interval=1, eval_iters=2)),
    # The entry script feeds Megatron's interleaved schedule too. With ours a stage has
    # the same layers, as one chunk.
    "interleaved": ("megatron", dict(clip_grad=0), CHUNKS),
    "pipedream": ("pipedream", {}, CHUNKS),
    "gpipe": (
        "gpipe",
        {},
        dict(
            num_layers_per_virtual_pipeline_stage=1,
            microbatch_group_size_per_virtual_pipeline_stage=3,
        ),
    ),
    "layout": (
        "2bw",
        dict(pipeline_model_parallel_layout="Ettt|tL"),
        dict(pipeline_model_parallel_layout="E|t*3|t|L"),
    ),
}


@pytest.mark.proof("uneven", "full", "selective", "evaluation", "layout")
@pytest.mark.parametrize("name", UNCHANGED)
def test_what_changes_nothing(name):
    schedule, flags, more = UNCHANGED[name]
    plain = two_stages(UNTIED, schedule=schedule, **flags)
    runs = two_stages(UNTIED, schedule=schedule, **flags | more)
    assert_same_runs(runs, plain)
    if flags is DROPOUT:
        without = two_stages(UNTIED)
        assert plain[-1].losses != without[-1].losses, "dropout must do something"
