"""The sweep of Figures 6 and 7 without Slurm: its grid, its commands, what it reads from logs, the CSV and the bars."""

from __future__ import annotations

import csv
import json
import os
import sys
from pathlib import Path

import pytest

from megatron_2bw.models.model import PRESETS
from megatron_2bw.slurm import status
from megatron_2bw.slurm.status import Outcome
from scripts.paper_data import SYSTEMS, Panel, Run, grid, panels
from scripts.paper_picture import draw
from scripts.slurm import sweep
from scripts.slurm.sweep import measured

PANELS = panels("6") + panels("7")

OWN = """
    --model gpt-355m --nodes 1 --gpus-per-node 8 --model-parallel-size 8 --batch-sizes 64 --micro-batch-size 2,4
""".split()


def test_the_figures_are_the_papers():
    """8-deep for 2.2 billion parameters on 8 and 64 GPUs, 16-deep for 3.8 on 64; two batches each (section 5.2)."""
    shapes = {panel.figure: (panel.model, panel.servers * panel.gpus_per_server, panel.parallel) for panel in PANELS}
    for figure, kind in (("6", "gpt"), ("7", "bert")):
        assert shapes[f"{figure}a"] == (f"{kind}-2.2b", 8, 8)
        assert shapes[f"{figure}b"] == (f"{kind}-2.2b", 64, 8) and shapes[f"{figure}c"] == (f"{kind}-3.8b", 64, 16)
    assert all(len(panel.batches) == 2 and PRESETS[panel.model].sequence == 512 for panel in PANELS)


def test_every_run_is_legal():
    for run in grid(PANELS, tuple(SYSTEMS), (1, 2, 4, 8)):
        plan, model = run.plan, PRESETS[run.panel.model]
        heads = dict(run.panel.shape).get("heads", model.heads)
        assert plan.global_batch == run.batch and plan.gpus == run.panel.servers * run.panel.gpus_per_server
        assert model.layers % plan.depth == 0 and heads % plan.tensor == 0 and model.hidden % heads == 0, run.name
        assert (plan.tensor, plan.depth) in ((1, run.panel.parallel), (run.panel.parallel, 1))
        assert plan.recompute == "full" and (plan.schedule != "2bw" or plan.microbatches >= plan.depth)


def test_a_figure_has_all_systems_batches_and_microbatches():
    runs = grid([panel for panel in PANELS if panel.figure == "6a"], tuple(SYSTEMS), (1, 2, 4, 8))
    assert len(runs) == 2 * len(SYSTEMS) * 4 == len({run.name for run in runs})


def test_what_does_not_divide_or_does_not_fill_the_stages_is_left_out():
    panel = Panel("own", "gpt-355m", 1, 8, 8, (60, 64))
    found = {(run.system, run.batch, run.microbatch) for run in grid([panel], tuple(SYSTEMS), (8, 16))}
    assert not any(batch == 60 for _, batch, _ in found)
    assert ("GPipe", 64, 16) in found and ("PipeDream-2BW", 64, 8) in found and ("PipeDream-2BW", 64, 16) not in found


