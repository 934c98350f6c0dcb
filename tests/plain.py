"""The plain-torch example as a library of the tests: all schedules, a reference of all
rules, stages in threads.

The reference runs in one process and one loop; it knows no schedule, only the versions
that the rules name.
"""

from __future__ import annotations

import importlib.util
import itertools
import queue
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from megatron_2bw import InPlaceUpdate, Schedule, Shape, StashedUpdate
from megatron_2bw.engine.p2p import Neighbours, Receiver, Sender

_spec = importlib.util.spec_from_file_location(
    "plain_torch", Path(__file__).parents[1] / "examples" / "plain_torch.py"
)
example = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(example)
_seeding = threading.Lock()
_layers_of = example.layers_of


def _layers_with_norms(stage: int, stages: int):
    """The example's layers and norms: graphs save a view of a linear's weight, but the
    leaf Parameter of a norm's."""
    with _seeding:  # threads share torch's generator
        layers = _layers_of(stage, stages)
    for layer in layers:
        layer.append(torch.nn.LayerNorm(example.WIDTH))
    return layers


example.layers_of = _layers_with_norms


def nothing() -> None:
    """At once."""


def alone(square: torch.Tensor) -> list[torch.Tensor]:
    """The norm of a stage that clips alone."""
    return [square]


def make_update(schedule: Schedule, stores, step, skipped: Collection[int] = ()):
    """The update that `schedule` needs; the example's if the step is late. skipped:
    batches whose step is skipped."""
    batches = itertools.count()

    def skipping_step(gradients, target) -> bool:
        return next(batches) not in skipped and step(gradients, target)

    if schedule.late_step:
        return example.late_update(schedule, stores, skipping_step)

    def step_now() -> bool:
        gradients = [param.grad for param in stores.params]
        stepped = skipping_step(gradients, [param.data for param in stores.params])
        for param in stores.params:
            param.grad = None
        return stepped

    if schedule.flushes:
        return InPlaceUpdate(step_now)
    return StashedUpdate(stores, step_now)


