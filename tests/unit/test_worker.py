"""The thread that does one job after the other."""

from __future__ import annotations

import threading
import time
import weakref

import pytest
import torch

from megatron_2bw import cpu
from megatron_2bw.core.worker import Worker

CPU = torch.device("cpu")


def test_jobs_run_in_order_in_a_thread_of_their_own():
    worker, done = Worker("test", CPU), []
    futures = [worker.submit(lambda i=i: done.append(i) or threading.current_thread().name) for i in range(20)]
    assert [future.result(10) for future in futures] == ["test"] * 20 and done == list(range(20))


def test_errors_are_raised_where_the_result_is_asked_for_and_the_next_job_runs():
    worker = Worker("test", CPU)
    broken, fine = worker.submit(lambda: 1 / 0), worker.submit(lambda: "fine")
    with pytest.raises(ZeroDivisionError):
        broken.result(10)
    assert fine.result(10) == "fine"


def test_a_job_is_not_kept():
    """A late step's job holds a batch's gradients."""
    worker, gradients = Worker("test", CPU), torch.zeros(1)
    kept = weakref.ref(gradients)
    worker.submit(lambda gradients=gradients: None).result(10)
    del gradients
    for _ in range(1000):  # the thread forgets it after the result is there
        if kept() is None:
            break
        time.sleep(0.01)
    assert kept() is None


def test_the_cpu_answers_for_cuda_in_the_thread_too():
    cpu.install()
    try:
        worker = Worker("test", CPU, cpu.answering)
        assert worker.submit(lambda: torch.zeros(1, device="cuda").device).result(10) == CPU
    finally:
        cpu.uninstall()
