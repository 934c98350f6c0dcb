"""The late step is exact: against the single-process reference, one gradient slot
against two, the distributed optimizer against the plain one; and no stage waits for
another in the training thread, whatever the timing.
"""

from __future__ import annotations

import functools
import random
import threading
import time

import pytest
import torch

from megatron_2bw.base.local_ranks import run_world
from tests.distributed.compare import (
    UNTIED,
    assert_same,
    assert_same_runs,
    reference_run,
    run_pipeline,
    run_reference,
)
from tests.distributed.reference import Rule
from tests.distributed.test_update_rule import POISONED, poison
from tests.distributed.training import Run, command, delayed, train
from tests.session import once_a_session

FP16 = ("--fp16",)
SCALE = dict(initial_loss_scale=4096, hysteresis=1)


@pytest.mark.proof
def test_clipping_that_bites_in_some_iterations_only():
    changes = dict(clip_grad=1.5)
    runs = run_pipeline(command(2, 3, "2bw", UNTIED, **changes), 2)
    expected = run_reference(runs, command(1, 3, "2bw", UNTIED, **changes), 3)
    assert min(runs[0].grad_norms) < 1.5 < max(runs[0].grad_norms)
    assert_same(runs, expected, exact=True)
    assert (
        runs[0].grad_norms
        == runs[1].grad_norms
        == pytest.approx(expected.grad_norms, rel=1e-6)
    )
    assert runs[0].iterations == runs[1].iterations == [1, 2, 3, 4, 5, 6]


# so that no sum over four stages is rounded in another order
UNCLIPPED = SCALE | dict(clip_grad=0)


@pytest.mark.proof
def test_an_inf_in_one_stage_skips_the_step_of_all():
    argv = command(4, 4, "2bw", UNTIED, *FP16, **UNCLIPPED)
    runs = run_pipeline(argv, 4, functools.partial(poison, stage=2))
    expected = reference_run(
        command(1, 4, "2bw", UNTIED, *FP16, **UNCLIPPED), Rule(4, poison=POISONED)
    )
    assert (
        [run.skipped for run in runs]
        == [[0, 0, 0, 1, 0, 0]] * 4
        == [expected.skipped] * 4
    )
    assert runs[0].scales == expected.scales == [4096.0] * 3 + [2048.0] * 3
    assert_same(runs, expected, exact=True)


@once_a_session
def plain(*flags: str, **changes) -> list[Run]:
    return run_pipeline(command(2, 2, "2bw", *flags, width=2, **changes), 4)


OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")


@pytest.mark.proof
@pytest.mark.parametrize("flags, overlap", [((), ()), (("--bf16",), OVERLAP)])
def test_distributed_optimizer(flags, overlap):
    """Two pipelines, sharded over them. Each gradient is the sum of two, so only the
    norm adds in another order: bitwise without clipping."""
    sharded = plain(*flags, "--use-distributed-optimizer", *overlap, clip_grad=0)
    assert_same_runs(sharded[0::2], plain(*flags, clip_grad=0)[0::2], exact=True)
    for name, value in sharded[0].weights.items():
        assert torch.equal(value, sharded[1].weights[name]), (
            "the replicas have drifted apart"
        )


@pytest.mark.proof
def test_distributed_optimizer_with_clipping():
    flags = (UNTIED, "--disable-bias-linear")
    sharded, whole = (
        plain(*flags, *more) for more in (("--use-distributed-optimizer",), ())
    )
    assert max(whole[0].grad_norms) > 1.0, "clipping must bite"
    assert_same_runs(sharded[0::2], whole[0::2], exact=False)
    assert sharded[0].grad_norms == pytest.approx(whole[0].grad_norms, rel=1e-6)


@pytest.mark.proof("flags0")
@pytest.mark.parametrize("flags", [(), ("--use-distributed-optimizer", "--bf16")])
def test_one_gradient_slot_equals_two(flags):
    one, two = plain(*flags, "--two-bw-gradient-slots", "1"), plain(*flags)
    assert_same_runs(one[0::2], two[0::2], exact=True)
    assert one[0].grad_norms == two[0].grad_norms


# --- nobody waits
# --------------------------------------------------------------------------------------

COLLECTIVES = """
    all_reduce broadcast barrier all_gather all_gather_into_tensor reduce_scatter_tensor all_gather_object
    broadcast_object_list monitored_barrier
""".split()


