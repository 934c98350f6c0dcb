"""Executes a schedule's action list on one stage.

Invariants: this object alone owns what crosses iterations (microbatches in flight,
messages received early); the actions run in the order of the schedule's list, and there
is no other loop.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor

from megatron_2bw.engine.p2p import Neighbours
from megatron_2bw.engine.recorder import NoRecorder, Recorder
from megatron_2bw.schedules import REDUCE, STEP, Action, B, F, Schedule, Shape

# Iterations in which kernels are compiled, tuned and loaded at their first use, which
# may wait for the whole GPU.
WARM_UP = 2


class Stage(Protocol):
    """The model of one stage. The losses of a batch are scaled so that their gradients
    add up to the batch's."""

    def receive_buffer(self) -> Tensor:
        """An empty tensor for one boundary message, an activation or the gradient of
        one."""

    def forward(self, microbatch: int, received: Tensor | None) -> Tensor:
        """The stage's output for the next stage; on the last stage the scaled loss.
        `received` requires grad."""

    def backward(
        self,
        microbatch: int,
        received: Tensor | None,
        output: Tensor,
        gradient: Tensor | None,
    ) -> Tensor | None:
        """Accumulate the parameters' gradients; return the gradient of `received`.
        `gradient` is that of `output`."""


class Update(Protocol):
    """What happens to a batch's gradients. One class each for the flush, PipeDream and
    2BW (core/updates.py)."""

    def bind(self, action: Action) -> None:
        """Before a forward or backward: bind its weight version, and its batch's
        gradient buffer."""

    def begin_batch(self, action: Action) -> None:
        """Before the first backward of a batch."""

    def reduce(self, action: Action, still_read: set[int]) -> None:
        """After the last backward of a batch. still_read: weight versions that must not
        be overwritten yet."""

    def step(self, action: Action) -> None:
        """W(action.version) exists when this returns."""

    def is_stepping(self) -> bool:
        """Whether a step may be running in a thread."""


@dataclass(frozen=True)
class InFlight:
    """A microbatch between its forward and its backward on this stage."""

    action: Action
    received: Tensor | None
    output: Tensor


