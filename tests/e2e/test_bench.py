"""The benchmarks run and write what their users read; what they measure is not tested
here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bench import schedule_efficiency

SHAPE = {"schedule", "stages", "microbatches", "width", "step_ms", "flags"}
TIMES = {"forward_ms", "backward_ms", "iteration_ms", "ideal_ms", "efficiency"}
OTHERS = {"clip_grad", "peak_activations", "versions"}


def test_schedule_efficiency(tmp_path: Path, monkeypatch):
    """In this process, whose fork server has imported Megatron."""
    path = tmp_path / "efficiency.json"
    command = f"""schedule_efficiency.py --stages 2 --microbatches 1x,3 --forward-ms 4 --backward-ms 8 --iterations 7
        --schedules 2bw,gpipe,megatron-interleaved,torch-zbv --json {path}"""
    monkeypatch.setattr(sys, "argv", command.split())
    schedule_efficiency.main()
    cases = set()
    for row in json.loads(path.read_text())["rows"]:
        assert row.keys() == SHAPE | TIMES | OTHERS
        assert row["ideal_ms"] == row["microbatches"] * 12 and 0 < row["efficiency"] < 1
        cases.add((row["schedule"], row["microbatches"]))
        if row["schedule"] == "2bw":
            assert (row["versions"], row["peak_activations"]) == (2, 2)
        if row["schedule"] == "gpipe":
            assert row["versions"] == 1
            assert row["peak_activations"] == row["microbatches"]
    assert cases == {
        ("2bw", 2),
        ("2bw", 3),
        ("gpipe", 2),
        ("gpipe", 3),
        # Megatron's interleaved schedule takes multiples of the stages only.
        ("megatron-interleaved", 2),
        ("torch-zbv", 2),
        ("torch-zbv", 3),
    }
    assert path.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
