"""The core on plain torch, one thread a stage: the reference's bits under random
timings of everything that waits."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_2bw import SCHEDULES, LateUpdate, Pipeline, Shape, schedule_of
from megatron_2bw.schedules import REDUCE, Action, F
from tests.plain import Gather, assert_same, reference, run_threads
from tests.unit.test_schedules import lists

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("stages, extra", [(1, ()), (2, ()), (4, ()), (3, (1,))])
def test_no_stage_waits_for_a_step_before_it_needs_the_weights(
    stages, extra, monkeypatch
):
    """With the fewest microbatches: no step gets its norm before every stage is at the
    STEP of that batch."""
    rule = schedule_of("2bw", extra_warmup=extra)
    shape = Shape(stages, stages + sum(extra * (stages - 1)), 0, 5)
    executed = [0] * stages

    def at_their_steps(batch: int) -> bool:
        return all(done >= place for done, place in zip(executed, steps[batch]))

    steps = []  # by batch, the place of the STEP in each stage's list
    for batch in range(shape.end):
        step = Action("S", batch, batch + 1)
        steps.append([actions.index(step) for actions in lists(rule, shape)])

    def observe(pipeline: Pipeline, action) -> None:
        executed[pipeline.index] += 1
        gather.ask_again()

    monkeypatch.setattr(Pipeline, "observe", observe)
    gather = Gather(stages, at_their_steps)
    assert_same(run_threads(rule, shape, gather=gather), reference("2bw", shape))


@pytest.mark.parametrize(
    "pending, third", [(False, [2, 2, 2, 2]), (True, [2, 2, 1, 0])]
)
def test_early_receives_where_they_occupy_the_device(monkeypatch, pending, third):
    """In the first two iterations no receive is posted before it is asked for.

    pending: every step runs until its STEP; before that no message is posted which the
    neighbour sends after its own. No stage has more messages under way than one and the
    microbatches in flight of the stage before the boundary.
    """
    shape = Shape(3, 5, 0, 4)
    left = [0, 2, 1]
    most_activations = [5, 3, None]
    most_gradients = [None, 5, 3]
    iterations = [0, 0, 0]
    early = []  # on the middle stage, in the third iteration

    def observe(pipeline: Pipeline, action) -> None:
        stage = pipeline.index
        neighbours = pipeline.neighbours
        activations = neighbours.activations_out
        gradients = neighbours.gradients_out
        assert getattr(activations, "max_pending", None) == most_activations[stage]
        assert getattr(gradients, "max_pending", None) == most_gradients[stage]
        receiver = neighbours.activations_in
        if receiver is not None:
            assert receiver.prefetch == (iterations[stage] >= 2)
            assert receiver.prefetch_depth == left[stage]
            waits = action.kind == F and receiver.outstanding > left[stage]
            if waits and stage == 1 and iterations[1] == 2:
                early.append(len(receiver._posted))
        if action.kind == REDUCE:
            iterations[stage] += 1

    def is_stepping(update: LateUpdate) -> bool:
        return pending and update.pending is not None

    monkeypatch.setattr(Pipeline, "observe", observe)
    monkeypatch.setattr(LateUpdate, "is_stepping", is_stepping)
    rule = schedule_of("2bw", extra_warmup=(1, 0))
    assert_same(run_threads(rule, shape, occupies_device=True), reference("2bw", shape))
    assert early == third


@given(st.data())
@settings(deadline=None)
def test_no_timing_changes_a_bit(data):
    """Actions, messages, all-gathers of the step: each starts after a random delay."""

    def draw(*values):
        return data.draw(st.sampled_from(values))

    name = draw(*sorted(SCHEDULES))
    stages = draw(1, 2, 3, 4)
    options = {}
    of_reference = {}
    if name == "2bw":
        of_reference["sync_iterations"] = draw(0, 1, 2, 3)
        options["memory"] = draw("one-slot", "two-slots")
        if stages > 1:
            options["extra_warmup"] = draw((), (1,), (2,))
    if name == "gpipe":
        options["gpipe_round"] = draw(None, 1, 2)
    microbatches = draw(1, 2, 3, 4, 5, 6, 7)
    shape = Shape(stages, microbatches, 0, draw(1, 2, 3, 4, 5))
    if name == "2bw":
        of_reference["late"] = draw("all", *range(microbatches + 1))
    skipped = data.draw(st.sets(st.integers(0, 4), max_size=2))
    seed = data.draw(st.integers(0, 1 << 30))
    schedule = schedule_of(name, **options, **of_reference)
    result = run_threads(schedule, shape, seed, seconds=0.0005, skipped=skipped)
    assert_same(result, reference(name, shape, skipped, **of_reference))
