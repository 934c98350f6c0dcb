"""megatron-2bw convergence from end to end: real runs of a tiny GPT, ended in the
middle of one, and gone on with."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from megatron_2bw.base import run_log
from megatron_2bw.base.processes import stop_tree
from megatron_2bw.tools.convergence import run as convergence
from tests.e2e.launcher import end, program

MEGATRON = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --make-vocab-size-divisible-by 32 --split 90,10,0
    --num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --num-workers 0
    --train-iters 120 --eval-interval 50 --eval-iters 2 --lr-warmup-iters 0 --save-interval 20
""".split()
RUNS = ["vanilla-lr1e-2-seed1", "2bw-lr1e-2-seed1"]


def words(out: Path, *options: str) -> list[str]:
    common = f"test --out {out} --device cpu --seeds 1 --lr 1e-2".split()
    return [*common, *options, "--", *MEGATRON]


def start(out: Path, *options: str) -> subprocess.Popen[str]:
    return program("-m", "megatron_2bw.cli", "convergence", *words(out, *options))


@pytest.mark.nightly
def test_killed_and_gone_on_with_then_judged(tmp_path, capsys):
    vanilla, ours = [tmp_path / "runs" / name for name in RUNS]
    first = start(tmp_path)
    try:
        until = time.monotonic() + 200
        while not (ours / "checkpoints" / "latest_checkpointed_iteration.txt").exists():
            assert first.poll() is None and time.monotonic() < until
            time.sleep(0.02)
        children = psutil.Process(first.pid).children(recursive=True)
        os.kill(first.pid, signal.SIGTERM)
    except BaseException:
        stop_tree(first)
        raise
    stopped = end(first, 200)
    assert stopped.returncode == 128 + signal.SIGTERM, stopped.stderr
    _, alive = psutil.wait_procs(children, timeout=20)
    assert children and not alive
    assert (vanilla / "result.json").exists()
    assert not (ours / "result.json").exists()

    again = end(start(tmp_path, "--max-gap", "1000"), 200)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "2 runs of 120 iterations, 1 of them are there" in again.stdout
    assert "--max-gap 1000 holds" in again.stdout
    log = (ours / "train.log").read_text()
    assert "successfully loaded checkpoint" in log
    # the same weights, the same batch
    before = first_loss(log)
    assert before == first_loss((vanilla / "train.log").read_text())
    curves = json.loads((ours / "result.json").read_text())
    assert [end for end, _ in curves["training"]] == list(range(10, 121, 10))
    assert [at for at, _ in curves["validation"]] == [50, 100, 120]
    base, row = json.loads((tmp_path / "runs.json").read_text())["summary"]
    reference = base["validation_loss"]["mean"]
    assert reference < before - 1  # it learned
    gap = row["gap_percent"]["mean"]
    expected = 100 * (row["validation_loss"]["mean"] / reference - 1)
    assert gap == pytest.approx(expected) != 0
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {".lock", "runs", "runs.json", "curves.png", "report.md"}

    assert convergence.main(words(tmp_path, "--max-gap", f"{gap - 1}")) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("megatron-2bw convergence: 2bw at lr 1e-2: the gap ")


def first_loss(log: str) -> float:
    for line in run_log.training(log):
        if (line.iteration, line.planned) == (1, 120):
            return line.loss
    raise AssertionError("no line of the first iteration")
