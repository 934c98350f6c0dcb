"""One line for the user."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest

from megatron_2bw.errors import Parser, UserError, report, usage_error


@pytest.mark.parametrize(
    "error, line",
    [
        (UserError("--lr 0:\n  above 0"), "--lr 0: above 0"),
        (FileNotFoundError(2, "No such file or directory", "a/b"), "a/b: No such file or directory"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (ChildProcessError("a worker was killed"), "a worker was killed"),
    ],
)
def test_an_error_is_one_line(error, line, capsys):
    report("prog.py", error)
    assert capsys.readouterr() == ("", f"prog.py: error: {line}\n")


@pytest.mark.parametrize(
    "fail", [lambda: usage_error("prog.py", "--x"), lambda: Parser(prog="prog.py").parse_args(["--x"])]
)
def test_a_wrong_command_line_ends_with_status_2(fail, capsys):
    with pytest.raises(SystemExit) as end:
        fail()
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("prog.py: error: ") and "--x" in line


def test_an_error_passes_between_processes():
    error = pickle.loads(pickle.dumps(UserError("why", reported_elsewhere=True)))
    assert str(error) == "why" and error.reported_elsewhere


def test_an_empty_word_is_named(capsys):
    with pytest.raises(SystemExit):
        Parser(prog="prog.py").parse_args([""])
    assert capsys.readouterr().err == "prog.py: error: unrecognized arguments: an empty word\n"


@pytest.mark.parametrize("where", ["/dev/full", "a pipe"])
def test_a_log_that_cannot_be_written_ends_no_run(where):
    """A full disk, or the reader of a pipe has ended. The status is the program's, and stderr has one line."""
    program = (
        "from megatron_2bw.errors import guard_streams\n"
        "guard_streams()\n"
        "guard_streams()\n"
        "for n in range(3): print('iteration', n, flush=True)\n"
        "import sys; sys.stdout.writelines(['x'] * 20000); sys.exit(7)"
    )
    reader, writer = os.pipe()
    os.close(reader)
    with open(where if where == "/dev/full" else writer, "w") as stdout:
        ended = subprocess.run([sys.executable, "-c", program], stdout=stdout, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 7
    assert ended.stderr.startswith("> stdout: lines are lost: ") and ended.stderr.count("\n") == 1


def test_both_streams_on_a_full_disk():
    program = (
        "from megatron_2bw.errors import guard_streams; guard_streams(); print('x', flush=True); raise SystemExit(7)"
    )
    with open("/dev/full", "w") as full:
        assert subprocess.run([sys.executable, "-c", program], stdout=full, stderr=full).returncode == 7
