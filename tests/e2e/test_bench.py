"""The benchmarks run and write what their users read; what they measure is not tested
here."""

import json
import sys
from pathlib import Path

from bench import schedule_efficiency


def test_schedule_efficiency(tmp_path: Path, monkeypatch):
    """In this process, whose fork server has imported Megatron."""
    path = tmp_path / "efficiency.json"
    command = f"""schedule_efficiency.py --stages 2 --microbatches 1x,3 --forward-ms 4 --backward-ms 8 --iterations 7
        --schedules 2bw,gpipe,megatron-interleaved,torch-zbv --json {path}"""
    monkeypatch.setattr(sys, "argv", command.split())
    schedule_efficiency.main()
    counts = {}
    for row in json.loads(path.read_text())["rows"]:
        assert row["ideal_ms"] == row["microbatches"] * 12 and 0 < row["efficiency"] < 1
        case = (row["schedule"], row["microbatches"])
        counts[case] = (row["versions"], row["peak_activations"])
    assert counts["2bw", 2] == counts["2bw", 3] == (2, 2)
    assert counts["gpipe", 2] == (1, 2)
    assert counts["gpipe", 3] == (1, 3)
    assert ("torch-zbv", 3) in counts
    # Megatron's interleaved schedule takes multiples of the stages only
    assert ("megatron-interleaved", 3) not in counts
    assert path.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
