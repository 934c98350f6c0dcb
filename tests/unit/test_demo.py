"""The demo: what it reads from Megatron's log, what it writes, and that it leaves nothing running."""

import json
import signal
import sys

import pytest

from megatron_2bw import demo
from megatron_2bw.errors import UserError
from megatron_2bw.processes import stop_tree

LOG = """\
 [2026-01-01 00:00:01.0] iteration        1/      20 | consumed samples: 16 | lm loss: 8.400000E+00 | loss scale: 1.0 |
[Rank 1] (after 1 iterations) memory (MB) | allocated: 954.91
 [2026-01-01 00:00:09.0] iteration       10/      20 | consumed samples: 160 | lm loss: 8.000000E+00 | loss scale: 1.0 |
cut off by rank 0 [2026-01-01 00:00:19.0] iteration       20/      20 | consumed samples: 320 | lm loss: 6.5E+00 | x |
Evaluating iter 1/10
 validation loss at iteration 20 on validation set | lm loss value: 6.250000E+00 | lm loss PPL: 5.180128E+02 |
"""


def line(end: int, loss: str = " lm loss: 5.0E+00 |") -> str:
    return f" [time] iteration {end:8d}/      20 | consumed samples: 1 |{loss} loss scale: 1.0 |\n"


def test_losses_stand_in_the_middle_of_the_iterations_that_they_are_the_mean_of():
    losses = demo.parse_log(LOG)
    assert losses == demo.Losses([1, 5.5, 15.5], [8.4, 8.0, 6.5], 6.25)


def test_at_interval_one_the_second_line_is_the_mean_of_two_iterations():
    assert demo.parse_log(line(1) + line(2) + line(3)).steps == [1, 1.5, 3]


def test_a_line_without_a_loss_still_ends_its_interval():
    losses = demo.parse_log(line(1) + line(10, "") + line(20))
    assert losses.steps == [1, 15.5] and losses.validation is None


@pytest.mark.parametrize("iterations, interval", [(250, 10), (7, 7), (6, 6), (1, 1), (11, 1), (36, 9)])
def test_the_last_iteration_is_logged(iterations, interval):
    assert demo.log_interval(iterations) == interval


def test_the_summary_has_the_promised_keys_and_is_json():
    summary = demo.summarize(demo.parse_log(LOG), "2bw", 20, 12.345)
    assert json.loads(json.dumps(summary)) == {
        "schedule": "2bw",
        "stages": 2,
        "microbatches": 4,
        "iterations": 20,
        "first_loss": 8.4,
        "last_loss": 6.5,
        "validation_loss": 6.25,
        "seconds": 12.3,
    }


@pytest.mark.parametrize("log", ["", LOG.replace("validation loss at", ""), LOG.replace("6.5E+00", "INF")])
def test_no_summary_without_losses(log):
    with pytest.raises(UserError):
        demo.summarize(demo.parse_log(log), "2bw", 20, 1.0)


def test_the_report_is_aligned_and_gives_the_fall(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    summary = demo.summarize(demo.parse_log(LOG), "2bw", 20, 12.0)
    rows = demo.table(summary, 10, tmp_path / "demo").splitlines()
    assert {row[16] for row in rows} == {" "} and all(row[17] != " " for row in rows)
    assert "(-23%)" in rows[3] and rows[-1].endswith("demo/: summary.json, loss.png, train.log")


def test_the_command_trains_what_the_summary_says():
    command = demo.training_command("gpipe", 6, ["--data-path", "corpus"], "cpu")
    value = dict(zip(command, command[1:]))
    assert value["--nproc-per-node"] == value["--pipeline-model-parallel-size"] == "2"
    assert int(value["--global-batch-size"]) // int(value["--micro-batch-size"]) == demo.MICROBATCHES
    assert (value["--pipeline-schedule"], value["--device"], value["--train-iters"]) == ("gpipe", "cpu", "6")
    assert int(value["--lr-warmup-iters"]) < 6 < int(value["--eval-interval"])
    assert command[-2:] == ["--data-path", "corpus"]


def test_the_time_of_an_iteration_leaves_the_start_out():
    times = {1: 9000, 10: 500, 20: 100, 30: 140, 40: 700}
    text = "".join(line(end, f" elapsed time per iteration (ms): {ms:.1f} |") for end, ms in times.items())
    assert demo.mean_time(text, 30) == 120
    assert demo.mean_time(line(20), 30) is None


def test_a_failed_training_leaves_its_log_and_gives_one_line(tmp_path, capsys):
    command = [sys.executable, "-c", "import sys; print('began'); sys.exit('ValueError: too deep')"]
    with pytest.raises(UserError, match="exit code 1: ValueError: too deep") as failure:
        demo.train(command, tmp_path / "train.log")
    assert "\n" not in str(failure.value)
    assert "began" in capsys.readouterr().out
    assert sorted((tmp_path / "train.log").read_text().split("\n")) == ["", "ValueError: too deep", "began"]


def test_an_interrupted_training_is_stopped(tmp_path, monkeypatch):
    def interrupt(*given, **options):
        raise KeyboardInterrupt

    stopped = []
    monkeypatch.setattr(demo, "print", interrupt, raising=False)
    monkeypatch.setattr(demo, "stop_tree", lambda *given: (stop_tree(*given), stopped.append(given[0].returncode)))
    with pytest.raises(KeyboardInterrupt):
        demo.train([sys.executable, "-c", "print('up', flush=True); import time; time.sleep(60)"], tmp_path / "log")
    assert stopped == [-signal.SIGTERM]


@pytest.mark.parametrize(
    "words, named",
    [
        (["--iterations", "0"], "--iterations 0"),
        (["--iterations", "many"], "--iterations"),
        (["--schedule", "zigzag"], "zigzag"),
        (["--speed"], "--speed"),
    ],
)
def test_a_wrong_option_is_one_line(words, named, capsys):
    with pytest.raises(SystemExit) as ended:
        demo.main(words)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1 and named in error


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert demo.main(["--out", str(tmp_path / "file")]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "--out" in error


def test_results_of_an_earlier_run_go_before_a_run_that_may_fail(tmp_path, monkeypatch, capsys):
    (tmp_path / "summary.json").write_text("{}")

    def fail():
        raise UserError("--max-bytes 1: too small")

    monkeypatch.setattr(demo, "build_corpus", fail)
    assert demo.main(["--out", str(tmp_path)]) == 1
    assert list(tmp_path.iterdir()) == [] and "too small" in capsys.readouterr().err


def test_the_picture_is_a_png(tmp_path):
    losses = demo.parse_log(LOG)
    demo.draw(tmp_path / "loss.png", losses, demo.summarize(losses, "2bw", 20, 1.0))
    assert (tmp_path / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