class Pipeline:
    """Runs one stage of `schedule`.

    shape       of the pipeline and the run
    index       of this stage, 0 first
    neighbours  see `p2p.connect`
    free_output called with each output after it was handed to the sender; may free its
                memory, not its graph
    defer_step  `run` leaves STEP out; the caller runs it by `run_deferred_step` before
                the next iteration
    observe     (class attribute) called as observe(pipeline, action) after each action
    """

    observe: ClassVar[Callable[[Pipeline, Action], object]] = lambda pipeline, action: (
        None
    )

    def __init__(
        self,
        schedule: Schedule,
        shape: Shape,
        index: int,
        neighbours: Neighbours,
        stage: Stage,
        update: Update,
        *,
        recorder: Recorder | NoRecorder | None = None,
        free_output: Callable[[Tensor], object] = lambda output: None,
        defer_step: bool = False,
    ):
        self.schedule, self.index = schedule, index
        self.neighbours, self.stage, self.update = neighbours, stage, update
        self.recorder: Recorder | NoRecorder = recorder or NoRecorder()
        self.in_flight: deque[InFlight] = deque()
        self._free_output, self._defer_step = free_output, defer_step
        self._deferred: Action | None = None
        self.use_shape(shape)

    def use_shape(self, shape: Shape) -> None:
        """From iteration `shape.first` on, when the pipeline is empty. ValueError for
        too few microbatches."""
        schedule, neighbours, index = self.schedule, self.neighbours, self.index
        if shape.microbatches < (needed := schedule.min_microbatches(shape.stages)):
            raise ValueError(
                f"{schedule.name} needs at least {needed} microbatches with {shape.stages} stages, "
                f"not {shape.microbatches}"
            )
        assert not self.in_flight, "microbatches of another shape are in flight"
        self.shape = shape
        for sender, stage_index in (
            (neighbours.activations_out, index),
            (neighbours.gradients_out, index - 1),
        ):
            if sender is not None:
                sender.max_pending = schedule.max_in_flight(shape, stage_index) + 1
        for receiver, boundary in (
            (neighbours.activations_in, index - 1),
            (neighbours.gradients_in, index),
        ):
            if receiver is not None:
                upper, lower = (
                    schedule.ahead(shape, boundary + side) for side in (0, 1)
                )
                receiver.prefetch_depth = max(upper - lower, 1)

    def actions(self, iteration: int, index: int | None = None) -> list[Action]:
        """The schedule's list for this stage, or for the stage `index`."""
        return self.schedule.actions(
            self.shape, self.index if index is None else index, iteration
        )

    def is_warm(self, iteration: int) -> bool:
        """Whether receives may be posted early: a posted receive of NCCL occupies the
        GPU, and a kernel's first use may wait for the whole GPU, so for a message that
        depends on this stage."""
        return (
            not self.neighbours.occupies_device
            or iteration - self.shape.first >= WARM_UP
        )

    def run(self, iteration: int, prefetch: bool | None = None) -> None:
        """One iteration: one batch, one update. prefetch: post receives early (default:
        `is_warm`)."""
        self._announce_messages(
            iteration, self.is_warm(iteration) if prefetch is None else prefetch
        )
        for action in self.actions(iteration):
            if action.kind == STEP and self._defer_step:
                self._deferred = action
            else:
                self.execute(action)

    def run_deferred_step(self) -> None:
        """The STEP that `run` has left out. RuntimeError if there is none."""
        action, self._deferred = self._deferred, None
        if action is None:
            raise RuntimeError(
                "the optimizer's step was called without an iteration of the schedule before it"
            )
        self.execute(action)

    def execute(self, action: Action) -> None:
        """One action of the list."""
        if action.kind == B and action.microbatch % self.shape.microbatches == 0:
            self.update.begin_batch(action)
        asked = start = self.recorder.mark()
        if action.kind == F:
            start = self._forward(action)
        elif action.kind == B:
            start = self._backward(action)
        elif action.kind == REDUCE:
            self.update.reduce(action, self._still_read(action))
        else:
            self.update.step(action)
            for receiver in (
                self.neighbours.activations_in,
                self.neighbours.gradients_in,
            ):
                if receiver is not None:
                    receiver.post_early()
            # the step ran in its thread; this stage has only waited for it
            if self.schedule.late_step:
                start = self.recorder.mark()
        self.recorder.add(action, asked, start, self.recorder.mark())
        type(self).observe(self, action)

    def _announce_messages(self, iteration: int, prefetch: bool) -> None:
        """Announce to each receiver the messages that its neighbour's list sends, and
        how many this stage leaves."""
        for receiver, neighbour, kind in (
            (self.neighbours.activations_in, self.index - 1, F),
            (self.neighbours.gradients_in, self.index + 1, B),
        ):
            if receiver is not None:
                sent, taken = (
                    sum(a.kind == kind for a in self.actions(iteration, i))
                    for i in (neighbour, self.index)
                )
                receiver.prefetch = prefetch
                if receiver.channel.occupies_device:
                    before_step = itertools.takewhile(
                        lambda a: a.kind != STEP, self.actions(iteration, neighbour)
                    )
                    receiver.hold_back(
                        sum(a.kind == kind for a in before_step),
                        self.update.is_stepping,
                    )
                carried_over = receiver.outstanding + sent - taken
                receiver.announce(sent, self.stage.receive_buffer, carried_over)

    def _forward(self, action: Action) -> Any:
        """Returns the mark of the moment when its input had arrived; so does
        `_backward`."""
        receiver, sender = (
            self.neighbours.activations_in,
            self.neighbours.activations_out,
        )
        received = None if receiver is None else receiver.receive().requires_grad_()
        start = self.recorder.mark()
        self.update.bind(action)
        output = self.stage.forward(action.microbatch, received)
        if sender is not None:
            sender.send(output.detach())
        self._free_output(output)
        self.in_flight.append(InFlight(action, received, output))
        return start

    def _backward(self, action: Action) -> Any:
        flight = self.in_flight.popleft()
        assert flight.action[1:] == action[1:], f"{action} meets {flight.action}"
        receiver, sender = self.neighbours.gradients_in, self.neighbours.gradients_out
        gradient = None if receiver is None else receiver.receive()
        start = self.recorder.mark()
        self.update.bind(action)
        input_gradient = self.stage.backward(
            action.microbatch, flight.received, flight.output, gradient
        )
        if sender is not None:
            assert input_gradient is not None, (
                "a stage that received an input returns its gradient"
            )
            sender.send(input_gradient)
        return start

    def _still_read(self, reduce: Action) -> set[int]:
        """Versions that microbatches in flight, or forwards of the next iteration, read
        after the batch's step."""
        following = self.actions(reduce.batch + 1)
        named = {
            a.version for a in following if a.kind == F and a.version <= reduce.version
        }
        return named | {flight.action.version for flight in self.in_flight}
