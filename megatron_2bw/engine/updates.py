"""What happens to a batch's gradients: one `Update` each for the flush schedules,
PipeDream and PipeDream-2BW.

Invariant of `LateUpdate` (docs/design.md, [Note: the late step's window]): between a
batch's REDUCE and its STEP the step's thread alone writes the reserved weight store and
reads the batch's gradients, not the training thread.
"""

from __future__ import annotations

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
from megatron_2bw.schedules import Action


class InPlaceUpdate:
    """The update of the flush schedules: one weight version, stepped in place (paper,
    section 3.2).

    step    reduces the gradients, steps the parameters and clears the gradients;
            returns whether it stepped
    reduce  called with the batch's REDUCE action, before the step (Megatron's reduction
            has its own place)
    """

    def __init__(
        self,
        step: Callable[[], bool],
        reduce: Callable[[Action], object] = lambda action: None,
    ):
        self._step, self._reduce = step, reduce

    def bind(self, action: Action) -> None:
        """The parameters are the only version."""

    def begin_batch(self, action: Action) -> None:
        """The gradients are cleared by the step."""

    def reduce(self, action: Action, still_read: set[int]) -> None:
        self._reduce(action)

    def step(self, action: Action) -> None:
        self._step()

    def is_stepping(self) -> bool:
        return False


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
        reduce: Callable[[Action], object] = lambda action: None,
    ):
        super().__init__(step, reduce)
        self.stores = stores
        self._still_read: set[int] = set()

    def bind(self, action: Action) -> None:
        self.stores.bind(action.version)

    def reduce(self, action: Action, still_read: set[int]) -> None:
        self._still_read = still_read
        super().reduce(action, still_read)

    def step(self, action: Action) -> None:
        with self.stores.writing(self._still_read) as write:
            write.stepped = bool(self._step())


@dataclass(frozen=True)
class PendingStep:
    """A step that runs in its thread. It writes W(batch + 1) to the weight store
    `target`."""

    batch: int
    target: int
    future: Future[Any]


class LateUpdate:
    """The update of PipeDream-2BW: batch j's step overlaps batch j + 1 (paper, section
    3.1; docs/late_step.md).

    stores  two weight versions
    worker  the thread of the step
    step    (gradients, target) -> whether it stepped: reduces and clips the gradients,
            steps, and writes every parameter's new value to `target`. Both lists are in
            the order of `stores.params`; a gradient is None if the parameter had none.
            It runs in the worker's thread, on a GPU in a stream of its own. Its
            collectives need process groups of their own, on NCCL in a `StepGroup`.

    Bytes: the second gradient slot is the memory of `gradients`, which lives until
    `step` is complete.
    """

    def __init__(
        self,
        stores: WeightStores,
        worker: Worker,
        step: Callable[[list[Tensor | None], list[Tensor]], bool],
    ):
        self.stores, self.worker, self._step = stores, worker, step
        self.pending: PendingStep | None = None
        self.stream: torch.cuda.Stream | None = (
            own_stream(worker.device) if worker.device.type == "cuda" else None
        )

    def bind(self, action: Action) -> None:
        self.stores.bind(action.version)

    def begin_batch(self, action: Action) -> None:
        """The gradients of a batch start from None."""

    def reduce(self, action: Action, still_read: set[int]) -> None:
        """Launch the step of the batch."""
        assert self.pending is None, (
            f"the step of batch {self.pending.batch} is still pending"
        )
        target = self.stores.reserve(still_read)
        job = self._job(action, target)
        ready = (
            None if self.stream is None else torch.cuda.current_stream().record_event()
        )
        future = self.worker.submit(partial(self._run, job, ready))
        self.pending = PendingStep(action.batch, target, future)

    def step(self, action: Action) -> None:
        # else `sync_weights` has waited
        if self.pending is not None and self.pending.batch == action.batch:
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
        self.stores.commit(pending.target, self._complete(result))

    def sync_weights(self) -> None:
        """Complete a pending step and bind the newest weights: before an evaluation, a
        save, the end."""
        if self.pending is not None:
            self.wait_step()
        self.bind_newest()

    def bind_newest(self) -> None:
        self.stores.bind_newest()

    def _job(self, action: Action, target: int) -> Callable[[], Any]:
        """What the thread runs for the batch of `action`, a REDUCE."""
        gradients = [param.grad for param in self.stores.params]
        for param in self.stores.params:
            # the next batch accumulates into new memory: the second gradient slot
            param.grad = None
        return lambda: self._step(gradients, self.stores.views(target))

    def _run(self, job: Callable[[], Any], ready: torch.cuda.Event | None) -> Any:
        """In the worker's thread: the job, from when the gradients are `ready` until
        the GPU has completed it."""
        if self.stream is None or ready is None:
            return job()
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(ready)
            result = job()
            # the gradients' memory goes back to the training stream
            self.stream.synchronize()
        return result

    def _complete(self, result: Any) -> bool:
        """In the training thread, with the job's result: whether the target holds new
        weights."""
        return bool(result)
