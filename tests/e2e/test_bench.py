"""The benchmarks run and write what their users read; what they measure is not tested here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.e2e.launcher import ROOT


def bench(*words: object) -> str:
    run = subprocess.run(
        [sys.executable, *map(str, words)], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-3000:]
    return run.stdout


FIELDS = {
    "schedule", "stages", "microbatches", "width", "forward_ms", "backward_ms", "iteration_ms", "ideal_ms",
    "efficiency", "clip_grad", "peak_activations", "versions", "flags",
}


def test_schedule_efficiency(tmp_path: Path):
    path = tmp_path / "efficiency.json"
    bench(
        "bench/schedule_efficiency.py", "--stages", 2, "--microbatches", "1x,3", "--forward-ms", 4, "--backward-ms", 8,
        "--schedules", "2bw,gpipe,megatron-interleaved,torch-zbv", "--iterations", 7, "--json", path,
    )
    rows = json.loads(path.read_text())["rows"]
    shapes = [(row["schedule"], row["microbatches"]) for row in rows]
    # Megatron's interleaved schedule takes multiples of the stages only.
    assert ("megatron-interleaved", 2) in shapes and ("megatron-interleaved", 3) not in shapes
    assert {("2bw", 2), ("2bw", 3), ("gpipe", 3), ("torch-zbv", 2)} <= set(shapes)
    for row in rows:
        assert row.keys() == FIELDS
        assert row["ideal_ms"] == row["microbatches"] * 12 and 0 < row["efficiency"] < 1
        if row["schedule"] == "2bw":
            assert (row["versions"], row["peak_activations"]) == (2, 2)
        if row["schedule"] == "gpipe":
            assert (row["versions"], row["peak_activations"]) == (1, row["microbatches"])
    assert path.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"


def test_wrong_options():
    run = subprocess.run(
        [sys.executable, "bench/schedule_efficiency.py", "--schedules", "3bw"], cwd=ROOT, capture_output=True,
        text=True, check=False,
    )
    assert run.returncode == 2 and "--schedules: 3bw is not one of 2bw" in run.stderr
