"""The runtime does what the schedule's list says, keeps the limits of the schedule, and
leaves no message over."""

import functools
import threading
import time
from typing import NamedTuple

import pytest

from megatron_2bw.base.local_ranks import run_world
from megatron_2bw.run.flags.project_flags import extra_warmup
from megatron_2bw.schedules import Shape, schedule_of
from megatron_2bw.tools.planner.cost.memory import communicators
from megatron_2bw.tools.planner.descriptions.plan import Plan
from tests.distributed.compare import UNTIED, assert_same_runs
from tests.distributed.training import Run, command, train


class Event(NamedTuple):
    """An executed action, and the state after it. The last two are messages that have
    not been received."""

    action: str
    in_flight: int
    versions: list[int]
    activations: int
    gradients: int


def observe(rank: int, argv: list[str]) -> Run:
    """Train, and note every executed action."""
    from megatron_2bw.engine.pipeline import Pipeline

    events = []

    def note(pipeline: Pipeline, action) -> None:
        stores = getattr(pipeline.update, "stores", None)
        neighbours = pipeline.neighbours
        event = Event(
            str(action),
            len(pipeline.in_flight),
            stores.versions if stores else [],
            getattr(neighbours.activations_in, "outstanding", 0),
            getattr(neighbours.gradients_in, "outstanding", 0),
        )
        events.append(event)

    Pipeline.observe = note
    run = train(rank, argv)
    run.events = events
    return run


@pytest.mark.proof("2bw-4-4-None", "2bw-2-3-1")
@pytest.mark.parametrize(
    "schedule, stages, microbatches, option",
    [
        ("2bw", 4, 4, None),
        ("2bw", 2, 3, "1"),
        ("pipedream", 2, 1, None),
        ("gpipe", 2, 3, "2"),
    ],
)
def test_executes_the_list(schedule, stages, microbatches, option):
    """option: the extra warm-up of 2bw, the round of gpipe."""
    flags = {}
    options = {}
    if option and schedule == "2bw":
        flags = dict(two_bw_extra_warmup=option)
        options = dict(extra_warmup=extra_warmup(option))
    elif option:
        flags = dict(gpipe_round=option)
        options = dict(gpipe_round=int(option))
    argv = command(stages, microbatches, schedule, UNTIED, train_iters=4, **flags)
    runs = run_world(stages, observe, argv)
    shape = Shape(stages, microbatches, 0, 4)
    rule = schedule_of(schedule, **options)
    for stage, run in enumerate(runs):
        check_events(run.events, rule, shape, stage)


def check_events(events: list[Event], rule, shape: Shape, stage: int) -> None:
    actions = []
    for iteration in range(4):
        actions += map(str, rule.actions(shape, stage, iteration))
    assert [event.action for event in events] == actions
    in_flight = max(event.in_flight for event in events)
    assert in_flight == rule.max_in_flight(shape, stage)
    versions = max(len(event.versions) for event in events)
    most_versions = 0 if rule.flushes else rule.max_versions(shape, stage)
    assert versions <= most_versions
    ahead = held = 0
    if not rule.flushes:
        ahead = rule.ahead(shape, stage)
        # Each stage but the first holds received inputs, one without extra warm-up; no
        # gradient is left over.
        held = rule.ahead(shape, stage - 1) - ahead if stage else 0
    for event, after in zip(events, events[1:-1]):
        if event.action.startswith("R"):
            end = event if rule.late_step else after
            assert end[-2:] == (held, 0)
            assert end.in_flight == ahead
    last = events[-1]
    assert last.in_flight == last.activations == last.gradients == 0


class Once:
    """A message's work that can be waited for twice."""

    def __init__(self, work):
        self.work = work
        self.done = False
        self.lock = threading.Lock()

    def is_completed(self) -> bool:
        return self.done

    def wait(self) -> None:
        with self.lock:
            if not self.done:
                self.work.wait()
            self.done = True


