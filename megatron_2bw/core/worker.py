"""A thread that does one job after the other, for work that must not stop the training thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from megatron_2bw import cpu


class Worker:
    """Runs jobs in the order in which they are submitted, in a thread that dies with the process.

    (The threads of concurrent.futures are joined at exit: one that waits for a lost rank would hold the process.)
    """

    def __init__(self, name: str, device: torch.device):
        self._device = device
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True, name=name).start()

    def submit(self, job: Callable[[], Any]) -> Future:
        """Queue `job`; the future gives its result, or raises what it raised."""
        future: Future = Future()
        self._jobs.put((job, future))
        return future

    def _serve(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a new thread starts on the first GPU
        with cpu.answering():
            while True:
                job, future = self._jobs.get()
                try:
                    future.set_result(job())
                except BaseException as error:  # raised again by result(), in the training thread
                    future.set_exception(error)
                del job, future  # the tensors that they hold
