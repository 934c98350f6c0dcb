"""The thread that does one job after the other."""

from __future__ import annotations

import time
import weakref

import pytest
import torch

from megatron_2bw.core.worker import Worker

CPU = torch.device("cpu")


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
