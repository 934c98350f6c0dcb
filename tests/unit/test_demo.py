"""The demo: what it reads from Megatron's log, what it writes, and that it leaves nothing running."""

import signal
import sys

import pytest

from megatron_2bw import demo
from megatron_2bw.errors import UserError
from megatron_2bw.processes import stop_tree


def line(end: int, loss: str = " lm loss: 5.0E+00 |") -> str:
    return f" [time] iteration {end:8d}/      20 | consumed samples: 1 |{loss} loss scale: 1.0 |\n"


@pytest.mark.parametrize(
    ("log", "middles"),
    [
        (line(1) + line(10) + line(20), [1, 5.5, 15.5]),
        (line(1) + line(2) + line(3), [1, 1.5, 3]),  # the second line is the mean of two
        (line(1) + line(10, "") + line(20), [1, 15.5]),
    ],
)
def test_losses_stand_in_the_middle_of_the_iterations_that_they_are_the_mean_of(log, middles):
    assert [place for place, _ in demo.losses(log)] == middles


@pytest.mark.parametrize("iterations, interval", [(250, 10), (7, 7), (11, 1), (36, 9)])
def test_the_last_iteration_is_logged(iterations, interval):
    assert demo.log_interval(iterations) == interval


def test_no_summary_without_losses():
    with pytest.raises(UserError):
        demo.summarize(line(1), "2bw", 20, 1.0)  # no validation


def test_the_time_of_an_iteration_leaves_the_start_out():
    times = {1: 9000, 10: 500, 20: 100, 30: 140, 40: 700}
    text = "".join(line(end, f" elapsed time per iteration (ms): {ms:.1f} |") for end, ms in times.items())
    assert demo.mean_time(text, 30) == 120


def test_a_failed_training_leaves_its_log_and_gives_one_line(tmp_path, capsys):
    command = [sys.executable, "-c", "import sys; print('began'); sys.exit('ValueError: too deep')"]
    with pytest.raises(UserError, match="exit code 1: ValueError: too deep"):
        demo.train(command, tmp_path / "train.log")
    assert "began" in capsys.readouterr().out
    assert sorted((tmp_path / "train.log").read_text().split("\n")) == ["", "ValueError: too deep", "began"]


def test_an_interrupted_training_is_stopped(tmp_path, monkeypatch):
    def interrupt(*given, file=None, **options):
        if file is None:
            raise KeyboardInterrupt

    stopped = []
    monkeypatch.setattr(demo, "print", interrupt, raising=False)
    monkeypatch.setattr(demo, "stop_tree", lambda *given: (stop_tree(*given), stopped.append(given[0].returncode)))
    with pytest.raises(KeyboardInterrupt):
        demo.train([sys.executable, "-c", "print('up', flush=True); import time; time.sleep(60)"], tmp_path / "log")
    assert stopped == [-signal.SIGTERM]


def test_a_wrong_option_is_one_line(capsys):
    with pytest.raises(SystemExit) as ended:
        demo.main(["--iterations", "0"])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1 and "--iterations 0" in error


def test_results_of_an_earlier_run_go_before_a_run_that_may_fail(tmp_path, monkeypatch, capsys):
    (tmp_path / "summary.json").write_text("{}")

    def fail():
        raise UserError("--max-bytes 1: too small")

    monkeypatch.setattr(demo, "build_corpus", fail)
    assert demo.main(["--out", str(tmp_path)]) == 1
    assert list(tmp_path.iterdir()) == [] and "too small" in capsys.readouterr().err
