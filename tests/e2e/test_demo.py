"""The demo from end to end: a few iterations on a small corpus, in two processes;
examples/plain_torch.py."""

import re
import subprocess
import sys

import pytest

from megatron_2bw.base import run_log
from megatron_2bw.run.start.torchrun import ROOT

PROGRAM = """
import sys
from megatron_2bw.tools import demo
from megatron_2bw.tools.data.corpus import build_corpus
demo.build_corpus = lambda: build_corpus(sys.argv[1], 512, 200_000)
demo.pick_device, demo.DATA = (lambda: "cpu"), "--split 90,10,0 --eval-iters 1".split()
sys.exit(demo.main(["--iterations", "6", "--out", sys.argv[2]]))
"""


def test_demo_trains_and_leaves_a_picture_and_a_log(tmp_path):
    folder = tmp_path / "demo"
    command = [sys.executable, "-c", PROGRAM, tmp_path / "cache", folder]
    screen = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert (folder / "demo.png").stat().st_size > 10_000
    log = (folder / "output" / "rank-1.txt").read_text()
    for text in ("iteration        6/       6 |", "validation loss at iteration 6"):
        assert text in screen and text in log
    losses = [line.loss for line in run_log.training(log)]
    # ln 512: nothing is known yet
    assert losses[0] == pytest.approx(6.24, abs=0.3) and losses[-1] < losses[0]
    assert f"{losses[0]:.3f}, after 6 iterations {losses[-1]:.3f}" in screen
    line = r"speed +(.+) times as fast as 1F1B \(.* (\d+) against (\d+) ms a batch\)"
    times, own, flush = map(float, re.search(line, screen).groups())
    assert times == pytest.approx(flush / own, abs=0.02)


def test_plain_torch_prints_the_losses_of_the_reference():
    command = [sys.executable, ROOT / "examples" / "plain_torch.py"]
    output = subprocess.check_output(command, text=True)
    header, *lines = output.splitlines()
    assert header == "batch   loss, 2 stages   loss, one process" and len(lines) == 20
    assert all(line.endswith("the same bits") for line in lines)
