"""The runtime does what the schedule's list says, keeps the limits of the schedule, and
leaves no message over."""

from __future__ import annotations

import threading
import time

import pytest

from megatron_2bw.base.local_ranks import run_world
from megatron_2bw.run.flags.project_flags import extra_warmup
from megatron_2bw.schedules import Shape, schedule_of
from megatron_2bw.tools.planner.cost.memory import communicators
from megatron_2bw.tools.planner.descriptions.plan import Plan
from tests.distributed.compare import UNTIED, assert_same_runs
from tests.distributed.training import Run, command, train


def observe(rank: int, argv: list[str]) -> Run:
    """Train, and note every executed action, the state after it, and the messages left
    at each iteration's end."""
    from megatron_2bw.engine.pipeline import Pipeline

    events: list[tuple] = []

    def observe(pipeline: Pipeline, action) -> None:
        receivers = pipeline.neighbours.activations_in, pipeline.neighbours.gradients_in
        outstanding = [
            0 if receiver is None else receiver.outstanding for receiver in receivers
        ]
        stores = getattr(pipeline.update, "stores", None)
        events.append(
            (
                str(action),
                len(pipeline.in_flight),
                stores.versions if stores else None,
                outstanding,
            )
        )

    Pipeline.observe = observe
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
    extra, size = (option, None) if schedule == "2bw" else (None, option)
    flags = dict(two_bw_extra_warmup=extra, gpipe_round=size)
    runs = run_world(
        stages,
        observe,
        command(stages, microbatches, schedule, UNTIED, train_iters=4, **flags),
    )
    rule = schedule_of(
        schedule,
        extra_warmup=extra_warmup(extra) if extra else (),
        gpipe_round=int(size) if size else None,
    )
    shape = Shape(stages, microbatches, 0, 4)
    for stage, run in enumerate(runs):
        actions = [
            str(action) for j in range(4) for action in rule.actions(shape, stage, j)
        ]
        assert [event[0] for event in run.events] == actions
        assert max(event[1] for event in run.events) == rule.max_in_flight(shape, stage)
        if rule.flushes:
            assert all(event[2] is None for event in run.events)
        else:
            assert max(len(event[2]) for event in run.events) <= rule.max_versions(
                shape, stage
            )
        ends = [i for i, event in enumerate(run.events) if event[0].startswith("R")]
        if not rule.late_step:
            ends = [i + 1 for i in ends]
        ends[-1] = len(run.events) - 1
        steps = [run.events[i] for i in ends]
        for _, in_flight, _, (activations, gradients) in steps[:-1]:
            assert in_flight == (0 if rule.flushes else rule.ahead(shape, stage))
            # Each stage but the first holds received inputs, one without extra warm-up;
            # no gradient is left over.
            held = (
                0
                if rule.flushes or stage == 0
                else rule.ahead(shape, stage - 1) - rule.ahead(shape, stage)
            )
            assert (activations, gradients) == (held, 0)
        assert steps[-1][1] == 0 and steps[-1][3] == [0, 0], (
            "the last iteration empties the pipeline"
        )


class Once:
    """A message's work that can be waited for twice."""

    def __init__(self, work):
        self.work, self.done, self.lock = work, False, threading.Lock()

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

    posted: list[Once] = []

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

    Channel.send, Channel.receive = occupying(Channel.send), occupying(Channel.receive)
    Channel.occupies_device = True
    torch.cuda.synchronize = synchronize
    return train(rank, argv)


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
    plain = command(2, microbatches, schedule, UNTIED, train_iters=4)
    timed = [*plain, "--no-barrier-with-level-1-timing", "--timing-log-level", "2"]
    timed += ["--two-bw-extra-warmup", extra] if extra else []
    runs = run_world(2, train_like_nccl, timed, timeout=60)
    assert_same_runs(runs, run_world(2, train, plain), exact=True)


@pytest.mark.cpu
@pytest.mark.proof("4-4-None-start")
@pytest.mark.parametrize(
    "stages, microbatches, extra, place", [(4, 4, None, "start"), (2, 3, "1", "end")]
)
def test_a_late_step_may_wait_for_the_whole_device(stages, microbatches, extra, place):
    """A cudaFree, a kernel that is loaded: no receive is posted then whose message
    depends on the step."""
    changes = dict(train_iters=6, two_bw_extra_warmup=extra)
    argv = command(stages, microbatches, "2bw", UNTIED, **changes)
    runs = run_world(stages, train_like_nccl, argv, place, timeout=60)
    assert_same_runs(runs, run_world(stages, train, argv), exact=True)


