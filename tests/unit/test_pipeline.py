"""One stage of `Pipeline`, step by step: what is waited for, deferred, freed; evaluations and resumed runs."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron_2bw import (
    Action,
    InPlaceUpdate,
    LateUpdate,
    Neighbours,
    Pipeline,
    Shape,
    StashedUpdate,
    WeightStores,
    Worker,
    schedule_of,
)
from megatron_2bw.core.p2p import Receiver, Sender
from megatron_2bw.core.recorder import Recorder
from tests.plain import Arrived, assert_same, example, reference

CPU = torch.device("cpu")


def alone(shape: Shape, values=None, shadow=None, step=None) -> tuple[Pipeline, example.ModuleStage, object]:
    """A pipeline of one stage with 2BW, its model, and its step; `values` and `shadow` as a checkpoint holds them."""
    layers = example.layers_of(0, 1)
    for param, value in zip(layers.parameters(), values or ()):
        param.data = value.clone()
    stores = WeightStores(layers.parameters(), 2)
    stores.start(shape.first, shadow)
    step = step or example.make_step(stores.params, lambda square: [square])
    stage = example.ModuleStage(layers, True, shape.microbatches)
    rule = schedule_of("2bw")
    return Pipeline(rule, shape, 0, Neighbours(), stage, example.late_update(rule, stores, step)), stage, step


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
    resumed, later, _ = alone(Shape(1, 3, 3, 6), copies(stores.values(3)), copies(stores.values(2)), step)
    for iteration in range(3, 6):
        resumed.run(iteration)
    resumed.update.sync_weights()
    losses = [*stage.losses.values(), *later.losses.values()]
    assert_same((losses, [copies(later.layers.parameters())]), reference("2bw", Shape(1, 3, 0, 6)))


def test_a_deferred_step_runs_once_when_the_caller_says_so():
    layers, steps = example.layers_of(0, 1), []
    update = InPlaceUpdate(lambda: steps.append("step") or True, lambda action: steps.append(f"reduce {action}"))
    stage = example.ModuleStage(layers, True, 2)
    pipeline = Pipeline(schedule_of("gpipe"), Shape(1, 2), 0, Neighbours(), stage, update, defer_step=True)
    for _ in range(2):
        pipeline.run(0)
        assert steps == ["reduce R0@0"]
        pipeline.run_deferred_step()
        assert steps == ["reduce R0@0", "step"]
        with pytest.raises(RuntimeError, match="without an iteration"):
            pipeline.run_deferred_step()
        steps.clear()


def test_a_skipped_step_of_pipedream_writes_no_weights():
    """W(1) is W(0) then, in the same memory; in 16 bits nothing has been written to another."""
    (param,), reduced = [torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))], []
    stores = WeightStores([param], 2)
    update = StashedUpdate(stores, lambda: False, reduced.append)
    update.reduce(Action("R", 0, 0), set())
    update.step(Action("S", 0, 1))
    assert stores.newest == 1 and stores.slot(1) == 0 and torch.equal(param, torch.ones_like(param))
    assert reduced == [Action("R", 0, 0)]


class Clock:
    """Time is counted in events."""

    def __init__(self):
        self._count, self.noted = itertools.count(), {}

    def note(self, *names) -> int:
        now = next(self._count)
        self.noted.setdefault(names, now)
        return now


class Ticks(Recorder):
    """A recorder on such a clock."""

    def __init__(self, clock: Clock):
        super().__init__(CPU)
        self.mark = lambda: clock.note("mark", object())


class Noted:
    """A channel whose messages are noted on the clock."""

    occupies_device, peer = False, 0

    def __init__(self, clock: Clock, name: str):
        self._clock, self._name, self._count = clock, name, itertools.count()

    def send(self, tensor: torch.Tensor) -> Arrived:
        self._clock.note(self._name, next(self._count))
        return Arrived(lambda: None)

    def receive(self, tensor: torch.Tensor) -> Arrived:
        number = next(self._count)
        return Arrived(lambda: self._clock.note(self._name, number))


class NotedStage(example.ModuleStage):
    """Notes the forwards and backwards."""

    def __init__(self, clock: Clock, *args):
        super().__init__(*args)
        self._clock = clock

    def forward(self, microbatch, received):
        self._clock.note("forward", microbatch)
        return super().forward(microbatch, received)

    def backward(self, microbatch, *args):
        self._clock.note("backward", microbatch)
        return super().backward(microbatch, *args)


def test_what_counts_as_waiting():
    """From `asked` to `start` a stage waits: for its input, for the gradient of its output, for a pending step."""
    clock, rule, shape, freed = Clock(), schedule_of("2bw"), Shape(3, 3, 0, 3), itertools.count()
    layers = example.layers_of(1, 3)
    stores = WeightStores(layers.parameters(), 2)
    batches = itertools.count()

    def step(gradients, target) -> bool:
        clock.note("step", next(batches))
        return False

    names = ("activations in", "activations out", "gradients in", "gradients out")
    channels = [box(Noted(clock, name)) for box, name in zip((Receiver, Sender) * 2, names)]
    recorder = Ticks(clock)
    pipeline = Pipeline(
        rule,
        shape,
        1,
        Neighbours(*channels),
        NotedStage(clock, layers, False, 3),
        LateUpdate(stores, Worker("late step", CPU), step),
        recorder=recorder,
        free_output=lambda output: clock.note("freed", next(freed)),
    )
    for iteration in range(3):
        pipeline.run(iteration)
    noted, marks = clock.noted, recorder.cut()
    assert [action for action, *_ in marks] == [a for j in range(3) for a in rule.actions(shape, 1, j)]
    for action, asked, start, end in marks:
        number = action.number
        if action.kind == "F":
            order = [asked, noted["activations in", number], start, noted["forward", number]]
            order += [noted["activations out", number], noted["freed", number], end]
        elif action.kind == "B":
            order = [asked, noted["gradients in", number], start, noted["backward", number]]
            order += [noted["gradients out", number], end]
        elif action.kind == "S":
            order = [noted["step", number], start, end]
            assert asked < start
        else:
            order = [asked, end]
            assert asked == start
        assert order == sorted(order), action
