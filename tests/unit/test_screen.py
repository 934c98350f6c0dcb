"""What a run prints: known lines of Megatron and torch are not printed, all others are.

screen_lines.tsv holds lines that runs have printed: what becomes of the line, its source, its text.
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from megatron_2bw.start import screen

LINES = [line.split("\t") for line in (Path(__file__).parent / "screen_lines.tsv").read_text().splitlines()]


@pytest.fixture(autouse=True)
def nothing_matched_yet(monkeypatch):
    monkeypatch.setattr(screen, "_matched", Counter())


@pytest.mark.parametrize("row", screen.KNOWN, ids=lambda row: row.pattern)
def test_each_row_matches_a_line_that_was_printed(row):
    assert any(source == row.source and re.match(row.pattern, text) for _, source, text in LINES) and row.reason


@pytest.mark.parametrize("becomes, source, text", LINES, ids=lambda word: word[:40])
def test_known_lines_are_hidden_and_others_are_not(becomes, source, text):
    first, second = screen.hides(source, text), screen.hides(source, text)
    once = any(re.match(row.pattern, text) for row in screen.KNOWN if row.times)
    assert (first, second) == (becomes == "hidden" and not once, becomes == "hidden")


def test_a_row_hides_in_its_own_source_only():
    _, source, text = next(line for line in LINES if line[1] == screen.WARNING)
    assert screen.hides(source, text)
    assert not screen.hides(screen.PRINT, text) and not screen.hides("megatron.core", text)


PROGRAM = """
import logging, sys, warnings
from megatron_2bw.start import screen
screen.quiet()
print("> compiling dataset index builder ...", flush=True)
print(" iteration 1/ 2 | lm loss: 4.5E+00 | loss scale: 1.0 |", flush=True)
print()
print("a", end="", flush=True)
print("b")
print("-" * 9 + "\\n" + "two", "lines")
warnings.warn("Apex is not installed. Falling back to Torch Norm")
warnings.warn("of the user's own settings")
logging.getLogger("megatron.core.models.gpt.gpt_model").warning("GPTModel IS DEPRECATED. And so on")
logging.basicConfig(level=logging.INFO)  # as Megatron
logging.getLogger("megatron.core.models.gpt.gpt_model").info("details")
logging.getLogger("megatron.core.models.gpt.gpt_model").warning("another %s", "message")
print(screen.hidden_lines())
print("cut off", end="")
"""
PRINTED = """\
 iteration 1/ 2 | lm loss: {}4.5E+00{} | loss scale: 1.0 |
ab
two lines
> known lines of Megatron and torch that this rank did not print: 5 (--verbose prints all)
cut off"""


def test_prints_warnings_and_loggers():
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert ended.stdout == PRINTED.format("", "")
    assert re.fullmatch(
        r".*UserWarning: of the user's own settings\n(.*\n)?WARNING:[a-z_.]*:another message\n", ended.stderr
    )


@pytest.mark.parametrize("no_color, marks", [("", ("\033[1m", "\033[0m")), ("1", ("", ""))])
def test_the_loss_is_bold_on_a_terminal_without_no_color(no_color, marks):
    reader, writer = pty.openpty()
    environment = os.environ | {"NO_COLOR": no_color}
    subprocess.run(
        [sys.executable, "-c", PROGRAM], stdout=writer, stderr=subprocess.DEVNULL, env=environment, check=True
    )
    os.close(writer)
    assert os.read(reader, 10_000).decode().replace("\r\n", "\n") == PRINTED.format(*marks)


def arguments(**changes) -> argparse.Namespace:
    folders = dict(save=None, tensorboard_dir=None, two_bw_trace=None)
    return argparse.Namespace(**folders | changes, lr=0.1, seed=7)


@pytest.mark.parametrize("flag", ["save", "tensorboard_dir", "two_bw_trace"])
def test_the_arguments_go_to_the_first_folder_of_the_run(flag, tmp_path):
    folder = tmp_path / "a folder" / "of its own"
    later = dict(save=None) if flag == "save" else dict(two_bw_trace=tmp_path)
    line = screen.write_arguments(arguments(**later | {flag: str(folder)}))
    path = folder / "arguments.txt"
    assert str(path) in line and "--verbose" in line and list(folder.iterdir()) == [path]
    lines = path.read_text().splitlines()
    assert len(lines) == 5 and lines == sorted(lines)
    assert f"  lr {'.' * 46} 0.1" in lines, "as Megatron prints it"


def test_arguments_without_a_place(tmp_path):
    assert "--verbose prints them" in screen.write_arguments(arguments())
    (tmp_path / "file").touch()
    line = screen.write_arguments(arguments(save=str(tmp_path / "file")))
    assert "not written" in line and str(tmp_path / "file") in line and "--verbose" in line
