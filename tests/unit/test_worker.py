"""The thread that does one job after the other."""

import time
import weakref
from functools import partial

import torch

from megatron_2bw.engine.worker import Worker

CPU = torch.device("cpu")


def test_a_job_is_not_kept():
    """A late step's job holds a batch's gradients."""
    gradients = torch.zeros(1)
    kept = weakref.ref(gradients)
    Worker("test", CPU).submit(partial(id, gradients)).result(10)
    del gradients
    for _ in range(1000):  # the thread forgets it after the result is there
        if kept() is None:
            break
        time.sleep(0.01)
    assert kept() is None
