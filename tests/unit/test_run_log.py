"""The one parser of Megatron's log."""

import pytest

from megatron_2bw.base import run_log

LOG = """\
[before the start of training step] datetime: 2026-01-01 00:00:00
 [2026-01-01 00:00:01.0] iteration        1/      20 | consumed samples:      16 | elapsed time per iteration (ms): \
900.5 | learning rate: 1.000000E-04 | global batch size:    16 | lm loss: 8.400000E+00 | loss scale: 1.0 |\
 number of skipped iterations:   0 | tokens/s: 512 | bubble: 12.5%/14.0% | peak memory by stage (GiB): 1.09 0.50 |
[Rank 0] (after 1 iterations) memory (MB) | allocated: 1.00 | max allocated: 10.00 |
cut off by rank 0 [2026-01-01 00:00:09.0] iteration       10/      20 | lm loss: 8.0E+00 | number of skipped \
iterations:   3 | elapsed time per iteration (ms): 100.0 |Number of parameters in billions:  0.00
 validation loss at iteration 10 on validation set | lm loss value: 6.250000E+00 | lm loss PPL: 5.180128E+02 |
 [2026-01-01 00:00:19.0] iteration       20/      20 | lm loss: 7.
 validation loss at iteration 20 on test set | lm loss value: 6.0E+00 | lm loss PPL: 4.0E+02
 validation loss at iteration 20 | lm loss value: 6.5E+00 | lm loss PPL: 4.0E+02
"""


def test_training():
    first, second, last = run_log.training(LOG)
    assert first[:2] == (1, 20) and first.fields["bubble"] == "12.5%/14.0%"
    assert (first.loss, first.milliseconds, first.skipped) == (8.4, 900.5, 0)
    assert first.fields["global batch size"] == "16"
    assert first.stage_memory == [1.09, 0.5]
    assert second.iteration == 10
    assert (second.loss, second.milliseconds, second.skipped) == (8.0, 100.0, 3)
    # cut off
    assert last.iteration == 20
    assert (last.loss, last.milliseconds, last.stage_memory) == (None, None, [])
    assert list(run_log.training(LOG.splitlines())) == [first, second, last]


def test_a_field_that_other_output_has_broken_is_missing():
    (line,) = run_log.training(
        "iteration 3/ 9 | elapsed time per iteration (ms): 1[W] x | lm loss: 7.[rank1] |"
    )
    assert (line.iteration, line.milliseconds, line.loss) == (3, None, None)


def test_validations():
    found = [
        (each.iteration, each.dataset, each.loss) for each in run_log.validations(LOG)
    ]
    assert found == [(10, "validation set", 6.25), (20, "test set", 6.0), (20, "", 6.5)]


@pytest.mark.parametrize(
    "log, line",
    [
        (
            "x\nx.py: error: --lr is missing\nfailed (exitcode: 2)\nChildFailedError: \n",
            "x.py: error: --lr is missing",
        ),
        (
            "[rank1]: Traceback:\n[rank1]: torch.OutOfMemoryError: x\nRuntimeError: y\n",
            "torch.OutOfMemoryError: x",
        ),
        (
            "  : Signal 9 (SIGKILL) received by PID 12\nlast\n",
            ": Signal 9 (SIGKILL) received by PID 12",
        ),
        ("started\nkilled\n\n", "killed"),
        ("", "no output"),
    ],
)
def test_the_cause_of_a_failure(log, line):
    assert run_log.cause(log) == line
