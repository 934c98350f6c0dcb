"""Worker processes: every task is done, errors arrive as they are, and none outlives its pool."""

import os
import signal

import psutil
import pytest

from megatron_2bw.data.pool import Pool
from megatron_2bw.errors import UserError


def job(task: int) -> tuple[int, int]:
    if task == 100:
        raise UserError("this will not do")
    if task == 200:
        os.kill(os.getpid(), signal.SIGKILL)
    if task == 300:
        open("/no/such/file")
    if task == 400:
        raise ZeroDivisionError("one\ntwo")
    return os.getpid(), task * task


@pytest.mark.timeout(120)
def test_pool():
    with Pool(2, job) as pool:
        done = dict(reversed(pair) for pair in pool.map(range(50)))
        assert sorted(done) == [n * n for n in range(50)]
        pids = set(done.values())
        assert os.getpid() not in pids and len(pids) <= 2
        for task, kind, line in (
            (100, UserError, "this will not do"),
            (300, ChildProcessError, "/no/such/file: No such file or directory"),
            (400, ChildProcessError, "a worker failed with ZeroDivisionError: one$"),
            (200, ChildProcessError, "was killed, perhaps for memory: fewer --workers need less"),
        ):
            with pytest.raises(kind, match=line):
                list(pool.map([task]))
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(KeyboardInterrupt), Pool(1, job) as pool:
        ((pid, _),) = pool.map([1])
        assert psutil.pid_exists(pid)
        raise KeyboardInterrupt
    assert not psutil.pid_exists(pid)
