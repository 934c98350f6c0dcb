"""A job whose runs change the schedule: a 2BW checkpoint trains on in plain Megatron, a plain one starts a 2BW run."""

from __future__ import annotations

from megatron_2bw import run_log
from tests.distributed.training import command
from tests.e2e.launcher import forked, torchrun
from tests.unit.command_lines import dataset


def test_the_schedule_may_change_between_the_runs_of_a_job(tmp_path):
    ends = [
        ("2bw", 3, None),
        ("megatron", 6, None),
        ("2bw", 9, "> 2bw: starts from iteration 6 with the loaded weights as every version"),
    ]
    asynchronous = ("--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore")
    before = 0
    for schedule, end, line in ends:
        flags = command(
            2,
            2,
            schedule,
            "--bf16",
            *asynchronous,
            train_iters=12,
            save_interval=3,
            exit_interval=end,
            save=tmp_path,
            load=tmp_path,
        )
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


def test_a_dataset_that_was_exchanged_is_named_and_its_cached_index_is_not_used(tmp_path):
    def run(end: int) -> str:
        folders = dict(data_path=prefix, data_cache_path=tmp_path / "cache", save=tmp_path, load=tmp_path)
        flags = command(2, 2, "2bw", train_iters=9, save_interval=3, exit_interval=end, **folders)
        return forked(2, [word for word in flags if word != "--mock-data"])

    prefix = dataset(tmp_path / "text", lengths=(20,) * 200)
    changed = f"> --load {tmp_path}: the dataset {prefix} has changed since ("
    run(3)
    assert changed not in run(6)
    dataset(tmp_path / "text", lengths=(50,) * 150)
    output = run(9)
    assert f"{changed}.bin bytes 16000 -> 30000, .idx bytes " in output
    assert [line.iteration for line in run_log.training(output) if line.loss is not None] == [7, 8, 9]