def train_like_nccl(rank: int, argv: list[str], waits_at: str = "") -> Run:
    """Every posted message occupies the device until its other end has come, as NCCL's
    kernels do, and torch.cuda.synchronize, which Megatron's timers call in every
    forward and backward, waits for all of them. So does whatever a late step's thread
    does for the first time.

    waits_at: "start" or "end" of every late step, where its thread waits for the device
    too
    """
    import torch

    from megatron_2bw.engine.p2p import Channel
    from megatron_2bw.mcore.late_step import LateStep

    posted = []

    def occupying(method):
        def post(self, tensor):
            posted.append(Once(method(self, tensor)))
            return posted[-1]

        return post

    def synchronize(device=None) -> None:
        while posted:
            try:
                message = posted.pop()
            except IndexError:  # the other thread was faster
                break
            message.wait()

    update = LateStep.run_job

    def wait(self, place: str) -> None:
        if place == waits_at:
            time.sleep(0.1)  # the training thread has posted all that it may
            synchronize()
        elif not self.has_run:
            synchronize()

    def first_use(self, *args):
        wait(self, "start")
        result = update(self, *args)
        wait(self, "end")
        return result

    LateStep.run_job = first_use
    Channel.send = occupying(Channel.send)
    Channel.receive = occupying(Channel.receive)
    Channel.occupies_device = True
    torch.cuda.synchronize = synchronize
    return train(rank, argv)


def assert_same_as_trained(runs: list[Run], argv: list[str]) -> None:
    assert_same_runs(runs, run_world(len(runs), train, argv))


@pytest.mark.cpu
@pytest.mark.parametrize(
    "schedule, microbatches, extra",
    [("2bw", 3, "1"), ("pipedream-flush", 3, None), ("pipedream", 1, None)],
)
def test_timers_may_wait_for_the_whole_device(schedule, microbatches, extra):
    """--timing-log-level 2 on NCCL: no receive may be posted whose message this stage
    has yet to cause.

    So with two more forwards ahead the stages would wait for each other: combinations.py
    refuses that.
    """
    argv = functools.partial(command, 2, microbatches, schedule, UNTIED, train_iters=4)
    timers = "--no-barrier-with-level-1-timing --timing-log-level 2"
    timed = argv(timers, two_bw_extra_warmup=extra)
    assert_same_as_trained(run_world(2, train_like_nccl, timed, timeout=60), argv())


@pytest.mark.cpu
@pytest.mark.proof("4-4-None-start")
@pytest.mark.parametrize(
    "stages, microbatches, extra, place", [(4, 4, None, "start"), (2, 3, "1", "end")]
)
def test_a_late_step_may_wait_for_the_whole_device(stages, microbatches, extra, place):
    """A cudaFree, a kernel that is loaded: no receive is posted then whose message
    depends on the step."""
    argv = command(stages, microbatches, "2bw", UNTIED, two_bw_extra_warmup=extra)
    runs = run_world(stages, train_like_nccl, argv, place, timeout=60)
    assert_same_as_trained(runs, argv)


def watch_the_start(rank: int, argv: list[str]) -> Run:
    """Trains as `train_like_nccl`, without the timers; notes for each iteration whether its
    step is still being made."""
    from megatron_2bw.mcore.runtime import MegatronRuntime

    pending = []
    forward_backward = MegatronRuntime.forward_backward

    def noting(self, **values):
        result = forward_backward(self, **values)
        if not values.get("forward_only"):
            pending.append(self._update.pending is not None)
        return result

    MegatronRuntime.forward_backward = noting
    run = train_like_nccl(rank, argv)
    run.events = pending
    return run


