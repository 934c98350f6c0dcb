"""megatron-2bw gpu-check: a row on the CPU, ranks that hang or are left behind."""

import os
import subprocess
import sys
import time

import psutil
import pytest

from megatron_2bw.base.files import write_whole
from megatron_2bw.run.start.torchrun import ROOT
from megatron_2bw.tools.gpu_check import rows
from megatron_2bw.tools.gpu_check.rows import Check
from megatron_2bw.tools.gpu_check.runner import HANGS, OK
from tests.unit.test_gpu_check import go, nothing, row

pytestmark = pytest.mark.cpu


def stuck() -> None:
    if os.environ["RANK"] == "1":
        time.sleep(1000)


def hanging(check: Check) -> dict:
    check.train(*rows.tiny(2, 1, ""), stuck)
    return {}


@pytest.mark.timeout(900)
def test_a_row_on_the_cpu(tmp_path):
    name = "NCCL, two stages"
    chosen = [row for row in rows.ROWS if row.name == name]
    status, found = go(tmp_path / "r.json", *chosen)
    assert status == 0
    assert found[name]["figures"] == {"iterations": 8, "differences": 0}


@pytest.mark.timeout(900)
def test_a_row_that_hangs_is_in_the_table(tmp_path):
    """Its ranks print where their threads are, and the next row runs."""
    # seconds, of which the traces take ten
    each = row(hanging, "stuck", 25.0), row(nothing, "next")
    status, found = go(tmp_path / "r.json", *each)
    assert status == 1
    assert [entry["result"] for entry in found.values()] == [HANGS, OK]
    assert "Timeout (0:00:" in found["stuck"]["log"]


ORPHAN = """
from megatron_2bw.base.local_ranks import run_world
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
    program = subprocess.Popen(
        [sys.executable, str(tmp_path / "orphan.py")], env=environment
    )
    try:
        while not path.exists():
            assert program.poll() is None
            time.sleep(0.05)
    finally:
        program.kill()
        program.wait()
    rank = int(path.read_text())
    while (
        psutil.pid_exists(rank)
        and psutil.Process(rank).status() != psutil.STATUS_ZOMBIE
    ):
        time.sleep(0.05)
