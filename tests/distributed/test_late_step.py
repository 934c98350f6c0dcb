"""The late step is exact: against the single-process reference, one gradient slot
against two, the distributed optimizer against the plain one; and no stage waits for
another in the training thread, whatever the timing.
"""

import functools
import random
import threading
import time

import pytest

from megatron_2bw.base.local_ranks import run_world
from tests.distributed.compare import (
    UNTIED,
    assert_equal_weights,
    assert_same_runs,
    check_rule,
    run_pipeline,
)
from tests.distributed.test_update_rule import POISONED, SCALE, SKIPPED, poison
from tests.distributed.training import Run, command, delayed, train
from tests.session import once_a_session

FP16 = "--fp16"
SHARDED = "--use-distributed-optimizer"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"


@pytest.mark.proof
def test_clipping_that_bites_in_some_iterations_only():
    runs, expected = check_rule(2, 3, UNTIED, clip_grad=1.5)
    norms = runs[0].grad_norms
    assert min(norms) < 1.5 < max(norms)
    assert norms == runs[1].grad_norms
    assert norms == pytest.approx(expected.grad_norms, rel=1e-6)
    for run in runs:
        assert run.iterations == list(range(1, 7))


# so that no sum over four stages is rounded in another order
UNCLIPPED = SCALE | dict(clip_grad=0)


@pytest.mark.proof
def test_an_inf_in_one_stage_skips_the_step_of_all():
    prepare = functools.partial(poison, stage=2)
    rule = dict(poison=POISONED)
    runs, expected = check_rule(
        4, 4, UNTIED, FP16, prepare=prepare, rule=rule, **UNCLIPPED
    )
    assert expected.skipped == SKIPPED
    assert runs[0].scales == expected.scales == [4096.0] * 3 + [2048.0] * 3


@once_a_session
def plain(*flags: str, **changes) -> list[Run]:
    return run_pipeline(command(2, 2, "2bw", *flags, width=2, **changes), 4)


@pytest.mark.proof
@pytest.mark.parametrize("flags, overlap", [("", ""), ("--bf16", OVERLAP)])
def test_distributed_optimizer(flags, overlap):
    """Two pipelines, sharded over them. Each gradient is the sum of two, so only the
    norm adds in another order: bitwise without clipping."""
    sharded = plain(flags, SHARDED, overlap, clip_grad=0)
    assert_same_runs(sharded[0::2], plain(flags, clip_grad=0)[0::2])
    assert_equal_weights(sharded[0], sharded[1])


@pytest.mark.proof
def test_distributed_optimizer_with_clipping():
    flags = f"{UNTIED} --disable-bias-linear"
    sharded = plain(flags, SHARDED)
    whole = plain(flags)
    assert max(whole[0].grad_norms) > 1.0, "clipping must bite"
    assert_same_runs(sharded[0::2], whole[0::2], tolerance=1e-6)
    assert sharded[0].grad_norms == pytest.approx(whole[0].grad_norms, rel=1e-6)


@pytest.mark.proof("")
@pytest.mark.parametrize("flags", ["", f"{SHARDED} --bf16"])
def test_one_gradient_slot_equals_two(flags):
    one = plain(flags, "--two-bw-memory one-slot")
    two = plain(flags)
    assert_same_runs(one[0::2], two[0::2])
    assert one[0].grad_norms == two[0].grad_norms


# --- nobody waits
# --------------------------------------------------------------------------------------

COLLECTIVES = """
    all_reduce broadcast barrier all_gather all_gather_into_tensor reduce_scatter_tensor all_gather_object
    broadcast_object_list monitored_barrier
""".split()


