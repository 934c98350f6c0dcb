"""The demo from end to end: a few iterations on a small corpus, in two processes."""

import json
import subprocess
import sys

import pytest

KEYS = "schedule stages microbatches iterations first_loss last_loss validation_loss seconds".split()
PROGRAM = """
import sys
from megatron_2bw import demo
from megatron_2bw.data.corpus import build_corpus
demo.build_corpus = lambda: build_corpus(sys.argv[1], 512, 200_000)
demo.pick_device, demo.DATA = (lambda: "cpu"), "--split 90,10,0 --eval-iters 1".split()
sys.exit(demo.main(["--iterations", "6", "--out", sys.argv[2]]))
"""


def test_demo_trains_and_leaves_summary_picture_and_log(tmp_path):
    folder = tmp_path / "demo"
    command = [sys.executable, "-c", PROGRAM, tmp_path / "cache", folder]
    screen = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    summary = json.loads((folder / "summary.json").read_text())
    assert list(summary) == KEYS
    assert [summary[key] for key in KEYS[:4]] == ["2bw", 2, 4, 6]
    assert summary["first_loss"] == pytest.approx(6.24, abs=0.3)  # ln 512: nothing is known yet
    assert summary["last_loss"] < summary["first_loss"]
    assert summary["validation_loss"] < summary["first_loss"]
    assert (folder / "loss.png").stat().st_size > 10_000
    log = (folder / "output" / "rank-1.txt").read_text()
    for text in ("iteration        6/       6 |", "validation loss at iteration 6", "lm loss:"):
        assert text in screen and text in log
    assert "validation loss  " in screen
