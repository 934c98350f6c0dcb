"""One stage of `Pipeline`, step by step: what is waited for, freed; evaluations and
resumed runs."""

import itertools

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
from tests.plain import Arrived, alone, assert_same, copies, example, reference

CPU = torch.device("cpu")
RULE = schedule_of("2bw")


class OneStage:
    """A pipeline of one stage with 2BW; `values` and `shadow` as a checkpoint holds
    them."""

    def __init__(self, shape: Shape, values=(), shadow=None, step=None):
        layers = example.layers_of(0, 1)
        for param, value in zip(layers.parameters(), values):
            param.data = value.clone()
        self.stores = WeightStores(layers.parameters(), 2)
        self.stores.start(shape.first, shadow)
        self.step = step or example.make_step(self.stores.params, alone)
        self.stage = example.ModuleStage(layers, True, shape.microbatches)
        self.update = example.late_update(RULE, self.stores, self.step)
        self.pipeline = Pipeline(RULE, shape, 0, Neighbours(), self.stage, self.update)

    def run(self, iterations) -> None:
        for iteration in iterations:
            self.pipeline.run(iteration)
        self.update.sync_weights()

    def losses(self) -> list[torch.Tensor]:
        return list(self.stage.losses.values())

    def weights(self) -> list[list[torch.Tensor]]:
        return [copies(self.stores.params)]


def test_between_iterations_the_newest_weights_can_be_had():
    """`sync_weights` completes the step early; that changes no later batch."""
    one = OneStage(Shape(1, 3, 0, 5))
    for iteration in range(5):
        one.run([iteration])
        assert one.stores.newest == iteration + 1
        expected = reference("2bw", Shape(1, 3, 0, iteration + 1))
        assert_same((one.losses(), one.weights()), expected)


def test_a_run_resumes_from_two_versions():
    first = OneStage(Shape(1, 3, 0, 6))
    first.run(range(3))
    values = copies(first.stores.values(3))
    shadow = copies(first.stores.values(2))
    resumed = OneStage(Shape(1, 3, 3, 6), values, shadow, first.step)
    resumed.run(range(3, 6))
    losses = first.losses() + resumed.losses()
    assert_same((losses, resumed.weights()), reference("2bw", Shape(1, 3, 0, 6)))


def test_a_skipped_step_of_pipedream_writes_no_weights():
    """W(1) is W(0) then, in the same memory; in 16 bits nothing has been written to
    another."""
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    reduced = []

    def skip() -> bool:
        return False

    stores = WeightStores([param], 2)
    update = StashedUpdate(stores, skip, reduced.append)
    update.end_batch(0, set())
    update.step(0)
    assert stores.newest == 1
    assert stores.slot(1) == 0
    assert torch.equal(param, torch.ones_like(param))
    assert reduced == [0]


class Noted:
    """A function; the ends of its calls are noted on a clock that counts events."""

    def __init__(self, clock, function):
        self.clock = clock
        self.function = function
        self.ends = []

    def __call__(self, *args):
        result = self.function(*args)
        self.ends.append(next(self.clock))
        return result


class NotedChannel:
    """Notes the ends of what is sent, or of what is received."""

    occupies_device = False
    peer = 0

    def __init__(self, noted: Noted):
        self.noted = noted

    def send(self, tensor) -> Arrived:
        self.noted()
        return Arrived(self.noted.function)

    def receive(self, tensor) -> Arrived:
        return Arrived(self.noted)


def nothing(*args) -> None:
    """Returns at once."""


def test_what_counts_as_waiting():
    """From `asked` to `start` a stage waits: for its input, for the gradient of its
    output, for a pending step."""
    shape = Shape(3, 3, 0, 3)
    clock = itertools.count()
    layers = example.layers_of(1, 3)
    stores = WeightStores(layers.parameters(), 2)
    stage = example.ModuleStage(layers, False, 3)
    recorder = Recorder(CPU)
    recorder.mark = clock.__next__
    inputs, outputs, gradients_in, gradients_out, step, freed = (
        Noted(clock, nothing) for _ in range(6)
    )
    stage.forward = forward = Noted(clock, stage.forward)
    stage.backward = backward = Noted(clock, stage.backward)
    neighbours = Neighbours(
        Receiver(NotedChannel(inputs)),
        Sender(NotedChannel(outputs)),
        Receiver(NotedChannel(gradients_in)),
        Sender(NotedChannel(gradients_out)),
    )
    update = LateUpdate(stores, Worker("late step", CPU), step)
    parts = dict(recorder=recorder, free_output=freed)
    pipeline = Pipeline(RULE, shape, 1, neighbours, stage, update, **parts)
    actions = []
    for iteration in range(3):
        pipeline.run(iteration)
        actions += RULE.actions(shape, 1, iteration)
    marks = recorder.cut()
    assert [mark[0] for mark in marks] == actions
    waited_for = {"F": [inputs], "B": [gradients_in], "S": [step]}
    done = {"F": [forward, outputs, freed], "B": [backward, gradients_out]}
    for action, asked, start, end in marks:
        # a step may have ended earlier, in its thread
        order = [] if action.kind == "S" else [asked]
        for noted in waited_for.get(action.kind, ()):
            order.append(noted.ends[action.number])
        order.append(start)
        for noted in done.get(action.kind, ()):
            order.append(noted.ends[action.number])
        order.append(end)
        assert order == sorted(order), action
        assert (asked < start) == (action.kind != "R"), action
