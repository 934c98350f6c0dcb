"""The sweep of the paper's figures without Slurm: its commands, what it reads from logs, the tables of both scripts."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_2bw.slurm import status
from megatron_2bw.slurm.status import Outcome
from scripts import paper
from scripts.paper_data import PAPER, SYSTEMS, Panel, grid, panels
from scripts.slurm import sweep
from scripts.slurm.sweep import measured

OWN = """
    --model gpt-355m --nodes 1 --gpus-per-node 8 --model-parallel-size 8 --batch-sizes 64 --micro-batch-size 2,4
""".split()


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


@pytest.fixture
def call(monkeypatch):
    def main(*words: object, program=sweep) -> int:
        monkeypatch.setattr(sys, "argv", ["program", *map(str, words)])
        return program.main()

    return main


def test_a_dry_run_prints_what_a_shell_can_run(tmp_path, call, capsys):
    words = ("--figure", 7, "--out", tmp_path / "o", "--dry-run", "--sbatch", "--partition=gpu --account=me")
    assert call("submit", *words, "--", "--data-path", "a b") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(grid(panels("7"))) and not (tmp_path / "o").exists()
    subprocess.run(["bash", "-n"], input="\n".join(lines), text=True, check=True)
    for line in lines[-58:]:  # 3.8 billion parameters on 64 GPUs
        assert line.startswith("MODEL=bert-3.8b PLAN='' PRECISION=fp16 CHECKPOINTS=none ") and " RESTARTS=0 " in line
        assert "--nodes=8 --gpus-per-node=8" in line and "--partition=gpu --account=me" in line
        assert line.index("--pipeline-schedule ") < line.index("--two-bw-correction none")
        assert line.endswith("--num-attention-heads 32 --data-path 'a b'") and "pretrain_bert_2bw.sbatch" in line


def test_whole_trainings_have_the_papers_settings_and_need_data(tmp_path, call, capsys):
    words = ("submit", "--figure", 5, "--out", tmp_path)
    assert call(*words) == 1
    assert f"megatron-2bw preprocess --task gpt --dataset {PAPER['data']['dataset']}" in capsys.readouterr().err
    assert call(*words, "--dry-run") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "pretrain_gpt_2bw.sbatch" in line]
    assert len(lines) == 3 and sorted(line.count("--train-iters 240000") for line in lines) == [0, 0, 1]
    for line in lines:
        assert f"--lr {PAPER['training']['lr']} {PAPER['training']['flags'].strip()}" in line
        assert f"--data-path {tmp_path}/openwebtext-gpt " in line and "/checkpoints " in line
        assert "--time=" not in line and "--no-requeue" not in line
    assert call("submit", "--figure", "table1", "--out", tmp_path, "--dry-run") == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert "PRECISION=fp32" in line and line.endswith("--seq-length 128 --max-position-embeddings 128")


def test_it_submits_each_run_once_and_again_what_has_failed(tmp_path, call, sbatch):
    out = tmp_path / "out"
    assert call("submit", *OWN, "--out", out) == 0
    first = sbatch.read_text().splitlines()
    assert len(first) == len(SYSTEMS) * 2 and all(line.startswith(f"gpt-355m none {out}/own-") for line in first)
    runs = sweep.stored(out)
    assert {run.name for run, _, _ in runs} == {path.name for path in out.iterdir()}
    assert sorted(int(job) for _, job, _ in runs) == list(range(1, len(first) + 1))
    assert all(status.read(folder / "status.json")["status"] == "pending" for _, _, folder in runs)
    for word, (_, _, folder) in zip(("failed", "timeout", "out of memory", "completed", "running"), runs):
        status.write(folder / "status.json", Outcome(word, "x"))
        (folder / "start-0-node-0-a.log").write_text("old")
    assert call("submit", *OWN, "--out", out) == 0
    again = sbatch.read_text().splitlines()[len(first) :]
    assert {line.split()[2] for line in again} == {str(folder) for _, _, folder in runs[:2]} and len(again) == 2
    for _, _, folder in runs[:2]:  # the earlier try lies aside, whole
        assert (folder.with_name(f"{folder.name}.1") / "start-0-node-0-a.log").read_text() == "old"
        assert not list(folder.glob("*.log")) and status.read(folder / "status.json")["status"] == "pending"
    assert len(sweep.stored(out)) == len(first)


def log(*milliseconds: float, every: int = 1, batch: int = 64) -> str:
    return "".join(
        f" [2026-01-01] iteration {every * n:8}/     100 | elapsed time per iteration (ms): {ms} |"
        f" learning rate: 1.0E-04 | global batch size: {batch:5} | lm loss: 4.0E+00 |"
        f" bubble: 1.0%/2.0% | peak memory by stage (GiB): {n}.50 0.25 |\n"
        for n, ms in enumerate(milliseconds, 1)
    )


def test_the_speed_is_that_after_the_warm_up():
    expected = dict(samples_per_second=320.0, ms_per_iteration=200.0, iterations=3, peak_memory_gib=5.5)
    assert measured(log(9000, 500, 200, 100, 300), 2) == expected | {"validation_loss": ""}
    assert measured(log(500, 200, every=5), 5)["iterations"] == 5  # a line stands for all since the one before
    assert measured(log(500, 200), 2) == measured("", 0) == {}
    cut_off = " iteration 9/ 30 | elapsed time per iteration (ms): 100.0 | learning rate: 1.0"
    assert measured(log(500.0) + cut_off, 0) == measured(log(500.0), 0)


def test_the_jobs_of_a_figure_stand_in_both_tables(tmp_path, call, sbatch, capsys):
    """A row for every run; of several microbatches the fastest counts, and a word stands where nothing was measured."""
    out = tmp_path / "figure8"
    assert call("submit", "--figure", 8, "--cluster", "p3.16xlarge", "--out", out) == 0
    for run, _, folder in sweep.stored(out):
        fits = (run.system, run.panel.model) != ("GPipe", "gpt-2.2b")
        status.write(folder / "status.json", Outcome("completed" if fits else "out of memory", "because"))
        (folder / "start-0-node-0-a.log").write_text(log(900, 100, 100, batch=run.batch))
    capsys.readouterr()
    assert call("collect", "--out", out, "--warm-up", 1) == 0
    with open(out / "sweep.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == sweep.COLUMNS and len(rows) == len(grid(panels("8")))
    speeds = {(row["model"], row["system"], row["batch"]): row["samples_per_second"] for row in rows}
    assert speeds["gpt-2.2b", "PipeDream-2BW", "64"] == "640.0" and speeds["gpt-2.2b", "GPipe", "64"] == ""
    said = capsys.readouterr().out
    assert "| 64 | PipeDream-2BW | 640.0 | completed |" in said and "| GPipe |  | out of memory |" in said
    words = ("--figure", 8, "--collect", out, "--warm-up", 1, "--skip-measurements", "--out", tmp_path / "paper")
    assert call(*words, program=paper) == 0
    with open(tmp_path / "paper" / "figure8.csv", newline="") as file:
        found = {(row["figure"], row["series"], row["x"]): row["measured"] for row in csv.DictReader(file)}
    assert found["8a", "GPipe", "64"] == "out of memory" and found["8a", "PipeDream-2BW", "256"] == "3.5"
    assert "| 3.5 |" in (tmp_path / "paper" / "figure8.md").read_text()
