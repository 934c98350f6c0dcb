"""The demo: its log interval, and a run that fails."""

import pytest

from megatron_2bw import demo
from megatron_2bw.start.torchrun import log_interval


@pytest.mark.parametrize("iterations, interval", [(250, 10), (7, 7), (11, 1), (36, 9)])
def test_the_last_iteration_is_logged(iterations, interval):
    assert log_interval(iterations) == interval


def test_results_of_an_earlier_run_go_before_a_run_that_may_fail(tmp_path, monkeypatch):
    (tmp_path / "loss.png").touch()
    monkeypatch.setattr(demo, "build_corpus", lambda: demo.argparse.Namespace(flags=list))
    monkeypatch.setattr(demo, "run_ranks", lambda prog, command: 3)
    assert demo.main(["--out", str(tmp_path)]) == 3
    assert list(tmp_path.iterdir()) == []
