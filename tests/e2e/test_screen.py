"""What twelve iterations on two ranks print: sixty lines at most, nothing that a user needs is missing."""

from __future__ import annotations

import pytest

from megatron_2bw import run_log
from megatron_2bw.local_ranks import WorldError
from tests.distributed.training import command
from tests.e2e.launcher import forked, torchrun

RUN = dict(train_iters=12, eval_interval=6, eval_iters=2, save_interval=6)


def test_twelve_iterations_print_sixty_lines_at_most(tmp_path):
    flags = command(2, 2, "2bw", "--disable-msc", "--seed", "8", save=tmp_path / "model", **RUN)
    run = torchrun(2, "pretrain_gpt_2bw.py", flags, PYTHONWARNINGS="")  # all that Python prints by default
    output = run.stdout + run.stderr
    assert run.returncode == 0, output[-5000:]
    assert len(output.splitlines()) <= 60, output
    assert [line.iteration for line in run_log.training(output)] == list(range(1, 13))
    assert [(line.iteration, line.dataset) for line in run_log.validations(output)] == [
        (6, ""),
        (12, ""),
        (12, "validation set"),
        (12, "test set"),
    ]
    assert output.count("successfully saved checkpoint") == 2 and "[before the start of training step]" in output
    assert "> typed several times, the last one counts: --seed 7, then 8" in output
    assert "UserWarning: --disable-msc is deprecated" in output, "about the user's own settings"
    path = tmp_path / "model" / "arguments.txt"
    assert f"> arguments: {path} " in output and " (--verbose prints all)\n" in output
    listed = path.read_text().splitlines()
    assert len(listed) > 800 and f"  train_iters {'.' * 37} 12" in listed


KNOWN = "--- arguments ---", "  train_iters ......", "Evaluating iter 1/2", "(after 1 iter", "> compiling dataset"


def test_verbose_prints_all(tmp_path):
    flags = command(2, 2, "2bw", "--verbose", **RUN, save=tmp_path)
    run = torchrun(2, "pretrain_gpt_2bw.py", flags, PYTHONWARNINGS="")
    output = run.stdout + run.stderr
    assert run.returncode == 0, output[-3000:]
    assert [words for words in (*KNOWN, "GPTModel IS DEPRECATED", "Apex is not installed") if words not in output] == []
    assert "> known lines" not in output and not (tmp_path / "arguments.txt").exists()


def test_megatrons_own_schedule_is_as_quiet():
    output = forked(2, command(2, 2, "megatron", **RUN | dict(save_interval=None)))
    assert [words for words in KNOWN if words in output] == []
    assert len(list(run_log.training(output))) == 12 and "> arguments: --verbose prints them" in output
    assert "(after 2 iterations) memory (MB)" in output, "its lines lack the memory"


def test_an_error_is_printed():
    with pytest.raises(WorldError, match=r"pretrain_gpt_2bw.py: error: .*--load"):
        forked(2, command(2, 2, "2bw", load="/missing"))