def version(
    name: str,
    shape: Shape,
    stage: int,
    microbatch: int,
    sync_iterations: int = 0,
    late: int | str = "all",
) -> int:
    """The update count of the weights that the rule gives to a microbatch (paper,
    sections 2 and 3)."""
    batch = microbatch // shape.microbatches
    if name == "pipedream":
        ahead = shape.stages - 1 - stage
        return max((microbatch - ahead) // shape.microbatches, 0)
    if name != "2bw" or batch < max(sync_iterations, 1):
        return batch
    index = microbatch % shape.microbatches
    if late == "all" or index < late:
        return batch - 1
    return batch


def copies(tensors) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def reference(
    name: str, shape: Shape, skipped: Collection[int] = (), **of_2bw: int | None
) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """The losses, and each stage's final weights."""
    parts = [example.layers_of(stage, shape.stages) for stage in range(shape.stages)]
    model = example.ModuleStage(torch.nn.Sequential(*parts), True, shape.microbatches)
    squares = []

    def all_squares(square: torch.Tensor) -> list[torch.Tensor]:
        return squares

    gather = alone if name == "pipedream" else all_squares
    steps = [example.make_step(list(part.parameters()), gather) for part in parts]
    weights = [[copies(part.parameters()) for part in parts]]
    for batch in range(shape.end):
        model.layers.zero_grad(set_to_none=True)
        for index in range(shape.microbatches):
            microbatch = batch * shape.microbatches + index
            for stage, part in enumerate(parts):
                number = version(name, shape, stage, microbatch, **of_2bw)
                for param, value in zip(part.parameters(), weights[number][stage]):
                    param.data = value
            model.backward(microbatch, None, model.forward(microbatch, None), None)
        if batch in skipped:
            weights.append(weights[-1])
            continue
        gradients = [[param.grad for param in part.parameters()] for part in parts]
        squares.clear()
        for stage_gradients in gradients:
            squares.append(sum(gradient.square().sum() for gradient in stage_gradients))
        weights.append([copies(values) for values in weights[-1]])
        for step, stage_gradients, target in zip(steps, gradients, weights[-1]):
            step(stage_gradients, target)
    return list(model.losses.values()), weights[-1]


class Delays:
    """Sleeps of random length, up to `seconds`, drawn for each thread from `seed`."""

    def __init__(self, seed: int, seconds: float):
        self._seed = seed
        self._seconds = seconds
        self._drawn = threading.local()

    def sleep(self) -> None:
        if not hasattr(self._drawn, "generator"):
            name = threading.current_thread().name
            self._drawn.generator = random.Random(f"{self._seed} {name}")
        draw = self._drawn.generator.random
        if draw() < 0.4:
            time.sleep(draw() * self._seconds)


class Memory:
    """A channel between two threads. A message arrives some time after it was sent.

    occupies_device  what the channel reports
    """

    peer = 0

    def __init__(self, delays: Delays, occupies_device: bool = False):
        self._messages: queue.SimpleQueue[torch.Tensor | None] = queue.SimpleQueue()
        self._delays = delays
        self.occupies_device = occupies_device

    def send(self, tensor: torch.Tensor) -> Arrived:
        self._messages.put(tensor.clone())
        return Arrived(nothing)

    def receive(self, tensor: torch.Tensor) -> Arrived:
        def wait() -> None:
            message = self._messages.get(timeout=30)
            if message is None:
                raise ConnectionError("another stage has failed")
            self._delays.sleep()
            tensor.copy_(message)

        return Arrived(wait)

    def close(self) -> None:
        """Whoever waits for a message fails."""
        self._messages.put(None)


class Arrived:
    """A message's work."""

    def __init__(self, wait):
        self.wait = wait

    def is_completed(self) -> bool:
        return True


class Gather:
    """An all-gather between threads; the k-th call of a stage belongs to the k-th calls
    of the others.

    may_end  asked until it is true before the k-th calls return: may_end(k)
    """

    def __init__(self, stages: int, may_end: Callable[[int], bool] | None = None):
        self._condition = threading.Condition()
        self._rounds = defaultdict(dict)
        self._stages = stages
        self._may_end = may_end
        self._closed = False

    def of(self, stage: int, delays: Delays):
        calls = itertools.count()

        def gather(tensor: torch.Tensor) -> list[torch.Tensor]:
            delays.sleep()
            with self._condition:
                call = next(calls)
                values = self._rounds[call]
                values[stage] = tensor
                self._condition.notify_all()
                is_over = partial(self._is_over, call)
                if not self._condition.wait_for(is_over, timeout=30) or self._closed:
                    raise TimeoutError("a stage did not come to the all-gather")
            return [values[other] for other in range(self._stages)]

        return gather

    def _is_over(self, call: int) -> bool:
        if self._closed:
            return True
        complete = len(self._rounds[call]) == self._stages
        return complete and (self._may_end is None or self._may_end(call))

    def ask_again(self) -> None:
        """`may_end` may have another answer."""
        with self._condition:
            self._condition.notify_all()

    def close(self) -> None:
        """Whoever waits here fails."""
        self._closed = True
        self.ask_again()


def delayed_stage(delays: Delays) -> type:
    class Delayed(example.ModuleStage):
        def forward(self, *args):
            delays.sleep()
            return super().forward(*args)

        def backward(self, *args):
            delays.sleep()
            return super().backward(*args)

    return Delayed


def neighbours_of(stage: int, activations, gradients) -> Neighbours:
    """The channels are by boundary."""
    neighbours = Neighbours()
    if stage > 0:
        neighbours.activations_in = Receiver(activations[stage - 1])
        neighbours.gradients_out = Sender(gradients[stage - 1])
    if stage < len(activations):
        neighbours.activations_out = Sender(activations[stage])
        neighbours.gradients_in = Receiver(gradients[stage])
    return neighbours


def run_threads(
    schedule: Schedule,
    shape: Shape,
    seed: int = 0,
    seconds: float = 0.0,
    *,
    skipped: Collection[int] = (),
    occupies_device: bool = False,
    gather: Gather | None = None,
):
    """Train with one thread a stage, delayed at random. Returns the losses, and each
    stage's final weights.

    Raises what the first stage that failed raised; TimeoutError if they wait for each
    other.
    """
    delays = Delays(seed, seconds)
    boundaries = range(shape.stages - 1)
    activations = [Memory(delays, occupies_device) for _ in boundaries]
    gradients = [Memory(delays, occupies_device) for _ in boundaries]
    gather = gather or Gather(shape.stages)
    results = {}
    errors = []

    def stage_main(stage: int) -> None:
        neighbours = neighbours_of(stage, activations, gradients)
        norms = gather.of(stage, delays) if schedule.global_step else alone
        update = partial(make_update, skipped=skipped)
        try:
            results[stage] = example.train(
                schedule, shape, stage, neighbours, norms, update
            )
        except BaseException as error:
            errors.append(error)
            for channel in (gather, *activations, *gradients):
                channel.close()

    threads = []
    with mock.patch.object(example, "ModuleStage", delayed_stage(delays)):
        for stage in range(shape.stages):
            name = f"stage {stage}"
            thread = threading.Thread(
                target=stage_main, args=(stage,), name=name, daemon=True
            )
            thread.start()
            threads.append(thread)
        for thread in threads:
            thread.join(timeout=60)
    if errors:
        raise errors[0]
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(f"stages wait for each other: {schedule} {shape}")
    weights = [results[stage][1] for stage in range(shape.stages)]
    return results[shape.stages - 1][0], weights


def assert_same(result, expected) -> None:
    """Equal bits: one thread computes each stage, and the norm adds the stages' squares
    in their order."""
    losses, weights = result
    expected_losses, expected_weights = expected
    torch.testing.assert_close(losses, expected_losses, rtol=0, atol=0)
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=0)
