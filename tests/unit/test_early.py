"""The command line is checked before torch is imported, with what the whole check would
answer.

`command_lines.complaint` holds the two checks to each other on all command lines of the
tests.
"""

import argparse
import enum
import json
import os
import subprocess
import sys
import time

import pytest

from megatron_2bw.run.flags import quick_check
from megatron_2bw.run.flags.parse import prepare
from tests.distributed.training import command
from tests.unit.command_lines import stop

pytestmark = pytest.mark.usefixtures("on_the_cpu")


def megatrons() -> argparse.ArgumentParser:
    from megatron.training.arguments import add_megatron_arguments

    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


@pytest.fixture
def own_table(monkeypatch, tmp_path):
    """The table of Megatron's flags, in a cache of the test's own."""
    monkeypatch.setattr(quick_check, "table", quick_check.table.__wrapped__)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    quick_check.remember(megatrons())


@pytest.mark.parametrize("task, schedule", [("gpt", "2bw"), ("bert", "megatron")])
def test_the_table_has_megatrons_defaults(task, schedule):
    """The whole check uses these defaults; the table has an enumeration's member by its
    name."""
    early = argparse.Namespace(task=task, pipeline_schedule=schedule)
    expected = prepare(megatrons(), early, stop).parse_args([])
    found = quick_check.parser_of(task, schedule).parse_args([])
    for name, value in vars(expected).items():
        if isinstance(value, enum.Enum) and not isinstance(value, int):
            value = value.name
        assert getattr(found, name) == value, name


def test_the_first_use_writes_the_table(tmp_path, monkeypatch):
    """A folder that cannot be written to is no error; a package that was installed
    since makes the table old."""
    monkeypatch.setattr(quick_check, "table", quick_check.table.__wrapped__)
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")
    quick_check.remember(megatrons())
    assert quick_check.mistake(["--no-such-flag"], "gpt", 1) is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    quick_check.remember(megatrons())
    (file,) = tmp_path.glob("megatron_2bw/*.json")
    assert quick_check.table() == json.loads(file.read_text())
    os.utime(file, (time.time() - 1e9,) * 2)
    assert quick_check.table() == []


def test_a_hint_is_a_flag_that_helps():
    """An opposite (--apply-query-key-layer-scaling) and a refused flag (--sft) do not
    help."""
    line = quick_check.mistake([*command(1, 1), "--no-masked-softmax"], "gpt", 1)
    assert line.endswith(" (did you mean --no-masked-softmax-fusion?)")
    for typed in ("--no-query-key-layer-scaling", "--sftt"):
        line = quick_check.mistake([*command(1, 1), typed], "gpt", 1)
        assert line == f"unrecognized arguments: {typed}"


def test_a_wrong_flag_is_answered_without_torch(own_table, tmp_path, monkeypatch):
    """The line is the last one; torchrun quotes it in the report with which it ends."""
    code = (
        "import sys; sys.argv = ['pretrain_gpt_2bw.py', '--lrr', '3']\n"
        "from megatron_2bw.run.start.launch import launch\n"
        "try:\n    launch('megatron_2bw.run.tasks.gpt')\n"
        "finally:\n    assert not {'torch', 'megatron'} & {*sys.modules}, 'imported'"
    )
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 2 and ran.stdout == ""
    line = "unrecognized arguments: --lrr 3 (did you mean --lr?)"
    assert ran.stderr == f"pretrain_gpt_2bw.py: error: {line}\n"
    quoted = json.loads((tmp_path / "error.json").read_text())
    assert quoted["message"]["message"] == ran.stderr.rstrip()
