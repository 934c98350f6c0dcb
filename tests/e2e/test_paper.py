"""scripts/paper.py end to end: a figure from a clean folder, its jobs as bash, and its table from logs of jobs."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

from megatron_2bw.slurm import status
from megatron_2bw.slurm.status import Outcome
from scripts.paper_data import grid, panels
from tests.e2e.launcher import ROOT


def paper(*words: object, **environment: str) -> str:
    command = [sys.executable, "scripts/paper.py", *map(str, words)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ | environment)
    assert run.returncode == 0, run.stderr
    return run.stdout


def log(milliseconds: float, batch: int) -> str:
    return "".join(
        f" [2026-01-01] iteration {n:8}/      30 | elapsed time per iteration (ms): {milliseconds} |"
        f" learning rate: 1.0E-04 | global batch size: {batch:5} | lm loss: 4.0E+00 |"
        " bubble: 1.0%/2.0% | peak memory by stage (GiB): 9.50 0.25 |\n"
        for n in range(1, 31)
    )


def test_a_figure_from_its_jobs_to_its_table(tmp_path: Path):
    out = tmp_path / "out"
    dry = paper("--figure", "8", "--cluster", "p3.16xlarge", "--out", out)
    assert len(dry.splitlines()) == len(grid(panels("8"))) and not out.exists()
    subprocess.run(["bash", "-n"], input=dry, text=True, check=True)
    (tmp_path / "sbatch").write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/called\nwc -l < {tmp_path}/called\n')
    (tmp_path / "sbatch").chmod(0o755)
    words = ("--figure", "8", "--cluster", "p3.16xlarge", "--out", out)
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert "submitted 20 runs" in paper(*words, "--submit", PATH=path)
    for run in grid(panels("8")):
        folder = out / "jobs" / "figure8" / run.name
        fits = (run.system, run.panel.model) != ("GPipe", "gpt-2.2b")
        status.write(folder / "status.json", Outcome("completed" if fits else "out of memory", "x"))
        (folder / "start-0-node-0-a.log").write_text(log(100.0, run.batch) if fits else "CUDA out of memory")
    assert "claims hold" in paper(*words, "--collect")
    with open(out / "figure8.csv", newline="") as file:
        rows = {(row["figure"], row["series"], row["x"]): row["measured"] for row in csv.DictReader(file)}
    assert rows["8a", "GPipe", "64"] == "out of memory" and rows["8a", "PipeDream-2BW", "256"] == "9.5"
    page = (out / "figure8.md").read_text()
    assert "| out of memory |" in page and "| 9.5 |" in page


def test_whole_trainings_wait_for_their_data(tmp_path: Path):
    out = tmp_path / "out"
    lines = paper("--figure", "5", "--cluster", "p3.16xlarge", "--out", out, "--", "--seed", "7").splitlines()
    subprocess.run(["bash", "-n"], input="\n".join(lines), text=True, check=True)
    (prepare,) = [line for line in lines if "preprocess_data.py --task gpt" in line]
    assert f"--output-prefix {out}/jobs/figure5/openwebtext-gpt" in prepare and "--dataset" in prepare
    jobs = [line for line in lines if "pretrain_gpt_2bw.sbatch" in line]
    assert len(jobs) == 3 and all("--dependency=afterok:JOB_OF_GPT" in job and "--seed 7" in job for job in jobs)
    assert sorted(job.count("--train-iters 240000") for job in jobs) == [0, 0, 1]
    assert all(f"--data-path {out}/jobs/figure5/openwebtext-gpt " in job for job in jobs)
