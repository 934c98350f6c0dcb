"""Executes a schedule's action list on one stage.

Invariants: this object alone owns what crosses iterations (microbatches in flight,
messages received early); the actions run in the order of the schedule's list, and there
is no other loop.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor

from megatron_2bw.engine.p2p import Neighbours
from megatron_2bw.engine.recorder import NoRecorder, Recorder
from megatron_2bw.engine.updates import Update
from megatron_2bw.schedules import (
    PREDICT,
    REDUCE,
    STEP,
    Action,
    B,
    F,
    Schedule,
    Shape,
)


def warmed_up(iterations: int) -> bool:
    """Whether a run has used all its kernels after so many iterations. At its first use
    a kernel is compiled, tuned and loaded, which may wait for the whole GPU."""
    return iterations >= 2


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


@dataclass(frozen=True)
class InFlight:
    """A microbatch between its forward and its backward on this stage."""

    action: Action
    received: Tensor | None
    output: Tensor


def ignore(pipeline: "Pipeline", action: Action) -> None:
    """The observer of a pipeline that nobody watches."""


def keep_output(output: Tensor) -> None:
    """The output's memory stays until its backward."""


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

    observe: ClassVar[Callable[["Pipeline", Action], object]] = ignore

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
        free_output: Callable[[Tensor], object] = keep_output,
        defer_step: bool = False,
    ):
        self.schedule = schedule
        self.index = index
        self.neighbours = neighbours
        self.stage = stage
        self.update = update
        self.recorder: Recorder | NoRecorder = recorder or NoRecorder()
        self.in_flight: deque[InFlight] = deque()
        self._free_output = free_output
        self._defer_step = defer_step
        self._deferred: Action | None = None
        self._last_backward = -1
        self.use_shape(shape)

    def use_shape(self, shape: Shape) -> None:
        """From iteration `shape.first` on, when the pipeline is empty."""
        schedule = self.schedule
        neighbours = self.neighbours
        assert not self.in_flight, "microbatches of another shape are in flight"
        self.shape = shape
        senders = (neighbours.gradients_out, neighbours.activations_out)
        receivers = (neighbours.activations_in, neighbours.gradients_in)
        # the boundary to the stage before, and the one to the stage after
        for upper, sender, receiver in zip(
            (self.index - 1, self.index), senders, receivers
        ):
            if sender is not None:
                sender.max_pending = schedule.max_in_flight(shape, upper) + 1
            if receiver is not None:
                ahead = schedule.ahead(shape, upper) - schedule.ahead(shape, upper + 1)
                receiver.prefetch_depth = max(ahead, 1)

    def actions(self, iteration: int) -> list[Action]:
        """The schedule's list for this stage."""
        return self.schedule.actions(self.shape, self.index, iteration)

    def is_warm(self, iteration: int) -> bool:
        """Whether receives may be posted early: a posted receive of NCCL occupies the
        GPU, and a kernel's first use may wait for the whole GPU, so for a message that
        depends on this stage."""
        if not self.neighbours.occupies_device:
            return True
        return warmed_up(iteration - self.shape.first)

    def run(self, iteration: int, prefetch: bool | None = None) -> None:
        """One iteration: one batch, one update. prefetch: post receives early (default:
        `is_warm`)."""
        if prefetch is None:
            prefetch = self.is_warm(iteration)
        self._announce_messages(iteration, prefetch)
        for action in self.actions(iteration):
            if action.kind == STEP and self._defer_step:
                self._deferred = action
            else:
                self.execute(action)

    def run_deferred_step(self) -> None:
        """The STEP that `run` has left out. RuntimeError if there is none."""
        action = self._deferred
        self._deferred = None
        if action is None:
            raise RuntimeError(
                "the optimizer's step was called without an iteration of the schedule before it"
            )
        self.execute(action)

    def execute(self, action: Action) -> None:
        """One action of the list."""
        if action.kind == B and action.microbatch % self.shape.microbatches == 0:
            batch = self.shape.batch(action.microbatch)
            self.update.begin_batch(batch, action.version)
        asked = self.recorder.mark()
        start = asked
        if action.kind == F:
            start = self._forward(action)
        elif action.kind == B:
            start = self._backward(action)
        elif action.kind == PREDICT:
            first = (action.batch - 1) * self.shape.microbatches
            done = self._last_backward + 1 - first
            self.update.predict(action.batch, done / self.shape.microbatches)
        elif action.kind == REDUCE:
            self.update.end_batch(action.batch, self._still_read(action))
        else:
            self._step(action)
            # the step ran in its thread; this stage has only waited for it
            if self.schedule.late_step:
                start = self.recorder.mark()
        self.recorder.add(action, asked, start, self.recorder.mark())
        type(self).observe(self, action)

    def _announce_messages(self, iteration: int, prefetch: bool) -> None:
        """Announce to each receiver the messages that its neighbour's list sends, and
        how many this stage leaves."""
        own = [action.kind for action in self.actions(iteration)]
        for receiver, neighbour, kind in (
            (self.neighbours.activations_in, self.index - 1, F),
            (self.neighbours.gradients_in, self.index + 1, B),
        ):
            if receiver is None:
                continue
            sends = self.schedule.actions(self.shape, neighbour, iteration)
            theirs = [action.kind for action in sends]
            receiver.prefetch = prefetch
            if receiver.channel.occupies_device:
                before_step = theirs
                if STEP in theirs:
                    before_step = theirs[: theirs.index(STEP)]
                receiver.hold_back(before_step.count(kind), self.update.is_stepping)
            sent = theirs.count(kind)
            carried_over = receiver.outstanding + sent - own.count(kind)
            receiver.announce(sent, self.stage.receive_buffer, carried_over)

    def _bind(self, action: Action) -> None:
        self.update.bind(action.version, self.shape.batch(action.microbatch))

    def _step(self, action: Action) -> None:
        self.update.step(action.batch)
        for receiver in (self.neighbours.activations_in, self.neighbours.gradients_in):
            if receiver is not None:
                receiver.post_early()

    def _forward(self, action: Action) -> Any:
        """Returns the mark of the moment when its input had arrived."""
        receiver = self.neighbours.activations_in
        sender = self.neighbours.activations_out
        received = None
        if receiver is not None:
            received = receiver.receive().requires_grad_()
        start = self.recorder.mark()
        self._bind(action)
        output = self.stage.forward(action.microbatch, received)
        if sender is not None:
            sender.send(output.detach())
        self._free_output(output)
        self.in_flight.append(InFlight(action, received, output))
        return start

    def _backward(self, action: Action) -> Any:
        """Returns the mark of the moment when its gradient had arrived."""
        flight = self.in_flight.popleft()
        assert flight.action[1:] == action[1:], f"{action} meets {flight.action}"
        receiver = self.neighbours.gradients_in
        sender = self.neighbours.gradients_out
        gradient = None
        if receiver is not None:
            gradient = receiver.receive()
        start = self.recorder.mark()
        self._bind(action)
        input_gradient = self.stage.backward(
            action.microbatch, flight.received, flight.output, gradient
        )
        if sender is not None:
            assert input_gradient is not None, (
                "a stage that received an input returns its gradient"
            )
            sender.send(input_gradient)
        self._last_backward = action.microbatch
        return start

    def _still_read(self, reduce: Action) -> set[int]:
        """Versions that microbatches in flight, or forwards of the next iteration, read
        after the batch's step."""
        readers = [flight.action for flight in self.in_flight]
        for action in self.actions(reduce.batch + 1):
            if action.kind == F and action.version <= reduce.version:
                readers.append(action)
        return {action.version for action in readers}
