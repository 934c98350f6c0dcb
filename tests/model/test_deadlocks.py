"""No order in which the ranks' threads issue their work to the GPUs ends in a deadlock;
without a mend some do."""

import functools
import random

import pytest

from tests.model import cases
from tests.model.explore import World, exhaust, sample
from tests.model.programs import Programs, device_waits, streams_of

# Seconds on an idle machine; others may be busy.
pytestmark = [pytest.mark.device, pytest.mark.nightly, pytest.mark.timeout(1200)]


def mapping(queues: int, seed: int):
    """Streams on hardware queues at random, on each rank in another way."""

    @functools.cache
    def queue_of(rank: int, stream: str) -> int:
        return random.Random(f"{queues} {seed} {rank} {stream}").randrange(queues)

    return queue_of


def receives(programs: Programs, messages: str) -> list[tuple[int, str]]:
    """(rank, stream) of the messages of a case with two ranks."""
    receiver = {"activations": 1, "gradients": 0}[messages]
    names = [
        name for name in streams_of(programs) if name.startswith(f"2bw {messages}")
    ]
    return [(receiver, name) for name in names]


def assert_free(world: World, runs: int) -> None:
    result = sample(world, runs)
    assert result.dead == 0, f"{result.dead} deadlocks; one of them:\n{result.example}"


def all_orders(programs: Programs, limit: int = 10**6):
    """With a queue for each stream."""
    return exhaust(World(programs, queue_of=None), limit)


def assert_all_free(programs: Programs, limit: int, what: object = ""):
    result = all_orders(programs, limit)
    assert result.complete, what
    assert result.dead == 0, f"{what}\n{result.example}"


def deadlocks(programs: Programs, runs: int = 200, **device) -> int:
    return sample(World(programs, **device), runs).dead


def deadlocks_by_mapping(programs: Programs, runs: int, queues: int, seeds: int) -> int:
    total = 0
    for seed in range(seeds):
        total += deadlocks(programs, runs, queue_of=mapping(queues, seed))
    return total


def examine(programs: Programs, runs: int) -> None:
    assert_all_free(programs, 10_000)
    world = World(programs)
    assert_free(world, runs)
    result = exhaust(world, 10 * runs)
    assert result.dead == 0, result.example
    for queues in (1, 2, 8, 32):
        assert_free(World(programs, mapping(queues, 0)), 8)
    for limit in (4, 16):
        assert_free(World(programs, limit=limit), runs // 20)
        assert_free(World(programs, queue_of=None, limit=limit), runs // 20)


@pytest.mark.proof("tied", "sharded", "saving", "tokens")
@pytest.mark.parametrize("name", cases.CASES)
def test_no_order_of_issue_ends_in_a_deadlock(name):
    examine(cases.programs_of(name), runs=30)


@pytest.mark.proof
def test_two_more_forwards_ahead_need_a_stream_for_each_message():
    """A message that waits for the one before in its stream stops its queue, with the
    other direction's messages."""
    programs = cases.programs_of("more-extra-warmup", cases.one_lane)
    assert all_orders(programs).dead == 0
    assert deadlocks(programs, runs=20) == 20
    assert deadlocks_by_mapping(programs, runs=20, queues=8, seeds=24) > 0


@pytest.mark.proof
@pytest.mark.parametrize("name", ["tied", "one-stage"])
def test_all_orders_of_two_ranks_are_explored(name):
    result = exhaust(World(cases.programs_of(name)))
    assert result.complete
    assert result.dead == 0, result.example
    assert result.states > 1000


@pytest.mark.proof
@pytest.mark.parametrize("name, mapped", [("tied", True), ("one-stage", False)])
def test_without_waits_after_collectives_one_queue_deadlocks(name, mapped):
    programs = cases.programs_of(name, cases.without_waits)
    assert deadlocks(programs) > 0
    assert deadlocks(programs, queue_of=None) == 0
    if mapped:
        assert deadlocks_by_mapping(programs, runs=200, queues=2, seeds=8) > 0


@pytest.mark.proof
@pytest.mark.parametrize("messages", ["activations", "gradients"])
def test_the_stream_of_the_step_must_not_be_that_of_a_receive(messages):
    """Streams of our own exclude it. Without holding back nearly every run would
    hang."""
    plants = (cases.without_waits, cases.without_holding_back)
    programs = cases.programs_of("tied", *plants)
    step = streams_of(programs, "2bw step")[0]
    alias = dict.fromkeys(receives(programs, messages), step)
    assert alias
    assert deadlocks(programs, queue_of=None, alias=alias) > 100


@pytest.mark.proof
def test_messages_of_both_directions_must_not_share_a_stream():
    """More process groups than torch's pool has streams could: a line at the start of a
    run names the flag."""
    programs = cases.programs_of("untied")
    alias = {}
    for rank in (0, 1):
        alias[rank, "2bw activations 0,1 1"] = "2bw gradients 0,1 1"
    assert deadlocks(programs, queue_of=None, alias=alias) > 0
    assert deadlocks(programs, queue_of=None) == 0


@pytest.mark.proof
def test_the_step_has_one_stream_beside_those_of_nccl():
    """StepGroup gives gloo no tensors of the GPU, which it would copy in streams of
    torch's pool."""
    assert len(streams_of(cases.programs_of("untied"), "2bw step")) == 1


@pytest.mark.proof
def test_launch_blocking_deadlocks():
    """CUDA_LAUNCH_BLOCKING=1 is refused."""
    programs = cases.programs_of("untied")
    assert deadlocks(programs, runs=40, queue_of=None, blocking=True) > 0


@pytest.mark.proof("2bw step-True", "train-True")
@pytest.mark.parametrize("locked", [True, False])
@pytest.mark.parametrize("thread", ["2bw step", "train"])
def test_a_rank_may_wait_for_the_whole_gpu_anywhere(thread, locked):
    """All orders, at each place. Without holding back it may not."""
    for place, programs in device_waits(cases.programs_of("tied"), thread, locked):
        assert_all_free(programs, 20_000, place)
    if thread == "2bw step":
        programs = cases.programs_of("tied", cases.without_holding_back)
        waits = device_waits(programs, thread, locked)
        assert any(all_orders(waiting).dead for _, waiting in waits)


def test_all_ranks_at_once_may_not_wait_where_a_step_has_let_receives_go():
    """Each would wait for a message that the other sends after its own wait. Without
    the driver's lock nowhere else."""
    programs = cases.programs_of("untied")
    kinds = set()
    for place, waiting in device_waits(programs, "train", False, everywhere=True):
        if all_orders(waiting).dead:
            kinds.add(place[0][0])
    assert kinds == {"S"}
    for _, waiting in device_waits(programs, "2bw step", False, everywhere=True):
        assert all_orders(waiting).dead == 0


def test_an_evaluation_connects_nothing_in_the_middle_of_a_run():
    """Megatron's messages of an evaluation have a group that exchanges a message before
    the first iteration."""
    for log in cases.logs_of("evaluation"):
        labels = []
        for _, label, kind, *values in log:
            if kind == "C" and values[1][0].startswith("PIPELINE_MODEL_PARALLEL"):
                labels.append(label)
        assert labels[0] == "start"
        assert len(set(labels)) > 1
