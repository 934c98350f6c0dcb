"""A thread that runs one job after the other, for work that must not stop the training
thread."""

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch


class Worker:
    """Runs jobs in the order in which they are submitted. Its thread dies with the
    process.

    (The threads of concurrent.futures are joined at exit: one that waits for a lost
    rank would block the exit.)

    context  makes a context manager in which the jobs run, since torch keeps some
             settings by thread
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        context: Callable[
            [], contextlib.AbstractContextManager[Any]
        ] = contextlib.nullcontext,
    ):
        self.device = device
        self._context = context
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._serve, daemon=True, name=name).start()

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        """Queue `job`. The future gives its result, or raises its exception."""
        future: Future[Any] = Future()
        self._jobs.put((job, future))
        return future

    def _serve(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # a new thread starts on the first GPU
        with self._context():
            while True:
                job, future = self._jobs.get()
                try:
                    future.set_result(job())
                # raised again by result(), in the training thread
                except BaseException as error:
                    future.set_exception(error)
                del job, future  # the tensors that they hold
