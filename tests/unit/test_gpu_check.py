"""megatron-2bw gpu-check: what it does with rows that fail, hang or are skipped, what it continues from, its table."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch

from megatron_2bw import cli
from megatron_2bw.errors import UserError
from megatron_2bw.files import write_whole
from megatron_2bw.gpu_check import observe, rows, runner
from megatron_2bw.gpu_check.rows import Check, Failed, Row
from megatron_2bw.gpu_check.runner import FAILED, HANGS, LATER, OK, SKIPPED
from megatron_2bw.local_ranks import run_world
from megatron_2bw.start.torchrun import ROOT

LIGHT = "tests.plain"  # a server without Megatron


def row(run, name="one", seconds=5.0, needs=()) -> Row:
    return Row("part", name, "what it claims", run, needs, seconds)


def go(path, *each: Row, minutes=10.0, again=False) -> tuple[int, dict]:
    status = runner.run(each, "cpu", minutes, path, again)
    found = json.loads(path.read_text())["rows"] if path.exists() else {}
    return status, {key.removeprefix("part: "): entry for key, entry in found.items()}


def fails(check):
    raise Failed("weights differ by 1.0e-03")


def test_all_is_well(tmp_path, capsys):
    status, found = go(tmp_path / "new" / "r.json", row(lambda check: {"share": 0.25, "calls": {"a": 2.0}}))
    assert status == 0 and found["one"]["result"] == OK and found["one"]["figures"]["share"] == 0.25
    assert found["one"]["what"] == "what it claims"
    shown = capsys.readouterr().out
    assert "part: one  ok  share 0.25, calls {a: 2}" in shown and "1 ok, 0 FAILED, 0 hangs" in shown
    assert f"torch: {torch.__version__}" in shown and "on the CPU: no figures" in shown


def test_a_row_that_fails_is_named_and_the_others_run(tmp_path, capsys):
    def breaks(check):
        raise ZeroDivisionError("of what\nnobody knows")

    path = tmp_path / "r.json"
    each = [row(fails), row(breaks, "two"), row(lambda check: {}, "three", needs=("cuda",)), row(lambda check: {}, "4")]
    status, found = go(path, *each)
    assert status == 1
    assert [entry["result"] for entry in found.values()] == [FAILED, FAILED, SKIPPED, OK]
    assert found["one"]["why"] == "weights differ by 1.0e-03"
    assert found["two"]["why"] == "ZeroDivisionError: of what" and "nobody knows" in found["two"]["log"]
    shown = capsys.readouterr().out
    assert "part: one    FAILED  weights differ by 1.0e-03" in shown
    assert "part: three  skipped  needs a GPU" in shown and "1 ok, 2 FAILED, 0 hangs, 1 skipped, 0 not run" in shown


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


def test_rows_with_a_result_do_not_run_again(tmp_path):
    path, runs = tmp_path / "r.json", []
    first, second = row(lambda check: runs.append(1) or {}), row(fails, "two")
    assert go(path, first)[0] == 0 and go(path, first, second)[0] == 1 and len(runs) == 1
    assert go(path, first, second)[0] == 1, "a failure of an earlier call is still one"
    assert go(path, first)[0] == 0, "only the rows that were asked for decide"
    assert go(path, first, again=True)[0] == 0 and len(runs) == 2
    assert list(go(path, first)[1]) == ["one", "two"], "the table keeps the others"


def test_no_row_starts_that_could_end_too_late(tmp_path):
    path = tmp_path / "r.json"
    status, found = go(path, row(lambda check: {}, seconds=61.0), row(lambda check: {}, "two", 5.0), minutes=1)
    assert status == 0 and [entry["result"] for entry in found.values()] == [LATER, OK]
    status, found = go(path, row(lambda check: {}, seconds=61.0), minutes=2)
    assert status == 0 and found["one"]["result"] == OK


def test_results_of_another_machine_are_not_continued(tmp_path):
    path = tmp_path / "r.json"
    go(path, row(lambda check: {}))
    content = json.loads(path.read_text())
    content["machine"]["torch"] = "2.0"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=f"--json {path}: results with torch 2.0, not "):
        go(path, row(lambda check: {}))
    assert list(go(path, row(lambda check: {}, "two"), again=True)[1]) == ["two"]
    path.write_text("{")
    with pytest.raises(UserError, match="not a file of results"):
        go(path, row(lambda check: {}))


def run_of(*losses: float, weight: float = 1.0) -> list[observe.Observed]:
    return [observe.Observed(list(losses), [torch.tensor([weight, 2.0])])]


def test_what_counts_as_a_difference():
    same = run_of(1.0, 2.0)
    assert rows.compared(same, run_of(1.0, 2.0)) == {"iterations": 2, "differences": 0.0}
    for other in (run_of(1.0, 2.0000002), run_of(1.0, 2.0, weight=1.0001), run_of(1.0, float("nan")), run_of()):
        with pytest.raises(Failed):
            rows.compared(same, other)
    assert rows.compared(same, run_of(1.0, 2.0, weight=1.01), tolerance=0.05)["differences"] > 0
    with pytest.raises(Failed):
        rows.compared(same, [observe.Observed([1.0, 2.0], [])])


def test_gaps_between_kernels_of_several_streams():
    spans = [(0, 10), (5, 20), (2_000_020, 2_000_030), (2_000_022, 2_000_025)]
    found = observe.gaps(spans)
    assert found["longest_gap_ms"] == 2.0 and found["gpu_busy_share"] == pytest.approx(30 / 2_000_030)
    assert observe.gaps([]) == {}


def test_rows_have_names_of_their_own_and_fit_into_a_part():
    assert len({(each.part, each.name) for each in rows.ROWS}) == len(rows.ROWS)
    for each in rows.ROWS:
        assert each.what and each.seconds <= 300 and set(each.needs) <= set(rows.NEEDS)


@pytest.mark.parametrize(
    "words, line",
    [
        (["gpu-check", "--part", "costs"], "costs is not one of reference, ranks, hazards"),
        (["gpu-check", "--row", "nothing"], "--row nothing: no such row; rows are fp32; bf16; untied, 1 queue"),
        (["cheque"], "cheque is not a command; use one of gpu-check"),
    ],
)
def test_wrong_words(words, line, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    assert end.value.code == 2 and line in capsys.readouterr().err


def test_rows_without_a_gpu():
    """Each part but those that are about CUDA has rows that run on the CPU."""
    assert {each.part for each in rows.ROWS if "cuda" not in each.needs} == {"reference", "ranks", "cost", "thread"}


def test_cuda_must_be_there(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["gpu-check", "--device", "cuda"])
    assert end.value.code == 2 and "--device cuda: torch finds no GPU here" in capsys.readouterr().err


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
from tests.unit.test_gpu_check import name_and_sleep
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
