"""What a run prints: all of it to a file, a few kinds of lines on the screen."""

import os
import subprocess
import sys

import pytest

from megatron_2bw.run.start import screen

ALLOWED = """
 [2026-11-23 04:21:34.234188] iteration        1/      12 | consumed samples:            4 |
 validation loss at iteration 6 | lm loss value: 4.756606E+00 |
[2026-11-23 04:21:34.547714] saving checkpoint at iteration       6 to out in torch_dist format
  [2026-11-23 04:21:34.663440] successfully saved checkpoint from iteration       6 to out
[exiting program at iteration 3] datetime: 2026-11-23 04:21:34.057739
WARNING: could not find the metadata file out/latest_checkpointed_iteration.txt
> 2bw: starts from iteration 12 with both weight versions of the checkpoint
> --pipeline-trace: wrote out/trace.json
pretrain_gpt_2bw.py: error: --lr 0: above 0
pretrain_gpt_2bw.py: rank 1 ends: another rank has ended
[rank0]: ValueError: why
WARNING:megatron.core.models:GPTModel IS DEPRECATED
"""
HIDDEN = """
> initialized tensor model parallel with size 1
 > number of parameters on (tensor, pipeline) model parallel rank (0, 1): 16864
  train_iters ..................................... 12
a.py:3: FutureWarning: of the next torch
Traceback (most recent call last):
    raise ValueError("why")
"""


def test_which_lines_the_screen_shows():
    shown = filter(screen.SHOWN.match, (ALLOWED + HIDDEN).splitlines())
    assert [*shown] == ALLOWED.split("\n")[1:-1]


PROGRAM = """
import os, sys, warnings
from megatron_2bw.run.start import screen
screen.begin('--verbose' in sys.argv)
print("> initialized tensor model parallel with size 1")
print(" iteration 1/ 2 ", end="")
print("| lm loss: 4.5E+00 |", flush=True)
os.system("echo of a library")
warnings.warn("new")
screen.move_to(sys.argv[-1])
raise ValueError("why")
"""


def ran(*argv: object, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, argv)], text=True, **options
    )


def test_all_goes_to_the_file_and_a_crash_shows_its_last_line(tmp_path):
    ended = ran(tmp_path, capture_output=True)
    assert ended.stdout == " iteration 1/ 2 | lm loss: 4.5E+00 |\n"
    assert ended.stderr == "ValueError: why\n"
    text = (tmp_path / "output" / "rank-0.txt").read_text()
    for word in (
        "> initialized",
        "lm loss",
        "of a library",
        "UserWarning",
        "Traceback",
    ):
        assert word in text


def test_verbose_shows_all_and_without_a_folder_the_file_is_temporary(tmp_path):
    (tmp_path / "file").touch()
    variables = os.environ | {"TMPDIR": str(tmp_path)}
    ended = ran("--verbose", tmp_path / "file", capture_output=True, env=variables)
    assert "> initialized" in ended.stdout
    assert "UserWarning: new" in ended.stderr and "Traceback" in ended.stderr
    (path,) = tmp_path.glob("megatron_2bw_*rank-0.txt")
    assert "UserWarning: new" in path.read_text()


STEP = """ [2026-11-23 04:21:34.234188] iteration      120/    5000 | consumed samples:          480 | elapsed time per
 iteration (ms): 152.3 | learning rate: 0.000000E+00 | global batch size:     4 | lm loss: 3.214500E+00 | loss scale:
 1.0 | grad norm: 0.512 | number of skipped iterations:   1 | number of nan iterations:   0 | tokens/s: 26947 | tokens:
 1966080 | ETA: 1:02:03 | MFU: 33.1% | bubble: 20.0%/30.0% | peak memory by stage (GiB): 12.00 4.00 |"""


def test_a_terminal_shows_the_loss_first(tmp_path):
    line = screen.for_terminal(STEP.replace("\n", ""))
    assert line.startswith(
        " iteration  120/5000 | loss 3.215 | ms 152.3 | lr 0 | grad norm 0.512 | skipped 1 |"
    )
    assert line.endswith(" | ETA 1:02:03 | MFU 33.1% | bubble 20.0%/30.0% | GiB 12.00")
    other = "saving checkpoint at iteration 6 to out"
    assert screen.for_terminal(other) == other
    reader, writer = os.openpty()
    ran(tmp_path, stdout=writer, stderr=subprocess.DEVNULL)
    assert os.read(reader, 1000).decode().strip() == "iteration 1/2 | loss 4.500"


@pytest.mark.parametrize("where", ["/dev/full", "a pipe"])
def test_a_screen_that_cannot_be_written_ends_no_run(where, tmp_path):
    """A full disk, or the reader of a pipe has ended."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(where if where == "/dev/full" else writer, "w") as stdout:
        ended = ran(tmp_path, stdout=stdout, stderr=subprocess.PIPE)
    assert ended.stderr == "ValueError: why\n"
