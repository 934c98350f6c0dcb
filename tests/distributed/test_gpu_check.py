"""megatron-2bw gpu-check: rows with ranks that hang, fail or are left behind; the server of forked ranks and CUDA."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from megatron_2bw.files import write_whole
from megatron_2bw.gpu_check.rows import Check
from megatron_2bw.gpu_check.runner import FAILED, HANGS, OK
from megatron_2bw.local_ranks import run_world
from megatron_2bw.start.torchrun import ROOT
from tests.unit.test_gpu_check import go, row

LIGHT = "tests.plain"  # a server without Megatron


def ranks(check: Check, function) -> dict:
    observed = run_world(2, function, timeout=check.deadline - time.monotonic(), preload=LIGHT)
    return {"ranks": observed}


def sleep(rank: int) -> int:
    if rank == 1:
        time.sleep(1000)
    return rank


def raise_error(rank: int) -> int:
    if rank == 1:
        raise RuntimeError("CUDA error: an illegal memory access")
    time.sleep(1000)
    return rank


def kill(rank: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return rank


def test_a_row_that_hangs_is_ended_and_the_next_one_runs(tmp_path):
    each = [row(lambda check: ranks(check, sleep), seconds=6.0), row(lambda check: {}, "two")]
    status, found = go(tmp_path / "r.json", *each)
    assert status == 1 and [entry["result"] for entry in found.values()] == [HANGS, OK]
    assert found["one"]["why"] == "not over after 6 s"


def test_ranks_that_fail_are_named_with_their_error(tmp_path):
    each = [row(lambda check: ranks(check, raise_error), seconds=60.0), row(lambda check: ranks(check, kill), "two")]
    status, found = go(tmp_path / "r.json", *each)
    assert status == 1 and [entry["result"] for entry in found.values()] == [FAILED, FAILED]
    assert found["one"]["why"] == "rank 1 ended with exit code 1; RuntimeError: CUDA error: an illegal memory access"
    assert "exit code -9" in found["two"]["why"]


STARTS = """
import torch
torch.cuda._device_count_nvml = lambda: 1
def start(*args):
    raise SystemExit("CUDA starts")
torch._C._cuda_getDeviceCount = torch.cuda._lazy_init = start
import megatron_2bw.start.preload
assert torch.cuda.is_available()
"""


@pytest.mark.parametrize("device, starts", [("cuda", False), ("", True)])
def test_the_server_of_forked_ranks_does_not_start_cuda(device, starts):
    """After a start no forked rank could use CUDA. Without a GPU the CPU stands in, and this test would see no start:
    so the second case asks torch itself."""
    code = STARTS if device else STARTS.replace("import megatron_2bw.start.preload\n", "")
    environment = os.environ | {"MEGATRON_2BW_WORLD_DEVICE": device}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (run.returncode == 1 and "CUDA starts" in run.stderr) if starts else run.returncode == 0, run.stderr[-2000:]


ORPHAN = """
import time
from megatron_2bw.local_ranks import run_world
from tests.distributed.test_gpu_check import name_and_sleep
if __name__ == "__main__":
    run_world(1, name_and_sleep, {path!r}, preload="tests.plain")
"""


def name_and_sleep(rank: int, path: str) -> None:
    write_whole(path, str(os.getpid()))
    time.sleep(1000)


def test_ranks_end_with_the_program_that_started_them(tmp_path):
    """Also after a SIGKILL, so that a hung rank does not keep the GPU."""
    path = tmp_path / "pid"
    (tmp_path / "orphan.py").write_text(ORPHAN.format(path=str(path)))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    program = subprocess.Popen([sys.executable, str(tmp_path / "orphan.py")], env=environment)
    try:
        while not path.exists():
            assert program.poll() is None
            time.sleep(0.05)
    finally:
        program.kill()
        program.wait()
    rank = int(path.read_text())
    while psutil.pid_exists(rank) and psutil.Process(rank).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.05)
