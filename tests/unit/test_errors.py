"""One line for the user."""

import pickle

import pytest

from megatron_2bw.base.errors import UserError, report_error


@pytest.mark.parametrize(
    "error, line",
    [
        (UserError("--lr 0:\n  above 0"), "--lr 0: above 0"),
        (
            FileNotFoundError(2, "No such file or directory", "a/b"),
            "a/b: No such file or directory",
        ),
        (OSError(28, "No space left on device"), "No space left on device"),
        (ChildProcessError("a worker was killed"), "a worker was killed"),
    ],
)
def test_an_error_is_one_line(error, line, capsys):
    report_error("prog.py", error)
    assert capsys.readouterr() == ("", f"prog.py: error: {line}\n")


def test_an_error_passes_between_processes():
    error = pickle.loads(pickle.dumps(UserError("why", reported_elsewhere=True)))
    assert str(error) == "why" and error.reported_elsewhere
