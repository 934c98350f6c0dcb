"""One stage of `Pipeline`, step by step: what is waited for, freed; evaluations and
resumed runs."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import torch

from megatron_2bw import (
    LateUpdate,
    Neighbours,
    Pipeline,
    Shape,
    StashedUpdate,
    WeightStores,
    Worker,
    schedule_of,
)
from megatron_2bw.engine.p2p import Receiver, Sender
from megatron_2bw.engine.recorder import Recorder
from tests.plain import Arrived, assert_same, example, reference

CPU = torch.device("cpu")


def alone(
    shape: Shape, values=None, shadow=None, step=None
) -> tuple[Pipeline, example.ModuleStage, object]:
    """A pipeline of one stage with 2BW, its model, and its step; `values` and `shadow`
    as a checkpoint holds them."""
    layers = example.layers_of(0, 1)
    for param, value in zip(layers.parameters(), values or ()):
        param.data = value.clone()
    stores = WeightStores(layers.parameters(), 2)
    stores.start(shape.first, shadow)
    step = step or example.make_step(stores.params, lambda square: [square])
    stage = example.ModuleStage(layers, True, shape.microbatches)
    rule = schedule_of("2bw")
    return (
        Pipeline(
            rule, shape, 0, Neighbours(), stage, example.late_update(rule, stores, step)
        ),
        stage,
        step,
    )


def copies(tensors) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def test_between_iterations_the_newest_weights_can_be_had():
    """`sync_weights` completes the step early; that changes no later batch."""
    pipeline, stage, _ = alone(Shape(1, 3, 0, 5))
    for iteration in range(5):
        pipeline.run(iteration)
        pipeline.update.sync_weights()
        assert pipeline.update.stores.newest == iteration + 1
        found = list(stage.losses.values()), [copies(stage.layers.parameters())]
        assert_same(found, reference("2bw", Shape(1, 3, 0, iteration + 1)))


def test_a_run_resumes_from_two_versions():
    first, stage, step = alone(Shape(1, 3, 0, 6))
    for iteration in range(3):
        first.run(iteration)
    first.update.sync_weights()
    stores = first.update.stores
    resumed, later, _ = alone(
        Shape(1, 3, 3, 6), copies(stores.values(3)), copies(stores.values(2)), step
    )
    for iteration in range(3, 6):
        resumed.run(iteration)
    resumed.update.sync_weights()
    losses = [*stage.losses.values(), *later.losses.values()]
    assert_same(
        (losses, [copies(later.layers.parameters())]),
        reference("2bw", Shape(1, 3, 0, 6)),
    )


def test_a_skipped_step_of_pipedream_writes_no_weights():
    """W(1) is W(0) then, in the same memory; in 16 bits nothing has been written to
    another."""
    (param,), reduced = [torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))], []
    stores = WeightStores([param], 2)
    update = StashedUpdate(stores, lambda: False, reduced.append)
    update.end_batch(0, set())
    update.step(0)
    assert (
        stores.newest == 1
        and stores.slot(1) == 0
        and torch.equal(param, torch.ones_like(param))
    )
    assert reduced == [0]


def test_what_counts_as_waiting():
    """From `asked` to `start` a stage waits: for its input, for the gradient of its
    output, for a pending step."""
    rule, shape, clock, noted = (
        schedule_of("2bw"),
        Shape(3, 3, 0, 3),
        itertools.count(),
        {},
    )

    def noting(name, call=lambda *args: None):
        """`call`; the ends of its first, second, ... call are noted on a clock that
        counts events."""
        numbers = itertools.count()

        def noted_call(*args):
            result = call(*args)
            noted[name, next(numbers)] = next(clock)
            return result

        return noted_call

    def channel(name: str) -> SimpleNamespace:
        arrived = noting(name)
        send = noting(name, lambda tensor: Arrived(lambda: None))
        return SimpleNamespace(
            occupies_device=False,
            peer=0,
            send=send,
            receive=lambda tensor: Arrived(arrived),
        )

    layers = example.layers_of(1, 3)
    stores = WeightStores(layers.parameters(), 2)
    names = ("activations in", "activations out", "gradients in", "gradients out")
    neighbours = Neighbours(
        *(box(channel(name)) for box, name in zip((Receiver, Sender) * 2, names))
    )
    stage, recorder = example.ModuleStage(layers, False, 3), Recorder(CPU)
    stage.forward, stage.backward = (
        noting("forward", stage.forward),
        noting("backward", stage.backward),
    )
    recorder.mark = lambda: next(clock)
    update = LateUpdate(
        stores,
        Worker("late step", CPU),
        noting("step", lambda gradients, target: False),
    )
    options = dict(recorder=recorder, free_output=noting("freed"))
    pipeline = Pipeline(rule, shape, 1, neighbours, stage, update, **options)
    for iteration in range(3):
        pipeline.run(iteration)
    marks = recorder.cut()
    assert [action for action, *_ in marks] == [
        a for j in range(3) for a in rule.actions(shape, 1, j)
    ]
    waited_for = {"F": ["activations in"], "B": ["gradients in"], "S": ["step"]}
    done = {
        "F": ("forward", "activations out", "freed"),
        "B": ("backward", "gradients out"),
    }
    for action, asked, start, end in marks:
        before, after = (
            [noted[name, action.number] for name in names.get(action.kind, ())]
            for names in (waited_for, done)
        )
        # a step may have ended earlier, in its thread
        asked_first = [] if action.kind == "S" else [asked]
        order = [*asked_first, *before, start, *after, end]
        assert order == sorted(order) and (asked < start) == (action.kind != "R"), (
            action
        )
