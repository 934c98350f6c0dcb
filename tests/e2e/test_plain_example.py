"""examples/plain_torch.py as a reader runs it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.e2e.launcher import ROOT, end, torchrun

EXAMPLE = str(ROOT / "examples" / "plain_torch.py")


def ranks_of_its_own():
    process = subprocess.Popen(
        [sys.executable, EXAMPLE], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    return end(process)


@pytest.mark.parametrize("run", [ranks_of_its_own, lambda: torchrun(2, EXAMPLE, [])], ids=["alone", "torchrun"])
def test_it_prints_the_losses_of_the_reference(run):
    result = run()
    assert result.returncode == 0, result.stderr
    header, *lines = result.stdout.splitlines()
    assert header == "batch   loss, 2 stages   loss, one process" and len(lines) == 20
    assert all(line.endswith("the same bits") for line in lines), result.stdout
