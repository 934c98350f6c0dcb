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

import torch

from megatron_2bw import InPlaceUpdate, Schedule, Shape, StashedUpdate
from megatron_2bw.engine.p2p import Neighbours, Receiver, Sender

_spec = importlib.util.spec_from_file_location(
    "plain_torch", Path(__file__).parents[1] / "examples" / "plain_torch.py"
)
example = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(example)
_seeding, _layers_of = threading.Lock(), example.layers_of


def _layers_with_norms(stage: int, stages: int):
    """The example's layers and norms: graphs save a view of a linear's weight, but the
    leaf Parameter of a norm's."""
    with _seeding:  # threads share torch's generator
        layers = _layers_of(stage, stages)
    for layer in layers:
        layer.append(torch.nn.LayerNorm(example.WIDTH))
    return layers


example.layers_of = _layers_with_norms


def make_update(schedule: Schedule, stores, step, skipped: Collection[int] = ()):
    """The update that `schedule` needs; the example's if the step is late. skipped:
    batches whose step is skipped."""
    batches, whole_step = itertools.count(), step

    def step(gradients, target) -> bool:
        return next(batches) not in skipped and whole_step(gradients, target)

    if schedule.late_step:
        return example.late_update(schedule, stores, step)

    def step_now() -> bool:
        stepped = step(
            [param.grad for param in stores.params],
            [param.data for param in stores.params],
        )
        for param in stores.params:
            param.grad = None
        return stepped

    return (
        InPlaceUpdate(step_now) if schedule.flushes else StashedUpdate(stores, step_now)
    )