@pytest.mark.cpu
@pytest.mark.proof("--fp16-3")
@pytest.mark.parametrize(
    "flags, skipped", [("--fp16", 3), ("--two-bw-extra-warmup 2", 0)]
)
def test_on_nccl_steps_are_late_once_everything_has_run_once(flags, skipped):
    """From the third iteration on, and with 16-bit floats after the first step that was
    not skipped."""
    changes = dict(train_iters=10, initial_loss_scale=2.0**21, hysteresis=1)
    argv = command(2, 4, "2bw", UNTIED, flags, **changes)
    runs = run_world(2, watch_the_start, argv, timeout=60)
    for run in runs:
        assert skipped <= sum(run.skipped) < len(run.skipped)
        cold = max(2, run.skipped.index(0) + 1)
        pending = [False] * cold + [True] * (9 - cold)
        assert run.events == [*pending, False]
    assert_same_as_trained(runs, argv)


class Group(NamedTuple):
    """A process group that a rank makes, or makes with others.

    nccl: it would be one of NCCL on GPUs; here all are gloo's
    """

    ours: bool
    name: str
    ranks: int
    nccl: bool


def note_groups(rank: int, argv: list[str]) -> Run:
    """Train, and note the groups in their order."""
    import torch.distributed as dist

    from megatron_2bw.mcore import runtime

    noted = []
    new_group = dist.new_group

    def noting(ranks=None, *args, **kwargs):
        description = kwargs.get("group_desc") or ""
        name = description.removeprefix("2bw ")
        default = kwargs.get("backend") is None
        nccl = default or name in ("activations", "gradients")
        count = dist.get_world_size() if ranks is None else len(ranks)
        noted.append(Group(name != description, name, count, nccl))
        return new_group(ranks, *args, **kwargs)

    def warning() -> None:
        noted.append(Group(True, "warning", 0, False))

    dist.new_group = noting
    runtime.streams_warning = warning
    run = train(rank, argv)
    run.events = noted
    return run


LATE = [
    "world",
    "statistics",
    "data",
    "embedding",
    "embedding meeting",
    "pipeline",
    "tensor",
]


@pytest.mark.parametrize(
    "schedule, sizes, flags, extra, after",
    [
        ("2bw", (3, 1, 1), f"{UNTIED} --num-layers 3", (0, 1), LATE),
        ("2bw", (1, 2, 2), "", (), LATE),
        ("2bw", (2, 1, 2), "--optimizer muon", (), [*LATE, "matrices"]),
        ("gpipe", (2, 2, 1), "", (), ["reports"]),
    ],
)
def test_every_rank_makes_the_same_groups_in_the_same_order(
    schedule, sizes, flags, extra, after
):
    """Megatron's, connections, late step, log. torch >= 2.15 makes a communicator of
    NCCL by splitting the world's, in which all ranks take part; the planner knows how
    many of several ranks each stage has.

    sizes: stages, width, tensor ranks
    """
    stages, width, tensor = sizes
    changes = dict(width=width, tensor_model_parallel_size=tensor, train_iters=4)
    if extra:
        changes["two_bw_extra_warmup"] = ",".join(map(str, extra))
    argv = command(stages, 4, schedule, flags, **changes)
    runs = run_world(stages * width * tensor, note_groups, argv)
    plan = Plan(tensor, stages, width, 2, 4, schedule=schedule, extra_warmup=extra)
    lanes = 1 + sum(extra)
    links = (
        ["activations", "gradients"] + ["activations"] * lanes + ["gradients"] * lanes
    )
    nccl_of_first = None
    for rank, run in enumerate(runs):
        ours = [group for group in run.events if group.ours]
        assert [group.name for group in ours] == [*links, *after, "warning"]
        nccl = [(group.ours, group.name) for group in run.events if group.nccl]
        nccl_of_first = nccl_of_first or nccl
        assert nccl == nccl_of_first
        shared = 0
        for group in ours:
            if group.nccl and group.ranks > 1 and group.name != "matrices":
                shared += 1
        # with several stages also Megatron's for evaluations
        evaluations = int(stages > 1)
        held = communicators(plan, rank // (width * tensor))
        assert shared + evaluations == len(held)
