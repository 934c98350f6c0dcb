"""The intervals of a plan's first run."""

import pytest

from megatron_2bw.tools.planner.tell import training


@pytest.mark.parametrize(
    "seconds, save, evaluate, log",
    [
        (0, 1000, 1000, 10),
        (1e-6, 10000, 10000, 10),
        (1, 2000, 2000, 10),
        (37, 50, 200, 2),
        (1800, 1, 200, 1),
    ],
)
def test_intervals_follow_the_time_of_an_iteration(seconds, save, evaluate, log):
    flags = " ".join(training.flags(seconds))
    assert training.save_interval(seconds) == save
    assert f"--eval-interval {evaluate} " in flags and f"--log-interval {log} " in flags