def watch_the_start(rank: int, argv: list[str]) -> Run:
    """As `train_like_nccl`, without the timers; notes for each iteration whether its
    step is still being made."""
    from megatron_2bw.mcore.runtime import MegatronRuntime

    pending: list[bool] = []
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
@pytest.mark.proof("flags0-3")
@pytest.mark.parametrize(
    "flags, skipped", [(("--fp16",), 3), (("--two-bw-extra-warmup", "2"), 0)]
)
def test_on_nccl_steps_are_late_once_everything_has_run_once(flags, skipped):
    """From the third iteration on, and with 16-bit floats after the first step that was
    not skipped."""
    changes = dict(train_iters=10, initial_loss_scale=2.0**21, hysteresis=1)
    argv = command(2, 4, "2bw", UNTIED, *flags, **changes)
    runs = run_world(2, watch_the_start, argv, timeout=60)
    for run in runs:
        assert sum(run.skipped) >= skipped and not all(run.skipped)
        cold = max(2, run.skipped.index(0) + 1)
        assert run.events == [False] * cold + [True] * (9 - cold) + [False]
    assert_same_runs(runs, run_world(2, train, argv), exact=True)


def note_groups(rank: int, argv: list[str]) -> Run:
    """Train, and note the process groups that this rank makes, or makes with others, in
    their order: whose it is, its name, the number of its ranks, and whether it would be
    one of NCCL on GPUs."""
    import torch.distributed as dist

    from megatron_2bw.mcore import runtime

    noted: list[tuple[str, str, int, bool]] = []
    new_group = dist.new_group

    def noting(ranks=None, *args, **kwargs):
        description, backend = kwargs.get("group_desc") or "", kwargs.get("backend")
        owner, name = (
            ("2bw", description[4:])
            if description.startswith("2bw ")
            else ("Megatron", description)
        )
        # here all are gloo's
        nccl = name in ("activations", "gradients") or backend is None
        noted.append(
            (owner, name, dist.get_world_size() if ranks is None else len(ranks), nccl)
        )
        return new_group(ranks, *args, **kwargs)

    dist.new_group = noting
    runtime.streams_warning = lambda: noted.append(("2bw", "warning", 0, False))
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
    "position embedding",
]


@pytest.mark.parametrize(
    "schedule, stages, width, tensor, flags, after",
    [
        (
            "2bw",
            3,
            1,
            1,
            (UNTIED, "--num-layers", "3", "--two-bw-extra-warmup", "0,1"),
            LATE,
        ),
        ("2bw", 1, 2, 2, (), LATE),
        ("2bw", 2, 1, 2, ("--optimizer", "muon"), [*LATE, "matrices"]),
        ("gpipe", 2, 2, 1, (), ["reports"]),
    ],
)
def test_every_rank_makes_the_same_groups_in_the_same_order(
    schedule, stages, width, tensor, flags, after
):
    """Megatron's, connections, late step, log. torch >= 2.15 makes a communicator of
    NCCL by splitting the world's, in which all ranks take part; the planner knows how
    many of several ranks each stage has."""
    sizes = dict(width=width, tensor_model_parallel_size=tensor)
    argv = command(stages, 4, schedule, *flags, train_iters=4, **sizes)
    runs = run_world(stages * width * tensor, note_groups, argv)
    extra = (0, 1) if "--two-bw-extra-warmup" in flags else ()
    plan = Plan(tensor, stages, width, 2, 4, schedule=schedule, extra_warmup=extra)
    links = ["activations", "gradients"] + [
        name for name in ("activations", "gradients") for _ in range(1 + sum(extra))
    ]
    for rank, run in enumerate(runs):
        assert [name for owner, name, *_ in run.events if owner == "2bw"] == [
            *links,
            *after,
            "warning",
        ]
        nccl = [(owner, name) for owner, name, _, nccl in run.events if nccl]
        assert nccl == [
            (owner, name) for owner, name, _, nccl in runs[0].events if nccl
        ]
        shared = [
            name
            for owner, name, ranks, nccl in run.events
            if owner == "2bw" and nccl and ranks > 1
        ]
        # with several stages also Megatron's for evaluations
        held = communicators(plan, rank // (width * tensor))
        assert len(shared) - shared.count("matrices") + (stages > 1) == len(held)
