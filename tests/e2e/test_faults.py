"""Runs that cannot go on, under torchrun: all ranks end soon, with the cause first, and
nothing saved is lost."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from megatron_2bw.base.local_ranks import WorldError
from megatron_2bw.mcore.checkpoints.folder import (
    checkpoint_name,
    latest_iteration,
    problem,
)
from tests.distributed.training import command
from tests.e2e.launcher import ROOT, end, forked, program, torchrun

# seconds after which a run counts as hung; it would hang for
# --distributed-timeout-minutes
HUNG = 120.0


def first_words(stderr: str) -> str:
    """The first line that speaks of an end, without what Megatron's loggers say."""
    lines = [
        line
        for line in stderr.splitlines()
        if re.search(r"ends|failed|rror|Traceback|Sending process", line)
    ]
    quiet = ("INFO:", "WARNING:", "ERROR:", "Sending process", "site-packages/megatron")
    lines = [line for line in lines if not any(word in line for word in quiet)]
    return lines[0] if lines else stderr


def test_a_fault_of_one_rank_ends_all_and_comes_first_in_the_log():
    run = torchrun(
        2,
        "tests/e2e/faulty.py",
        command(2, 3, "2bw", train_iters=100_000),
        timeout=HUNG,
    )
    assert run.returncode != 0
    assert "rank 1 ends with an exception" in first_words(run.stderr), run.stderr[
        -3000:
    ]
    assert "ValueError: a fault of this stage alone" in run.stderr


@pytest.mark.proof("disabled")
@pytest.mark.parametrize("mode", ["disabled", "validate_results"])
def test_a_loss_of_nan_ends_the_run_as_in_megatron(mode):
    rate = dict(
        lr=1e30,
        min_lr=None,
        lr_decay_style="constant",
        lr_warmup_iters=None,
        clip_grad=0,
    )
    flags = command(2, 2, "2bw", train_iters=100, rerun_mode=mode, **rate)
    with pytest.raises(WorldError) as failed:
        forked(2, flags)
    told = str(failed.value)
    assert "rank 1 ends with an exception" in told and "rank 0 ends" not in told
    # The first update, of 1e30, reaches the weights of batch 3.
    assert (
        "iteration 3: Unexpected result nan (message='found NaN in local forward loss calculation')"
        in told
    )


def test_a_full_disk_is_told_and_the_last_good_checkpoint_stays(tmp_path):
    """The system lets no file grow beyond a size that the first checkpoint has not
    reached: writing fails as on a full disk, in the same call."""

    def flags(*more: str) -> list[str]:
        return command(
            1,
            2,
            "2bw",
            "--load",
            tmp_path,
            *more,
            train_iters=8,
            save=tmp_path,
            save_interval=2,
        )

    forked(1, flags("--exit-interval", "2"))
    assert latest_iteration(tmp_path) == 2
    size = max(
        file.stat().st_size for file in (tmp_path / checkpoint_name(2)).iterdir()
    )
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 1 pretrain_gpt_2bw.py".split()
    limited = [
        "prlimit",
        f"--fsize={size // 2}",
        sys.executable,
        *torchrun,
        *map(str, flags()),
    ]
    run = end(
        subprocess.Popen(
            limited, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ),
        HUNG,
    )
    assert run.returncode != 0
    assert re.search(
        rf"error: --save {tmp_path}: the checkpoint could not be written: .*File "
        r"too large.*; the last good one is "
        "that of iteration 2",
        first_words(run.stderr),
    ), run.stderr[-3000:]
    assert latest_iteration(tmp_path) == 2 and problem(tmp_path) is None


@pytest.mark.nightly
def test_killed_ranks_are_started_again_and_nothing_is_lost(tmp_path):
    """The short form of bench/faults.py: one kill at a random moment."""
    path = tmp_path / "faults.json"
    words = ["--kills", "1", "--seed", "1", "--iterations", "20", "--json", path]
    run = end(program("bench/faults.py", *words), 270)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    report = json.loads(path.read_text())
    assert (
        report["survived"],
        report["checkpoints_lost"],
        report["differences"],
        report["stopped"],
    ) == (1, 0, 0, "")
