"""megatron-2bw gpu-check on the CPU: rows of each part run for real, and rows with planted faults fail."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
import time
from functools import partial

import pytest

from megatron_2bw.core.weights import WeightStores
from megatron_2bw.gpu_check import observe, rows, runner
from megatron_2bw.gpu_check.rows import MODELS, Check, Row
from tests.e2e.launcher import ROOT, end

CHOSEN = ["fp32", "tied, bf16, 1 queue", "kill and resume", "memory, 2bw", "profile", "hidden waits"]
CHOSEN += ["launches", "lock"]


@pytest.mark.timeout(1500)
def test_a_selection_of_rows(tmp_path):
    path = tmp_path / "results.json"
    words = [word for name in CHOSEN for word in ("--row", name)]
    command = [sys.executable, "-m", "megatron_2bw.cli", "gpu-check", "--device", "cpu", "--json", str(path), *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    run = end(process, 1400)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    found = json.loads(path.read_text())["rows"]
    assert [key.split(": ")[1] for key in found] == CHOSEN and {row["result"] for row in found.values()} == {"ok"}
    figures = {key.split(": ")[1]: row["figures"] for key, row in found.items()}
    assert figures["fp32"] == {"iterations": 6, "differences": 0}
    assert figures["tied, bf16, 1 queue"]["iterations"] == 8 and figures["kill and resume"]["iterations"] == 5
    assert figures["memory, 2bw"].keys() >= {"seconds", "tflops", "late_step_ms", "flip_ms", "peak_gib", "planner_gib"}
    waits = figures["hidden waits"]["waits_an_iteration"]
    assert {name.split(" in ")[1] for name in waits} == {"2bw step", "MainThread"}
    assert figures["launches"].keys() >= {"pending_median_us", "idle_median_us", "step_wall_ms", "step_cpu_ms"}
    assert figures["profile"].keys() >= {"blocks_forward_ms", "output_backward_ms", "step_ns_a_parameter"}
    states = {name: figure for name, figure in figures["lock"].items() if name.endswith(", us")}
    assert states.keys() == {f"{name}, us" for name in ("quiet", "training", "step", "training and step")}
    assert all(figure["waits"] > 0 for figure in states.values())
    assert re.search(r"^cost: memory, 2bw +ok  on the CPU: no figures$", run.stdout, re.M)
    assert "8 ok, 0 FAILED" in run.stdout


def wrong_store(observed, hooks):
    """Each forward and backward runs on the newest weights."""
    bind = WeightStores.bind
    WeightStores.bind = lambda self, version: bind(self, max(self.versions))


def stuck(observed, hooks):
    if os.environ["RANK"] == "1":
        hooks.after_step.append(lambda done: time.sleep(1000))


def planted(check: Check, observer) -> dict:
    """A row of `rows`, whose run has a fault."""
    expected = rows.baseline(check, MODELS["untied"])
    ranks, argv = rows.tiny(MODELS["untied"])
    return rows.compared(check.train(argv, ranks, observers=[observer]), expected)


def locked(observed, hooks):
    """A call of each step keeps Python's lock for a fifth of a second."""
    from megatron_2bw.mcore.late_step import LateStep

    run_job = LateStep.run_job
    LateStep.run_job = lambda self, job: (ctypes.PyDLL(None).usleep(200_000), run_job(self, job))[1]
    observe.lock(observed, hooks)


def test_a_lock_that_is_kept_is_seen(tmp_path):
    check = Check("cpu", deadline=time.monotonic() + 60)
    figures = check.train(rows.tiny((1, 1, 2, ""))[1], 1, observers=[locked])[0].figures
    assert figures["step, us"]["max"] > 190_000 or figures["training and step, us"]["max"] > 190_000


def test_planted_faults_are_in_the_table(tmp_path, capsys):
    faults = {"quiet": partial(observe.delays, seed=3), "wrong weights": wrong_store, "stuck": stuck}
    each = [Row("part", name, "", partial(planted, observer=fault), (), 40.0) for name, fault in faults.items()]
    assert runner.run(each, "cpu", 10, tmp_path / "results.json") == 1
    found = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["result"] for row in found.values()] == ["ok", "FAILED", "hangs"]
    assert "losses differ by" in found["part: wrong weights"]["why"]
    assert "Timeout (0:00:" in found["part: stuck"]["log"], "the ranks print where their threads are"
    assert "1 ok, 1 FAILED, 1 hangs" in capsys.readouterr().out