@pytest.fixture
def sbatch(tmp_path, monkeypatch) -> Path:
    """A stand-in for sbatch, which writes its words down, and a Slurm that knows no job."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sbatch").write_text(
        f'#!/bin/bash\necho "$MODEL $CHECKPOINTS $LOGS $*" >> {tmp_path}/called\nwc -l < {tmp_path}/called\n'
    )
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setattr(status, "slurm_state", lambda job: "PENDING")
    return tmp_path / "called"


def call(*words: object, monkeypatch) -> int:
    monkeypatch.setattr(sys, "argv", ["sweep.py", *map(str, words)])
    return sweep.main()


def test_a_dry_run_prints_what_a_shell_can_run(tmp_path, monkeypatch, capsys):
    words = (
        "--figure",
        7,
        "--panel",
        "c",
        "--out",
        tmp_path / "o",
        "--dry-run",
        "--sbatch",
        "--partition=gpu --account=me",
    )
    assert call("submit", *words, "--", "--data-path", "a b", monkeypatch=monkeypatch) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(grid(panels("7")[2:])) == 58 and not (tmp_path / "o").exists()
    for line in lines:
        assert line.startswith("MODEL=bert-3.8b PLAN='' PRECISION=fp16 CHECKPOINTS=none ") and " RESTARTS=0 " in line
        assert "--nodes=8 --gpus-per-node=8" in line and "--partition=gpu --account=me" in line
        assert line.index("--pipeline-schedule ") < line.index("--two-bw-correction none")
        assert line.endswith("--num-attention-heads 32 --data-path 'a b'") and "pretrain_bert_2bw.sbatch" in line


def test_it_submits_each_run_once_and_again_what_has_failed(tmp_path, monkeypatch, sbatch):
    out = tmp_path / "out"
    submit = ("submit", *OWN, "--out", out)
    assert call(*submit, monkeypatch=monkeypatch) == 0
    first = sbatch.read_text().splitlines()
    assert len(first) == len(SYSTEMS) * 2 and all(line.startswith(f"gpt-355m none {out}/own-") for line in first)
    runs = sweep.stored(out)
    assert {run.name for run, _, _ in runs} == {path.name for path in out.iterdir()}
    assert sorted(int(job) for _, job, _ in runs) == list(range(1, len(first) + 1))
    assert all(status.read(folder / "status.json")["status"] == "pending" for _, _, folder in runs)
    for word, (_, _, folder) in zip(("failed", "timeout", "out of memory", "completed", "running"), runs):
        status.write(folder / "status.json", Outcome(word, "x"))
        (folder / "start-0-node-0-a.log").write_text("old")
    assert call(*submit, monkeypatch=monkeypatch) == 0
    again = sbatch.read_text().splitlines()[len(first) :]
    assert {line.split()[2] for line in again} == {str(folder) for _, _, folder in runs[:2]} and len(again) == 2
    for _, _, folder in runs[:2]:  # the earlier try lies aside, whole
        assert (folder.with_name(f"{folder.name}.1") / "start-0-node-0-a.log").read_text() == "old"
        assert not list(folder.glob("*.log")) and status.read(folder / "status.json")["status"] == "pending"
    assert call(*submit, "--again", "out of memory", monkeypatch=monkeypatch) == 0
    assert len(sbatch.read_text().splitlines()) == len(first) + 3
    assert len(sweep.stored(out)) == len(first)


def test_a_run_that_sbatch_refuses_is_failed(tmp_path, monkeypatch, sbatch, capsys):
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/bash\necho 'sbatch: error: no such\n partition' >&2\nexit 1\n")
    assert call("submit", *OWN, "--out", tmp_path / "out", monkeypatch=monkeypatch) == 1
    error = capsys.readouterr().err
    assert error.startswith("sweep.py: error: sbatch does not take own-") and error.count("\n") == 1
    (path,) = (tmp_path / "out").glob("*/status.json")
    assert status.read(path)["status"] == "failed"


def log(*milliseconds: float, every: int = 1, batch: int = 64) -> str:
    return "".join(
        f" [2026-01-01] iteration {every * n:8}/     100 | elapsed time per iteration (ms): {ms} |"
        f" learning rate: 1.0E-04 | global batch size: {batch:5} | lm loss: 4.0E+00 |"
        f" bubble: 1.0%/2.0% | peak memory by stage (GiB): {n}.50 0.25 |\n"
        for n, ms in enumerate(milliseconds, 1)
    )


def test_the_speed_is_that_after_the_warm_up():
    assert measured(log(9000, 500, 200, 100, 300), 2) == {
        "samples_per_second": 320.0,
        "ms_per_iteration": 200.0,
        "iterations": 3,
        "peak_memory_gib": 5.5,
        "validation_loss": "",
    }
    assert measured(log(500, 200, every=5), 5)["iterations"] == 5  # a line stands for all since the one before
    assert measured(log(500, 200), 2) == measured("", 0) == {}
    assert measured(log(500.0).replace("peak memory", "no memory"), 0)["peak_memory_gib"] == ""
    cut_off = " iteration 9/ 30 | elapsed time per iteration (ms): 100.0 | learning rate: 1.0"
    assert measured(log(500.0) + cut_off, 0) == measured(log(500.0), 0)


def write_run(out: Path, run: Run, word: str, text: str = "") -> None:
    folder = out / run.name
    status.write(folder / "status.json", Outcome(word, f"because {word}"))
    (folder / "start-0-node-1-a.log").write_text(text)
    panel = vars(run.panel)
    (folder / "run.json").write_text(json.dumps({"job": "7", "run": vars(run) | {"panel": panel}}))


def test_the_table_has_a_row_for_every_run_and_the_bars_the_fastest(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(status, "slurm_state", lambda job: "RUNNING")
    panel = Panel("6a", "gpt-2.2b", 1, 8, 8, (64, 256))
    write_run(tmp_path, Run(panel, "PipeDream-2BW", 64, 1), "completed", log(900, 200, 200))
    write_run(tmp_path, Run(panel, "PipeDream-2BW", 64, 2), "completed", log(900, 100, 100))
    write_run(tmp_path, Run(panel, "PipeDream-2BW", 64, 4), "out of memory", log(900, 1, 1))
    write_run(tmp_path, Run(panel, "GPipe", 64, 1), "out of memory")
    write_run(tmp_path, Run(panel, "GPipe", 256, 1), "running", log(900, 1))
    write_run(tmp_path, Run(Panel("6b", "gpt-2.2b", 8, 8, 8, (512,)), "tensor MP", 512, 1), "failed")
    assert call("collect", "--out", tmp_path, "--warm-up", 1, monkeypatch=monkeypatch) == 0
    with open(tmp_path / "sweep.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == sweep.COLUMNS and len(rows) == 6
    found = {(row["system"], row["batch"], row["microbatch"]): row for row in rows}
    assert found["PipeDream-2BW", "64", "2"]["samples_per_second"] == "640.0"
    assert found["PipeDream-2BW", "64", "4"]["samples_per_second"] == ""  # what ends early has no speed
    memory = found["GPipe", "64", "1"]
    assert (memory["status"], memory["reason"], memory["gpus"]) == ("out of memory", "because out of memory", "8")
    assert found["tensor MP", "512", "1"]["tensor"] == "8" and found["tensor MP", "512", "1"]["width"] == "8"
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG") and not list(tmp_path.glob("*.part"))
    said = capsys.readouterr().out
    assert "6a gpt-2.2b on 8 GPUs, batch 64, PipeDream-2BW: 640.000 samples/s" in said and "(6 runs)" in said
    assert "batch 256, GPipe: running" in said and "batch 512, tensor MP: failed" in said


def test_bars_are_drawn_with_words_where_nothing_was_measured(tmp_path, monkeypatch):
    import matplotlib.axes

    texts, heights = [], []
    monkeypatch.setattr(matplotlib.axes.Axes, "text", lambda self, x, y, text, **_: texts.append(text.strip()))
    monkeypatch.setattr(matplotlib.axes.Axes, "bar", lambda self, x, y, *words, **_: heights.extend(y))
    draw(
        {"6a": {("GPipe", 64): "out of memory", ("PipeDream-2BW", 64): 12.5}},
        tmp_path / "a.png",
        "samples / s",
        "batch",
    )
    assert heights == [0, 12.5] and texts == ["OOM", "12.5"]


@pytest.mark.parametrize(
    "words, flag",
    [([], "--figure"), ([*OWN, "--systems", "GPipe,x"], "--systems"), ([*OWN, "--batch-sizes", "7"], "--batch-sizes")],
)
def test_wrong_flags_are_told_in_one_line(words, flag, tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit) as end:
        call("submit", "--out", tmp_path / "out", *words, monkeypatch=monkeypatch)
    error = capsys.readouterr().err
    assert end.value.code == 2 and flag in error and error.count("\n") == 1


def test_without_slurm_and_without_runs_it_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert call("submit", *OWN, "--out", tmp_path, monkeypatch=monkeypatch) == 1
    assert "sbatch" in capsys.readouterr().err
    assert call("collect", "--out", tmp_path, monkeypatch=monkeypatch) == 1
    assert "nothing was submitted to it" in capsys.readouterr().err
    write_run(tmp_path, Run(PANELS[0], "GPipe", 64, 1), "running")
    assert call("status", "--out", tmp_path, monkeypatch=monkeypatch) == 1
    error = capsys.readouterr().err
    assert "scontrol is not installed" in error and error.count("\n") == 1