def watch(rank: int, argv: list[str]) -> Run:
    """Train, and note each collective between two steps of the loop that spans several
    stages: in which thread."""
    import torch.distributed as dist
    from megatron.core import mpu
    from megatron.training import training

    noted: set[str] = set()
    steps = [0]

    def noting(name):
        original = getattr(dist, name)

        def collective(*args, **kwargs):
            group = kwargs.get(
                "group",
                next((arg for arg in args if isinstance(arg, dist.ProcessGroup)), None),
            )
            if 1 <= steps[0] and mpu.model_parallel_is_initialized():
                members = dist.get_process_group_ranks(group or dist.group.WORLD)
                width = (
                    mpu.get_tensor_model_parallel_world_size()
                    * mpu.get_data_parallel_world_size()
                )
                if len({member // width for member in members}) > 1:
                    noted.add(f"{threading.current_thread().name}: {name}")
            return original(*args, **kwargs)

        setattr(dist, name, collective)

    for name in COLLECTIVES:
        noting(name)
    from megatron.core import timers  # it has taken its collective at its import

    timers.dist_all_gather_func = dist.all_gather_into_tensor
    step, evaluate = training.train_step, training.evaluate_and_print_results

    @functools.wraps(step)
    def counted(*args, **kwargs):
        result = step(*args, **kwargs)
        steps[0] += 1
        return result

    @functools.wraps(evaluate)
    def after_training(*args, **kwargs):
        steps[0] = -1000
        return evaluate(*args, **kwargs)

    training.train_step, training.evaluate_and_print_results = counted, after_training
    stop = training.print_datetime

    def at_the_end(text, *args, **kwargs):
        if text.startswith("after training"):
            steps[0] = -1000
        return stop(text, *args, **kwargs)

    training.print_datetime = at_the_end
    run = train(rank, argv)
    run.events = sorted(noted)
    return run


WATCHED = """
    --fp16 --log-num-zeros-in-grad --exit-signal-handler --calculate-per-token-loss --use-distributed-optimizer
    --overlap-grad-reduce
""".split()


@pytest.mark.proof
def test_no_collective_of_the_training_thread_spans_stages():
    """Clipping, dynamic loss scaling, tied embeddings, a log line in every iteration,
    exit conditions."""
    argv = command(2, 2, "2bw", *WATCHED, width=2, exit_duration_in_mins=60)
    for run in run_world(4, watch, argv):
        assert run.events and all(
            event.startswith("2bw step: ") for event in run.events
        ), run.events


# --- any timing
# --------------------------------------------------------------------------------------

SEEDS = 50
ONE_SLOT = ("--two-bw-gradient-slots", "1", "--two-bw-extra-warmup", "1")


def train_with_delays(rank: int, argv: list[str], seconds: float) -> Run:
    """Every action, message and part of the late step starts after a random delay; a
    new seed each iteration."""
    from megatron_2bw.engine.p2p import Receiver, Sender
    from megatron_2bw.engine.pipeline import Pipeline
    from megatron_2bw.mcore.grad_buffers import Slot
    from megatron_2bw.mcore.late_step import LateStep
    from megatron_2bw.mcore.step_groups import Groups

    generators: dict[str, random.Random] = {}

    def delay() -> None:
        name = threading.current_thread().name
        generator = generators.setdefault(name, random.Random(f"{rank} {name}"))
        if generator.random() < 0.4:
            time.sleep(generator.random() * seconds)

    run_iteration = Pipeline.run

    def reseeded(self, iteration, *args):
        for name in list(generators):
            generators[name] = random.Random(f"{rank} {name} {iteration}")
        return run_iteration(self, iteration, *args)

    Pipeline.run = reseeded
    for owner, name in (
        (Pipeline, "execute"),
        (Receiver, "receive"),
        (Sender, "send"),
        (LateStep, "run_job"),
        (Groups, "gather_over_pipeline"),
        (Slot, "finish_grad_sync"),
    ):
        delayed(owner, name, delay)
    return train(rank, argv)


@pytest.mark.proof("3-3-1-flags0")
@pytest.mark.parametrize(
    "stages, microbatches, width, flags",
    [
        (3, 3, 1, ()),
        (
            2,
            4,
            2,
            (
                "--bf16",
                "--use-distributed-optimizer",
                "--overlap-grad-reduce",
                *ONE_SLOT,
            ),
        ),
    ],
)
def test_fifty_random_timings_change_nothing(stages, microbatches, width, flags):
    """With the fewest microbatches and one more: no deadlock, the same losses and
    weights bit for bit."""
    argv = command(
        stages,
        microbatches,
        "2bw",
        *flags,
        width=width,
        train_iters=SEEDS,
        num_layers=stages,
        **SCALE,
    )
    delayed = run_world(stages * width, train_with_delays, argv, 0.006, timeout=200)
    quiet = run_pipeline(argv, stages * width)
    assert_same_runs(delayed[0::width], quiet[0::width], exact=True)
    assert (
        delayed[0].grad_norms == quiet[0].grad_norms and len(quiet[-1].losses) == SEEDS
    )