def version(
    name: str,
    shape: Shape,
    stage: int,
    microbatch: int,
    sync_iterations: int = 0,
    late_microbatches: int | None = None,
) -> int:
    """The update count of the weights that the rule gives to a microbatch (paper,
    sections 2 and 3)."""
    batch = microbatch // shape.microbatches
    if name == "2bw":
        late = range(batch * shape.microbatches, (batch + 1) * shape.microbatches)[
            :late_microbatches
        ]
        return (
            batch - 1
            if microbatch in late and batch >= max(sync_iterations, 1)
            else batch
        )
    if name == "pipedream":
        return max((microbatch - (shape.stages - 1 - stage)) // shape.microbatches, 0)
    return batch


def reference(
    name: str, shape: Shape, skipped: Collection[int] = (), **of_2bw: int | None
) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """The losses, and each stage's final weights."""
    parts = [example.layers_of(stage, shape.stages) for stage in range(shape.stages)]
    model = example.ModuleStage(torch.nn.Sequential(*parts), True, shape.microbatches)
    squares: list[torch.Tensor] = []
    gather = (
        (lambda square: [square]) if name == "pipedream" else lambda square: squares
    )
    steps = [example.make_step(list(part.parameters()), gather) for part in parts]
    weights = [
        [[param.detach().clone() for param in part.parameters()] for part in parts]
    ]
    for batch in range(shape.end):
        for part in parts:
            part.zero_grad(set_to_none=True)
        for microbatch in range(
            batch * shape.microbatches, (batch + 1) * shape.microbatches
        ):
            for stage, part in enumerate(parts):
                values = weights[version(name, shape, stage, microbatch, **of_2bw)][
                    stage
                ]
                for param, value in zip(part.parameters(), values, strict=True):
                    param.data = value
            model.backward(microbatch, None, model.forward(microbatch, None), None)
        gradients = [[param.grad for param in part.parameters()] for part in parts]
        squares[:] = [
            sum(gradient.square().sum() for gradient in own) for own in gradients
        ]
        if batch in skipped:
            weights.append(weights[-1])
            continue
        weights.append(
            [[torch.empty_like(value) for value in own] for own in weights[0]]
        )
        for step, own, target in zip(steps, gradients, weights[-1]):
            step(own, target)
    return list(model.losses.values()), weights[-1]


class Delays:
    """Sleeps of random length, up to `seconds`, drawn for each thread from `seed`."""

    def __init__(self, seed: int, seconds: float):
        self._seed, self._seconds, self._drawn = seed, seconds, threading.local()

    def sleep(self) -> None:
        if not hasattr(self._drawn, "generator"):
            self._drawn.generator = random.Random(
                f"{self._seed} {threading.current_thread().name}"
            )
        if self._drawn.generator.random() < 0.4:
            time.sleep(self._drawn.generator.random() * self._seconds)


class Memory:
    """A channel between two threads. A message arrives some time after it was sent.

    occupies_device  what the channel reports
    """

    peer = 0

    def __init__(self, delays: Delays, occupies_device: bool = False):
        self._messages: queue.SimpleQueue[torch.Tensor | None] = queue.SimpleQueue()
        self._delays, self.occupies_device = delays, occupies_device

    def send(self, tensor: torch.Tensor) -> Arrived:
        self._messages.put(tensor.clone())
        return Arrived(lambda: None)

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

    def __init__(self, stages: int, may_end: Callable[[int], bool] = lambda call: True):
        self._condition, self._rounds, self._stages = (
            threading.Condition(),
            defaultdict(dict),
            stages,
        )
        self._may_end, self._closed = may_end, False

    def of(self, stage: int, delays: Delays):
        calls = iter(range(1 << 30))

        def gather(tensor: torch.Tensor) -> list[torch.Tensor]:
            delays.sleep()
            with self._condition:
                call = next(calls)
                values = self._rounds[call]
                values[stage] = tensor
                self._condition.notify_all()
                complete = lambda: (
                    self._closed
                    or (len(values) == self._stages and self._may_end(call))
                )
                if not self._condition.wait_for(complete, timeout=30) or self._closed:
                    raise TimeoutError("a stage did not come to the all-gather")
            return [values[other] for other in range(self._stages)]

        return gather

    def ask_again(self) -> None:
        """`may_end` may have another answer."""
        with self._condition:
            self._condition.notify_all()

    def close(self) -> None:
        """Whoever waits here fails."""
        self._closed = True
        self.ask_again()


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
    channels = [  # activations, gradients
        (Memory(delays, occupies_device), Memory(delays, occupies_device))
        for _ in range(shape.stages - 1)
    ]
    gather, results, errors = gather or Gather(shape.stages), {}, []

    class Delayed(example.ModuleStage):
        def forward(self, *args):
            delays.sleep()
            return super().forward(*args)

        def backward(self, *args):
            delays.sleep()
            return super().backward(*args)

    def stage_main(stage: int) -> None:
        neighbours = Neighbours()
        if stage > 0:
            down, up = channels[stage - 1]
            neighbours.activations_in, neighbours.gradients_out = (
                Receiver(down),
                Sender(up),
            )
        if stage < shape.stages - 1:
            down, up = channels[stage]
            neighbours.activations_out, neighbours.gradients_in = (
                Sender(down),
                Receiver(up),
            )
        own = (
            gather.of(stage, delays)
            if schedule.global_step
            else lambda square: [square]
        )
        try:
            update = partial(make_update, skipped=skipped)
            results[stage] = example.train(
                schedule, shape, stage, neighbours, own, update
            )
        except BaseException as error:
            errors.append(error)
            for closing in (gather, *itertools.chain(*channels)):
                closing.close()

    plain, example.ModuleStage = example.ModuleStage, Delayed
    try:
        threads = [
            threading.Thread(
                target=stage_main, args=(stage,), name=f"stage {stage}", daemon=True
            )
            for stage in range(shape.stages)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    finally:
        example.ModuleStage = plain
    if errors:
        raise errors[0]
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(f"stages wait for each other: {schedule} {shape}")
    return results[shape.stages - 1][0], [
        results[stage][1] for stage in range(shape.stages)
    ]


def assert_same(found, expected) -> None:
    """Equal bits: one thread computes each stage, and the norm adds the stages' squares
    in their order."""
    losses, weights = found
    other_losses, other_weights = expected
    assert torch.equal(torch.stack(losses), torch.stack(other_losses)), (
        losses,
        other_losses,
    )
    for own, other in zip(weights, other_weights, strict=True):
        for value, reference_value in zip(own, other, strict=True):
            assert torch.equal(value, reference_value)
