"""scripts/demo.py from end to end: a few iterations on a small corpus, in two processes."""

import json

import pytest

from megatron_2bw import demo
from megatron_2bw.data.corpus import build_corpus

KEYS = "schedule stages microbatches iterations first_loss last_loss validation_loss seconds".split()


def test_demo_trains_and_leaves_summary_picture_and_log(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(demo, "build_corpus", lambda: build_corpus(tmp_path / "cache", 512, 200_000))
    monkeypatch.setattr(demo, "pick_device", lambda: "cpu")
    monkeypatch.setattr(demo, "DATA", ["--split", "90,10,0", "--eval-iters", "1"])
    folder = tmp_path / "demo"

    assert demo.main(["--iterations", "6", "--out", str(folder)]) == 0

    assert sorted(file.name for file in folder.iterdir()) == ["flush.log", "loss.png", "summary.json", "train.log"]
    summary = json.loads((folder / "summary.json").read_text())
    assert list(summary) == KEYS
    assert [summary[key] for key in KEYS[:4]] == ["2bw", 2, 4, 6]
    assert summary["first_loss"] == pytest.approx(6.24, abs=0.3)  # ln 512: nothing is known yet
    assert summary["last_loss"] < summary["first_loss"]
    assert summary["validation_loss"] < summary["first_loss"]
    assert (folder / "loss.png").stat().st_size > 10_000

    screen = capfd.readouterr().out
    log = (folder / "train.log").read_text()
    for text in ("iteration        6/       6 |", "validation loss at iteration 6", "lm loss:"):
        assert text in screen and text in log
    assert "with a flush (pipedream-flush, " in screen
    assert "validation loss  " in screen