def spans_stages(args, kwargs) -> bool:
    """Whether the group of a collective has ranks of several stages."""
    import torch.distributed as dist
    from megatron.core import mpu

    group = kwargs.get("group")
    for arg in args:
        if isinstance(arg, dist.ProcessGroup):
            group = group or arg
    width = mpu.get_tensor_model_parallel_world_size()
    width *= mpu.get_data_parallel_world_size()
    stages = set()
    for member in dist.get_process_group_ranks(group or dist.group.WORLD):
        stages.add(member // width)
    return len(stages) > 1


def watch(rank: int, argv: list[str]) -> Run:
    """Train, and note each collective between two steps of the loop that spans several
    stages: in which thread."""
    import torch.distributed as dist
    from megatron.core import mpu, timers
    from megatron.training import training

    noted = set()
    watching = False

    def observe(owner, name: str, before=None, after=None) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def observed(*args, **kwargs):
            if before is not None:
                before(name, args, kwargs)
            result = original(*args, **kwargs)
            if after is not None:
                after()
            return result

        setattr(owner, name, observed)

    def note(name: str, args, kwargs) -> None:
        initialized = watching and mpu.model_parallel_is_initialized()
        if initialized and spans_stages(args, kwargs):
            noted.add(f"{threading.current_thread().name}: {name}")

    def start() -> None:
        nonlocal watching
        watching = True

    def stop(name: str, args, kwargs) -> None:
        nonlocal watching
        if name != "print_datetime" or args[0].startswith("after training"):
            watching = False

    for name in COLLECTIVES:
        observe(dist, name, before=note)
    # it has taken its collective at its import
    timers.dist_all_gather_func = dist.all_gather_into_tensor
    observe(training, "train_step", after=start)
    observe(training, "evaluate_and_print_results", before=stop)
    observe(training, "print_datetime", before=stop)
    run = train(rank, argv)
    run.events = sorted(noted)
    return run


WATCHED = """
    --fp16 --log-num-zeros-in-grad --exit-signal-handler --calculate-per-token-loss --use-distributed-optimizer
    --overlap-grad-reduce
"""


def assert_only_the_step_spans_stages(argv: list[str]) -> None:
    for run in run_world(4, watch, argv):
        assert run.events
        for event in run.events:
            assert event.startswith("2bw step: ")


@pytest.mark.proof
def test_no_collective_of_the_training_thread_spans_stages():
    """Clipping, dynamic loss scaling, tied embeddings, a log line in every iteration,
    exit conditions."""
    argv = command(2, 2, "2bw", WATCHED, width=2, exit_duration_in_mins=60)
    assert_only_the_step_spans_stages(argv)


# --- any timing
# --------------------------------------------------------------------------------------

SEEDS = 50
ONE_SLOT = "--two-bw-memory one-slot --two-bw-extra-warmup 1"


def train_with_delays(rank: int, argv: list[str], seconds: float) -> Run:
    """Every action, message and part of the late step starts after a random delay; a
    new seed each iteration."""
    from megatron_2bw.engine.p2p import Receiver, Sender
    from megatron_2bw.engine.pipeline import Pipeline
    from megatron_2bw.mcore.grad_buffers import Slot
    from megatron_2bw.mcore.late_step import LateStep
    from megatron_2bw.mcore.step_groups import Groups

    generators = {}

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
    delayed(Pipeline, "execute", delay)
    delayed(Receiver, "receive", delay)
    delayed(Sender, "send", delay)
    delayed(LateStep, "run_job", delay)
    delayed(Groups, "gather_over_pipeline", delay)
    delayed(Slot, "finish_grad_sync", delay)
    return train(rank, argv)


@pytest.mark.proof("3-3-1-")
@pytest.mark.parametrize(
    "stages, microbatches, width, flags",
    [
        (3, 3, 1, ""),
        (2, 4, 2, f"--bf16 {SHARDED} --overlap-grad-reduce {ONE_SLOT}"),
    ],
)
def test_fifty_random_timings_change_nothing(stages, microbatches, width, flags):
    """With the fewest microbatches and one more: no deadlock, the same losses and
    weights bit for bit."""
    sizes = dict(width=width, num_layers=stages)
    argv = command(stages, microbatches, "2bw", flags, train_iters=SEEDS, **sizes)
    ranks = stages * width
    delayed = run_world(ranks, train_with_delays, argv, 0.006, timeout=200)
    quiet = run_pipeline(argv, ranks)
    assert_same_runs(delayed[0::width], quiet[0::width])
    assert delayed[0].grad_norms == quiet[0].grad_norms
    assert len(quiet[-1].losses) == SEEDS
