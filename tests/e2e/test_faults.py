"""Runs that cannot go on, under torchrun: all ranks end soon, with the cause first, and
nothing saved is lost."""

import json
import re
import subprocess

import pytest

from megatron_2bw.base.local_ranks import WorldError
from megatron_2bw.mcore.checkpoints.folder import (
    checkpoint_name,
    latest_iteration,
    problem,
)
from megatron_2bw.run.start import torchrun
from tests.distributed.training import command
from tests.e2e import launcher
from tests.e2e.launcher import ROOT, end, forked, output_of, program

# seconds after which a run counts as hung; it would hang for
# --distributed-timeout-minutes
HUNG = 120.0


def first_words(stderr: str) -> str:
    """The first line that speaks of an end, without what Megatron's loggers say."""
    for line in stderr.splitlines():
        loggers = re.search(
            "INFO:|WARNING:|ERROR:|Sending|site-packages/megatron", line
        )
        if re.search(r"ends|failed|rror|Traceback", line) and not loggers:
            return line
    return stderr


def test_a_fault_of_one_rank_ends_all_and_comes_first_in_the_log():
    flags = command(2, 3, "2bw", train_iters=100_000)
    run = launcher.torchrun(2, "tests/e2e/faulty.py", flags, timeout=HUNG)
    assert run.returncode != 0
    first = first_words(run.stderr)
    assert "rank 1 ends with an exception" in first, run.stderr[-3000:]
    assert "ValueError: a fault of this stage alone" in run.stderr


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
    assert "iteration 3: Unexpected result nan (message='found NaN in" in told


def test_a_full_disk_is_told_and_the_last_good_checkpoint_stays(tmp_path):
    """The system lets no file grow beyond a size that the first checkpoint has not
    reached: writing fails as on a full disk, in the same call."""

    folder = str(tmp_path)
    saves = dict(train_iters=8, load=folder, save=folder, save_interval=2)
    flags = command(1, 2, "2bw", **saves)
    forked(1, [*flags, "--exit-interval", "2"])
    assert latest_iteration(folder) == 2
    files = (tmp_path / checkpoint_name(2)).iterdir()
    size = max(file.stat().st_size for file in files)
    command_line = torchrun.torchrun(1, script="pretrain_gpt_2bw.py")
    limited = ["prlimit", f"--fsize={size // 2}", *command_line, *flags]
    run = end(torchrun.start(limited, cwd=ROOT, stderr=subprocess.PIPE), HUNG)
    assert run.returncode != 0
    first = first_words(run.stderr)
    for words in (f"error: --save {folder}: ", "File too large", "that of iteration 2"):
        assert words in first, run.stderr[-3000:]
    assert latest_iteration(tmp_path) == 2 and problem(tmp_path) is None


@pytest.mark.nightly
def test_killed_ranks_are_started_again_and_nothing_is_lost(tmp_path):
    """The short form of bench/faults.py: one kill at a random moment."""
    path = tmp_path / "faults.json"
    words = ["--kills", "1", "--seed", "1", "--iterations", "20", "--json", path]
    run = end(program("bench/faults.py", *words), 270)
    output_of(run)
    report = json.loads(path.read_text())
    assert report["survived"] == 1 and report["stopped"] == ""
    assert report["checkpoints_lost"] == report["differences"] == 0
