"""megatron-2bw gpu-check: rows on the CPU, ranks that hang, fail or are left behind; forked ranks and CUDA."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial

import psutil
import pytest

from megatron_2bw.core.weights import WeightStores
from megatron_2bw.files import write_whole
from megatron_2bw.gpu_check import rows, runner
from megatron_2bw.gpu_check.rows import Check
from megatron_2bw.gpu_check.runner import FAILED, HANGS
from megatron_2bw.start.torchrun import ROOT
from tests.unit.test_gpu_check import go, row

pytestmark = pytest.mark.cpu


def wrong_store() -> None:
    """Each forward and backward runs on the newest weights."""
    bind = WeightStores.bind
    WeightStores.bind = lambda self, version: bind(self, max(self.versions))


def stuck() -> None:
    if os.environ["RANK"] == "1":
        time.sleep(1000)


def killed() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)


def planted(check: Check, fault) -> dict:
    """A row whose run has a fault."""
    ranks, argv = rows.tiny(2, 1, "")
    return rows.compared(check.train(ranks, argv, fault), check.train(ranks, argv))


@pytest.mark.timeout(900)
def test_rows_on_the_cpu(tmp_path):
    chosen = [row for row in rows.ROWS if row.name in ("NCCL, two stages", "memory, 2bw")]
    assert runner.run(chosen, "cpu", tmp_path / "r.json") == 0
    found = {name: entry["figures"] for name, entry in json.loads((tmp_path / "r.json").read_text())["rows"].items()}
    assert found["NCCL, two stages"] == {"iterations": 8, "differences": 0}


@pytest.mark.timeout(900)
def test_planted_faults_are_in_the_table(tmp_path):
    """The ranks of a row that hangs print where their threads are, and the next row runs."""
    faults = {"wrong weights": wrong_store, "stuck": stuck, "killed": killed}
    limits = {"stuck": 25.0}  # seconds, of which the ranks' traces take ten
    each = [row(partial(planted, fault=fault), name, limits.get(name, 90.0)) for name, fault in faults.items()]
    status, found = go(tmp_path / "r.json", *each)
    assert status == 1 and [entry["result"] for entry in found.values()] == [FAILED, HANGS, FAILED]
    assert "losses differ by" in found["wrong weights"]["why"]
    assert "Timeout (0:00:" in found["stuck"]["log"] and "exit code -9" in found["killed"]["why"]


ORPHAN = """
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
