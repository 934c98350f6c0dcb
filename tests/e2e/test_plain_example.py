"""examples/plain_torch.py as a reader runs it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron_2bw.start.torchrun import ROOT, torchrun

EXAMPLE = ROOT / "examples" / "plain_torch.py"


@pytest.mark.parametrize(
    "command", [[sys.executable, str(EXAMPLE)], torchrun(2, script=EXAMPLE)], ids=["alone", "ranks"]
)
def test_it_prints_the_losses_of_the_reference(command):
    header, *lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert header == "batch   loss, 2 stages   loss, one process" and len(lines) == 20
    assert all(line.endswith("the same bits") for line in lines)
