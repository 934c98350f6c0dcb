"""What twelve iterations on two ranks print: twenty-five lines at most; nothing that a user needs is missing."""

from __future__ import annotations

from megatron_2bw import run_log
from tests.distributed.training import command
from tests.e2e.launcher import torchrun

RUN = dict(train_iters=12, eval_interval=6, eval_iters=2, save_interval=6)


def test_what_twelve_iterations_print(tmp_path):
    flags = command(2, 2, "2bw", "--disable-msc", "--seed", "8", save=tmp_path / "model", **RUN)
    run = torchrun(2, "pretrain_gpt_2bw.py", flags, PYTHONWARNINGS="")  # all that Python prints by default
    output = run.stdout + run.stderr
    assert run.returncode == 0, output[-5000:]
    assert len(output.splitlines()) <= 25, output
    assert [line.iteration for line in run_log.training(output)] == list(range(1, 13))
    assert [(line.iteration, line.dataset) for line in run_log.validations(output)] == [
        (6, ""),
        (12, ""),
        (12, "validation set"),
        (12, "test set"),
    ]
    assert output.count("successfully saved checkpoint") == 2 and "[before the start of training step]" in output
    paths = [tmp_path / "model" / "output" / f"rank-{rank}.txt" for rank in range(2)]
    assert f"> output: {paths[0]} has all" in output
    first, last = (path.read_text() for path in paths)
    assert f"  train_iters {'.' * 37} 12" in first and "FutureWarning" in first + last
    assert list(run_log.training(last)) == list(run_log.training(output))
