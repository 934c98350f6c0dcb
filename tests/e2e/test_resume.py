"""A job whose runs change the schedule: a 2BW checkpoint trains on in plain Megatron, a plain one starts a 2BW run."""

from __future__ import annotations

from megatron_2bw import run_log
from tests.distributed.training import command
from tests.e2e.launcher import forked, torchrun


def test_the_schedule_may_change_between_the_runs_of_a_job(tmp_path):
    ends = [
        ("2bw", 3, None),
        ("megatron", 6, None),
        ("2bw", 9, "> 2bw: starts from iteration 6 with the loaded weights as every version"),
    ]
    asynchronous = ("--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore")
    before = 0
    for schedule, end, line in ends:
        saves = dict(save=tmp_path, load=tmp_path, save_interval=3)
        flags = command(2, 2, schedule, "--bf16", *asynchronous, train_iters=12, exit_interval=end, **saves)
        if before == 0:  # the process that writes the checkpoints must end with its rank
            run = torchrun(2, "pretrain_gpt_2bw.py", flags)
            assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
            output = run.stdout
        else:
            output = forked(2, flags)
        logged = [line.iteration for line in run_log.training(output) if line.planned == 12 and line.loss is not None]
        assert logged == list(range(before + 1, end + 1))
        assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == str(end)
        assert line is None or line in output
        assert ("> 2bw: starts" in output) == (line is not None)
        before = end
