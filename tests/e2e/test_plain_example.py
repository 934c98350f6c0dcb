"""examples/plain_torch.py as a reader runs it."""

from __future__ import annotations

import subprocess
import sys

from megatron_2bw.start.torchrun import ROOT


def test_it_prints_the_losses_of_the_reference():
    command = [sys.executable, ROOT / "examples" / "plain_torch.py"]
    header, *lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert header == "batch   loss, 2 stages   loss, one process" and len(lines) == 20
    assert all(line.endswith("the same bits") for line in lines)
