"""The runtime does what the schedule's list says, keeps the limits of the schedule, and leaves no message over."""

from __future__ import annotations

import threading

import pytest

from megatron_2bw.local_ranks import run_world
from megatron_2bw.schedules import Shape, extra_warmup, schedule_of
from tests.distributed.compare import UNTIED, assert_same_runs
from tests.distributed.training import Run, command, train


def observe(rank: int, argv: list[str]) -> Run:
    """Train, and note every executed action, the state after it, and the messages left at each iteration's end."""
    from megatron_2bw.mcore.runtime import PipelineRuntime

    events: list[tuple] = []

    def state(runtime) -> tuple:
        boxes = runtime._exchange.activations_in, runtime._exchange.gradients_in
        held = [0 if box is None else box.outstanding for box in boxes]
        versions = runtime.stores.versions if runtime.stores else None
        return len(runtime.in_flight), versions, held

    def noting(name, execute):
        def method(self, *args):
            action = args[0] if args else self._step
            result = execute(self, *args)
            if action is not None and (args[1:] or action.kind == "S") and not (name == "_execute" and self._step):
                events.append((str(action), *state(self)))
            return result

        setattr(PipelineRuntime, name, method)

    # A schedule with a late step executes its STEP where it stands, the others in the optimizer's call.
    noting("_execute", PipelineRuntime._execute)
    noting("step", PipelineRuntime.step)
    run = train(rank, argv)
    run.events = events
    return run


@pytest.mark.parametrize(
    "schedule, stages, microbatches, extra",
    [
        ("2bw", 2, 3, None),
        ("2bw", 4, 4, None),
        ("2bw", 2, 3, "1"),
        ("2bw", 4, 6, "0,2,0"),
        ("pipedream", 2, 1, None),
        ("gpipe", 2, 3, None),
        ("pipedream-flush", 2, 3, None),
        ("no-pipelining", 2, 2, None),
    ],
)
def test_executes_the_list(schedule, stages, microbatches, extra):
    argv = command(stages, microbatches, schedule, UNTIED, train_iters=4, two_bw_extra_warmup=extra)
    runs = run_world(stages, observe, argv)
    rule = schedule_of(schedule, extra_warmup=extra_warmup(extra) if extra else ())
    shape = Shape(stages, microbatches, 0, 4)
    for stage, run in enumerate(runs):
        actions = [str(action) for j in range(4) for action in rule.actions(shape, stage, j)]
        assert [event[0] for event in run.events] == actions
        assert max(event[1] for event in run.events) == rule.max_in_flight(shape, stage)
        if rule.flushes:
            assert all(event[2] is None for event in run.events)
        else:
            assert max(len(event[2]) for event in run.events) <= rule.max_versions(shape, stage)
        ends = [i for i, event in enumerate(run.events) if event[0].startswith("R")]
        if not rule.late_step:
            ends = [i + 1 for i in ends]
        ends[-1] = len(run.events) - 1
        steps = [run.events[i] for i in ends]
        for _, in_flight, _, (activations, gradients) in steps[:-1]:
            assert in_flight == (0 if rule.flushes else rule.ahead(shape, stage))
            # Each stage but the first holds received inputs, one without extra warm-up; no gradient is left over.
            held = 0 if rule.flushes or stage == 0 else rule.ahead(shape, stage - 1) - rule.ahead(shape, stage)
            assert (activations, gradients) == (held, 0)
        assert steps[-1][1] == 0 and steps[-1][3] == [0, 0], "the last iteration empties the pipeline"


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


def train_like_nccl(rank: int, argv: list[str]) -> Run:
    """Every posted message occupies the device until its other end has come, as NCCL's kernels do, and
    torch.cuda.synchronize, which Megatron's timers call in every forward and backward, waits for all of them. So does
    whatever a late step's thread does for the first time."""
    import torch

    from megatron_2bw.core.p2p import Link
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

    update = LateStep._update

    def first_use(self, *args):
        if not self.has_stepped:
            synchronize()
        result = update(self, *args)
        if not self.has_stepped:
            synchronize()
        return result

    LateStep._update = first_use

    Link.send, Link.receive = occupying(Link.send), occupying(Link.receive)
    Link.occupies_device = True
    torch.cuda.synchronize = synchronize
    return train(rank, argv)


BARRIERLESS = "--no-barrier-with-level-1-timing"


@pytest.mark.parametrize(
    "schedule, stages, microbatches, extra",
    [
        ("2bw", 2, 2, None),
        ("2bw", 4, 4, None),
        ("2bw", 2, 3, "1"),
        ("pipedream-flush", 2, 3, None),
        ("gpipe", 2, 3, None),
        ("no-pipelining", 2, 2, None),
        ("pipedream", 2, 1, None),
    ],
)
def test_timers_may_wait_for_the_whole_device(schedule, stages, microbatches, extra):
    """--timing-log-level 2 on NCCL: no receive may be posted whose message this stage has yet to cause.

    So with two more forwards ahead the stages would wait for each other: arguments.py refuses that.
    """
    argv = command(
        stages,
        microbatches,
        schedule,
        UNTIED,
        BARRIERLESS,
        train_iters=4,
        timing_log_level=2,
        two_bw_extra_warmup=extra,
    )
    plain = run_world(stages, train, command(stages, microbatches, schedule, UNTIED, train_iters=4))
    runs = run_world(stages, train_like_nccl, argv, timeout=60)
    assert_same_runs(runs, plain, exact=True)


def watch_the_start(rank: int, argv: list[str]) -> Run:
    """As `train_like_nccl`, without the timers; notes for each iteration whether its step is still being made."""
    from megatron_2bw.mcore.runtime import PipelineRuntime

    pending: list[bool] = []
    run_iteration = PipelineRuntime._run_iteration

    def noting(self, *args):
        result = run_iteration(self, *args)
        pending.append(self.late.pending is not None)
        return result

    PipelineRuntime._run_iteration = noting
    run = train_like_nccl(rank, argv)
    run.events = pending
    return run


@pytest.mark.parametrize("flags, skipped", [((), 0), (("--fp16",), 3), (("--two-bw-extra-warmup", "2"), 0)])
def test_on_nccl_steps_are_late_once_everything_has_run_once(flags, skipped):
    """From the third iteration on, and with 16-bit floats after the first step that was not skipped."""
    changes = dict(train_iters=10, initial_loss_scale=2.0**21, hysteresis=1)
    argv = command(2, 4, "2bw", UNTIED, *flags, **changes)
    runs = run_world(2, watch_the_start, argv, timeout=60)
    for run in runs:
        assert sum(run.skipped) >= skipped and not all(run.skipped)
        cold = max(2, run.skipped.index(0) + 1)
        assert run.events == [False] * cold + [True] * (9 - cold) + [False]
    assert_same_runs(runs, run_world(2, train, argv), exact=True)
