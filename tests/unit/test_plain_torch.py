"""The core on plain torch, one thread a stage: the reference's bits under random
timings of everything that waits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_2bw import SCHEDULES, LateUpdate, Pipeline, Shape, schedule_of
from megatron_2bw.schedules import REDUCE, F
from tests.plain import Gather, assert_same, reference, run_threads

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("stages, extra", [(1, ()), (2, ()), (4, ()), (3, (1,))])
def test_no_stage_waits_for_a_step_before_it_needs_the_weights(
    stages, extra, monkeypatch
):
    """With the fewest microbatches: no step gets its norm before every stage is at the
    STEP of that batch."""
    rule = schedule_of("2bw", extra_warmup=extra)
    shape = Shape(stages, rule.min_microbatches(stages), 0, 5)
    orders = [
        [str(a) for j in range(shape.end) for a in rule.actions(shape, s, j)]
        for s in range(stages)
    ]
    executed = [0] * stages

    def at_their_steps(batch: int) -> bool:
        return all(
            done >= order.index(f"S{batch}@{batch + 1}")
            for done, order in zip(executed, orders)
        )

    def observe(pipeline: Pipeline, action) -> None:
        executed[pipeline.index] += 1
        gather.ask_again()

    monkeypatch.setattr(Pipeline, "observe", observe)
    gather = Gather(stages, at_their_steps)
    assert_same(run_threads(rule, shape, gather=gather), reference("2bw", shape))


@pytest.mark.parametrize(
    "pending, second", [(False, [2, 2, 2, 2]), (True, [2, 2, 1, 0])]
)
def test_early_receives_where_they_occupy_the_device(monkeypatch, pending, second):
    """In the first two iterations only what an iteration leaves for the next is posted
    before it is asked for.

    pending: every step runs until its STEP; before that no message is posted which the
    neighbour sends after its own. No stage has more messages under way than one and the
    microbatches in flight of the stage before the boundary.
    """
    rule, shape, left = (
        schedule_of("2bw", extra_warmup=(1, 0)),
        Shape(3, 5, 0, 4),
        {1: 2, 2: 1},
    )
    ends, posted = [[] for _ in range(3)], [[[]] for _ in range(3)]  # by stage

    def observe(pipeline: Pipeline, action) -> None:
        receiver, stage = pipeline.neighbours.activations_in, pipeline.index
        senders = pipeline.neighbours.activations_out, pipeline.neighbours.gradients_out
        assert [sender and sender.max_pending for sender in senders] == [
            [5, None],
            [3, 5],
            [None, 3],
        ][stage]
        if receiver is None:
            return
        assert (
            receiver.prefetch == (len(ends[stage]) >= 2)
            and receiver.prefetch_depth == left[stage]
        )
        if action.kind == REDUCE:
            ends[stage].append((receiver.outstanding, len(receiver._posted)))
            posted[stage].append([])
        elif action.kind == F and receiver.outstanding > left[stage]:
            posted[stage][-1].append(len(receiver._posted))

    monkeypatch.setattr(Pipeline, "observe", observe)
    monkeypatch.setattr(
        LateUpdate, "is_stepping", lambda self: pending and self.pending is not None
    )
    assert_same(run_threads(rule, shape, occupies_device=True), reference("2bw", shape))
    assert ends == [[], [(2, 2)] * 3 + [(0, 0)], [(1, 1)] * 3 + [(0, 0)]]
    # the first iteration has one forward more
    assert posted[1][:3] == [[0] * 5, [1, 0, 0, 0], second]
    assert posted[2][:3] == [[0] * 4, [0] * 4, [1] * 4]


@st.composite
def runs(draw):
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    stages = draw(st.sampled_from([1, 2, 3, 4]))
    options = {}
    if name == "2bw":
        options = {
            "gradient_slots": draw(st.sampled_from([1, 2])),
            "extra_warmup": draw(st.sampled_from([(), (1,), (2,)]))
            if stages > 1
            else (),
            "sync_iterations": draw(st.integers(0, 3)),
        }
    if name == "gpipe":
        options = {"gpipe_round": draw(st.sampled_from([None, 1, 2]))}
    least = schedule_of(name, **options).min_microbatches(stages)
    shape = Shape(
        stages, draw(st.integers(least, least + 2)), 0, draw(st.integers(1, 5))
    )
    if name == "2bw":
        options["late_microbatches"] = draw(
            st.sampled_from([None, *range(least - 1, shape.microbatches)])
        )
    return (
        name,
        options,
        shape,
        draw(st.sets(st.integers(0, 4), max_size=2)),
        draw(st.integers(0, 1 << 30)),
    )


@given(runs())
@settings(deadline=None)
def test_no_timing_changes_a_bit(run):
    """Actions, messages, all-gathers of the step: each starts after a random delay."""
    name, options, shape, skipped, seed = run
    found = run_threads(
        schedule_of(name, **options), shape, seed, seconds=0.0005, skipped=skipped
    )
    rule = {
        key: options[key]
        for key in ("sync_iterations", "late_microbatches")
        if key in options
    }
    assert_same(found, reference(name, shape, skipped, **rule))
