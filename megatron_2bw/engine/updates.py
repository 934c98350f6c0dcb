"""What happens to a batch's gradients: one `Update` each for the flush schedules,
PipeDream and PipeDream-2BW.

Invariant of `LateUpdate` (docs/design.md, [Note: the late step's window]): between the
end of a batch and its step the step's thread alone writes the reserved weight store and
reads the batch's gradients, not the training thread.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_2bw.engine.streams import own_stream
from megatron_2bw.engine.weights import WeightStores
from megatron_2bw.engine.worker import Worker


def no_reduction(batch: int) -> None:
    """The reduction of a model without data parallelism."""


class Update:
    """What happens to a batch's gradients. One class each for the flush, PipeDream and
    2BW."""

    def bind(self, version: int, batch: int) -> None:
        """Before a forward or a backward of `batch`: bind W(version), and the batch's
        gradient buffer."""

    def begin_batch(self, batch: int, version: int) -> None:
        """Before the first backward of `batch`, which runs on W(version)."""

    def predict(self, batch: int, done: float) -> None:
        """PREDICT: before the first forward of `batch`, whose weights are predicted
        from this share of the gradient of the batch before it: `done` of its
        backwards."""

    def end_batch(self, batch: int, still_read: set[int]) -> None:
        """After the last backward of `batch`: REDUCE. still_read: weight versions that
        must not be overwritten yet."""

    def step(self, batch: int) -> None:
        """STEP. W(batch + 1) exists when this returns."""

    def is_stepping(self) -> bool:
        """Whether a step may be running in a thread."""
        return False


class InPlaceUpdate(Update):
    """The update of the flush schedules: one weight version, stepped in place (paper,
    section 3.2).

    step    reduces the gradients, steps the parameters and clears the gradients;
            returns whether it stepped
    reduce  called with the batch before the step (Megatron's reduction has its own
            place)
    """

    def __init__(
        self,
        step: Callable[[], bool],
        reduce: Callable[[int], object] = no_reduction,
    ):
        self._step = step
        self._reduce = reduce

    def end_batch(self, batch: int, still_read: set[int]) -> None:
        self._reduce(batch)

    def step(self, batch: int) -> None:
        self._step()


class StashedUpdate(InPlaceUpdate):
    """PipeDream's update: the newest weights of the stage at a forward are kept for its
    backward (paper, section 2).

    step  as for `InPlaceUpdate`. It finds the parameters in a free weight store: those
          in fp32 with their newest values, to be stepped in place; those in 16 bits to
          be written from the caller's main parameters.
    """

    def __init__(
        self,
        stores: WeightStores,
        step: Callable[[], bool],
        reduce: Callable[[int], object] = no_reduction,
    ):
        super().__init__(step, reduce)
        self.stores = stores
        self._still_read: set[int] = set()

    def bind(self, version: int, batch: int) -> None:
        self.stores.bind(version)

    def end_batch(self, batch: int, still_read: set[int]) -> None:
        self._still_read = still_read
        super().end_batch(batch, still_read)

    def step(self, batch: int) -> None:
        with self.stores.writing(self._still_read) as write:
            write.stepped = bool(self._step())


class PerBatch:
    """What a stage holds for each weight version, or for each batch: here of nothing.

    The training thread calls every method.
    """

    def bind(self, version: int, batch: int | None) -> None:
        """Before a forward or a backward of `batch` on W(version); with None between
        two iterations."""

    def begin_batch(self, batch: int, version: int) -> None:
        """Before the first backward of `batch`, which runs on W(version)."""

    def predict(self, batch: int, done: float) -> Callable[[], None] | None:
        """Before the first forward of `batch`: write the weights that it will change to
        the newest store. `done`: the share of the batch before it whose backwards have
        run.

        Returns None if the weights are written, or a function that writes them in the
        step's thread.
        """

    def end_batch(self, batch: int) -> Any:
        """After the last backward of `batch`: what its step gets."""

    def complete(self, batch: int, result: Any) -> None:
        """The step of `batch` has made W(batch + 1), with this result."""


class BatchStep(PerBatch):
    """The step of a batch, and all that the batch leaves to it."""

    def job(self, batch: int, target: int) -> Callable[[], Any]:
        """In the place of `end_batch`: what the step's thread runs for `batch`. It
        writes W(batch + 1) to the weight store `target`."""
        raise NotImplementedError

    def has_stepped(self, result: Any) -> bool:
        """Whether the weight store holds new weights, by the job's result."""
        return bool(result)


