"""The benchmarks run and write what their users read; what they measure is not tested
here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bench import schedule_efficiency

FIELDS = {
    "schedule",
    "stages",
    "microbatches",
    "width",
    "forward_ms",
    "backward_ms",
    "iteration_ms",
    "ideal_ms",
}
FIELDS |= {
    "step_ms",
    "efficiency",
    "clip_grad",
    "peak_activations",
    "versions",
    "flags",
}


def test_schedule_efficiency(tmp_path: Path, monkeypatch):
    """In this process, whose fork server has imported Megatron."""
    path = tmp_path / "efficiency.json"
    flags = (
        "--stages 2 --microbatches 1x,3 --forward-ms 4 --backward-ms 8 --iterations "
        "7 --gpipe-round 1"
    ).split()
    names = "2bw,gpipe,megatron-interleaved,torch-zbv"
    monkeypatch.setattr(
        sys,
        "argv",
        ["schedule_efficiency.py", *flags, "--schedules", names, "--json", str(path)],
    )
    assert schedule_efficiency.main() == 0
    rows = json.loads(path.read_text())["rows"]
    shapes = [(row["schedule"], row["microbatches"]) for row in rows]
    # Megatron's interleaved schedule takes multiples of the stages only.
    assert ("megatron-interleaved", 2) in shapes and (
        "megatron-interleaved",
        3,
    ) not in shapes
    assert {("2bw", 2), ("2bw", 3), ("gpipe", 3), ("torch-zbv", 2)} <= set(shapes)
    for row in rows:
        assert row.keys() == FIELDS
        assert row["ideal_ms"] == row["microbatches"] * 12 and 0 < row["efficiency"] < 1
        if row["schedule"] == "2bw":
            assert (row["versions"], row["peak_activations"]) == (2, 2)
        if row["schedule"] == "gpipe":
            in_flight = 1 if row["flags"] == "--gpipe-round 1" else row["microbatches"]
            assert (row["versions"], row["peak_activations"]) == (1, in_flight)
    assert {row["schedule"] for row in rows if row["flags"] == "--gpipe-round 1"} == {
        "gpipe"
    }
    assert path.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
