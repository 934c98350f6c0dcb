"""A wrong command line ends at once: its last line names the flag, status 2, no
traceback, no hang.

What the rules say is tested without processes (tests/unit/test_arguments.py,
test_refused_flags.py); here the entry scripts run as a user runs them, a case for each
place where a mistake is found.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_2bw.base.local_ranks import WorldError
from megatron_2bw.mcore.checkpoints.folder import TRACKER
from tests.distributed.training import BERT, command
from tests.e2e.launcher import ROOT, forked, torchrun

LIMIT = 120.0  # seconds after which a process counts as hung
GPT = "pretrain_gpt_2bw.py"


def check(status: int, output: str, script: str, words: str, ranks: int = 1) -> None:
    """The line of error comes last; of several ranks, which start seconds apart on a
    busy machine, one from each."""
    lines = output.splitlines()
    errors = [line for line in lines if "error:" in line]
    assert 1 <= len(errors) <= ranks and len(set(errors)) == 1, output[-3000:]
    last = lines[-1] if ranks == 1 else errors[0]
    assert last.startswith(f"{script}: error: ") and words in last, output[-3000:]
    assert "Traceback" not in output and status > 0


def run(script: str, argv: list[str], words: str, **environment: str) -> None:
    rank = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost"}
    ended = subprocess.run(
        [sys.executable, script, *argv],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
        env=os.environ | rank | environment,
    )
    check(ended.returncode, ended.stdout, script, words)
    assert ended.returncode == 2


CASES = {
    "an own flag": (
        GPT,
        command(2, 2, "2bw", "--two-bw-extra-warmup 1,1"),
        "--two-bw-extra-warmup 1,1: give one number",
    ),
    "a refused flag": (
        BERT,
        command(2, 2, "pipedream", "--num-experts", "4"),
        "--num-experts 4 does not work with",
    ),
    "Megatron's validation": (
        GPT,
        command(2, 2, save="folder"),
        "args.save_interval is not None (AssertionError in",
    ),
    "Megatron's configuration": (
        GPT,
        command(2, 2, "2bw", "--batch-invariant-mode"),
        "--attention-backend flash",
    ),
    "the model": (
        GPT,
        command(1, 2, "2bw", tokenizer_type="HuggingFaceTokenizer", vocab_size=None),
        "okenizer",
    ),
}
FORKED = ("Megatron's configuration", "the model")


@pytest.mark.parametrize("name", CASES)
def test_the_last_line_names_the_flag(name):
    """Cases in which the start and the end of Python make no difference run without
    them."""
    if name not in FORKED:
        return run(*CASES[name])
    with pytest.raises(WorldError, match="ended with exit code 2\n") as failed:
        forked(1, CASES[name][1], WORLD_SIZE="2")
    check(2, str(failed.value), GPT, CASES[name][2])


def checkpoint(folder: Path, **arguments) -> Path:
    """The head of a checkpoint in Megatron's oldest format, saved by one process or by
    two stages with `arguments`."""
    for rank in ("mp_rank_00", "mp_rank_00_000", "mp_rank_00_001"):
        path = folder / "iter_0000001" / rank / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        args = argparse.Namespace(**arguments)
        torch.save(dict(args=args, iteration=1, checkpoint_version=3.0), path)
    (folder / TRACKER).write_text("1")
    return folder


def test_a_checkpoint_whose_arguments_are_refused(tmp_path):
    load = checkpoint(tmp_path / "experts", num_layers=4, num_experts=8)
    changes = dict(num_layers=None, ckpt_format="torch", load=load)
    argv = command(1, 2, "pipedream", "--use-checkpoint-args", **changes)
    run(GPT, argv, "--num-experts 8 ", WORLD_SIZE="1")


def test_two_ranks_under_torchrun(tmp_path):
    """Both ranks meet the fault while they set up, when they are already joined."""
    load = checkpoint(tmp_path / "model", num_layers=8)
    argv = command(2, 2, "2bw", ckpt_format="torch", load=load)
    ended = torchrun(
        2, GPT, argv, PET_REDIRECTS="3", PET_LOG_DIR=str(tmp_path), timeout=2 * LIMIT
    )
    first, second = (log.read_text() for log in tmp_path.rglob("stderr.log"))
    words = "num_layers value from checkpoint (8) is not equal"
    check(ended.returncode, first + second, GPT, words, ranks=2)