class AutogradStep(BatchStep):
    """The step of a function on the gradients that autograd has left in `param.grad`.

    step  see `LateUpdate`
    """

    def __init__(
        self,
        stores: WeightStores,
        step: Callable[[list[Tensor | None], list[Tensor]], bool],
    ):
        self._stores = stores
        self._step = step

    def job(self, batch: int, target: int) -> Callable[[], bool]:
        gradients = [param.grad for param in self._stores.params]
        for param in self._stores.params:
            # the next batch accumulates into new memory: the second gradient slot
            param.grad = None
        return partial(self._step, gradients, self._stores.views(target))


@dataclass(frozen=True)
class PendingStep:
    """A step that runs in its thread. It writes W(batch + 1) to the weight store
    `target`."""

    batch: int
    target: int
    future: Future[Any]


class LateUpdate(Update):
    """The update of PipeDream-2BW: batch j's step overlaps batch j + 1 (paper, section
    3.1; docs/design.md).

    stores  two weight versions
    worker  the thread of the step
    step    (gradients, target) -> whether it stepped: reduces and clips the gradients,
            steps, and writes every parameter's new value to `target`. Both lists are in
            the order of `stores.params`; a gradient is None if the parameter had none.
            It runs in the worker's thread, on a GPU in a stream of its own. Its
            collectives need process groups of their own, on NCCL in a `StepGroup`.
            Or a `BatchStep`, which says itself what a batch leaves to its step.

    Bytes: the second gradient slot is the memory of `gradients`, which lives until
    `step` is complete.
    """

    def __init__(
        self,
        stores: WeightStores,
        worker: Worker,
        step: Callable[[list[Tensor | None], list[Tensor]], bool] | BatchStep,
    ):
        self.stores = stores
        self.worker = worker
        if isinstance(step, BatchStep):
            self._step = step
        else:
            self._step = AutogradStep(stores, step)
        self.pending: PendingStep | None = None
        self._prediction: Future[Any] | None = None
        self._stream: torch.cuda.Stream | None = None
        if worker.device.type == "cuda":
            self._stream = own_stream(worker.device)

    def bind(self, version: int, batch: int) -> None:
        if version == self.stores.newest:
            self._wait_prediction()
        self.stores.bind(version)
        self._step.bind(version, batch)

    def begin_batch(self, batch: int, version: int) -> None:
        self._step.begin_batch(batch, version)

    def predict(self, batch: int, done: float) -> None:
        assert self.pending is None, "a step writes what a prediction reads"
        job = self._step.predict(batch, done)
        if job is not None:
            self._prediction = self._launch(job)

    def end_batch(self, batch: int, still_read: set[int]) -> None:
        """Launch the step of the batch."""
        self._wait_prediction()
        assert self.pending is None, (
            f"the step of batch {self.pending.batch} is still pending"
        )
        target = self.stores.reserve(still_read)
        job = self._step.job(batch, target)
        self.pending = PendingStep(batch, target, self._launch(job))

    def step(self, batch: int) -> None:
        # else `sync_weights` has waited
        if self.pending is not None and self.pending.batch == batch:
            self.wait_step()

    def is_stepping(self) -> bool:
        return self.pending is not None and not self.pending.future.done()

    def wait_step(self) -> None:
        """Wait for the pending step: W(batch + 1) exists then. Raises what the step
        raised."""
        pending = self.pending
        assert pending is not None, "no step is pending"
        result = pending.future.result()
        self.pending = None
        self._step.complete(pending.batch, result)
        self.stores.commit(pending.target, self._step.has_stepped(result))

    def sync_weights(self) -> None:
        """Complete a pending step and bind the newest weights: before an evaluation, a
        save, the end."""
        if self.pending is not None:
            self.wait_step()
        self.bind_newest()

    def bind_newest(self) -> None:
        self.stores.bind_newest()
        self._step.bind(self.stores.newest, None)

    def _wait_prediction(self) -> None:
        if self._prediction is not None:
            self._prediction.result()
            self._prediction = None

    def _launch(self, job: Callable[[], Any]) -> Future[Any]:
        ready = None
        if self._stream is not None:
            ready = torch.cuda.current_stream().record_event()
        return self.worker.submit(partial(self._run, job, ready))

    def _run(
        self,
        job: Callable[[], Any],
        ready: torch.cuda.Event | None,
    ) -> Any:
        """In the worker's thread: the job, from when the gradients are `ready` until
        the GPU has completed it."""
        if self._stream is None or ready is None:
            return job()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            result = job()
            # the gradients' memory goes back to the training stream
            self._stream.synchronize()
        return result
