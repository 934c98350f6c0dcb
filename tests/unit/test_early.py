"""The command line is checked before torch is imported, with what the whole check would answer.

`command_lines.complaint` holds the two checks to each other on all command lines of the tests.
"""

from __future__ import annotations

import argparse
import enum
import importlib.metadata
import json
import os
import subprocess
import sys

import pytest

from megatron_2bw.flags import early
from megatron_2bw.flags.parse import prepare
from scripts import list_flags
from tests.distributed.training import command


def test_the_table_of_megatrons_flags_is_up_to_date():
    assert early.TABLE.read_text() == list_flags.megatron_flags()


@pytest.mark.parametrize(("task", "schedule", "cpu"), [("gpt", "2bw", True), ("bert", "megatron", False)])
def test_the_table_has_megatrons_defaults(task, schedule, cpu):
    """Those of the parser that the whole check uses; an enumeration's member by its name."""
    from megatron.training.arguments import add_megatron_arguments

    own = argparse.Namespace(task=task, pipeline_schedule=schedule, assumed_cpu=cpu)
    whole = prepare(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)), own, sys.exit)
    expected = {
        name: value.name if isinstance(value, enum.Enum) and not isinstance(value, int) else value
        for name, value in vars(whole.parse_args([])).items()
    }
    found = vars(early.parser_of(task, schedule, cpu).parse_args([]))
    assert expected == {name: found[name] for name in expected}


@pytest.mark.parametrize("given, beta1", [([], 0.95), (["--adam-beta1", "0.9"], 0.9)])
def test_auto_brings_a_beta1_that_the_user_can_change(given, beta1):
    from megatron.training.arguments import add_megatron_arguments

    own = argparse.Namespace(task="gpt", pipeline_schedule="2bw", assumed_cpu=True, two_bw_correction="auto")
    parser = prepare(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)), own, sys.exit)
    assert parser.parse_args(given).adam_beta1 == beta1


def test_other_releases_of_megatron_are_checked_later(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "0.19.9")
    assert early.mistakes(["--no-such-flag"], "gpt", 1) == []


@pytest.mark.parametrize(
    ("argv", "drivers", "expected"),
    [
        ([], (), (True,)),
        ([], ("/dev/dxg",), (True, False)),
        (["--device", "cuda"], (), ()),
        (["--device", "cuda"], ("/dev/nvidiactl",), (False,)),
        (["--device", "cuda", "--device=cpu"], (), (True,)),
        (["--device=cpu", "--device", "cuda"], ("/dev/kfd",), (False,)),
    ],
)
def test_where_a_run_computes(argv, drivers, expected, monkeypatch):
    """Nothing is refused for a GPU that only torch can find."""
    monkeypatch.setattr(os.path, "exists", lambda path: path in drivers)
    assert early.assumptions(argv) == expected


WRONG = [
    (["--num-layer", "4"], ["unrecognized arguments: --num-layer 4 (did you mean --num-layers?)"]),
    (
        ["--lr", "fast", "--hiden-size", "8", "--micro-batch-size=x"],
        [
            "argument --lr: invalid float value: 'fast'",
            "argument --micro-batch-size: invalid int value: 'x'",
            "unrecognized arguments: --hiden-size 8 (did you mean --hidden-size?)",
        ],
    ),
    (["stray"], ["unrecognized arguments: stray"]),
    (["--pipeline-schedule", "3bw"], ["argument --pipeline-schedule: invalid choice: '3bw'"]),
]


@pytest.mark.parametrize(("typed", "expected"), WRONG, ids=lambda words: " ".join(words)[:40])
def test_several_mistakes_are_listed_together(typed, expected):
    found = early.mistakes([*command(1, 1), *typed], "gpt", 1)
    assert len(found) == len(expected)
    assert all(part in line for line, part in zip(sorted(found), sorted(expected)))


def test_a_wrong_flag_is_answered_without_torch(tmp_path):
    """By the first rank, as the last lines; torchrun quotes them in the report with which it ends."""
    code = (
        "import sys; sys.argv = ['pretrain_gpt_2bw.py', '--lrr', '3', '--num-layers', 'x']\n"
        "from megatron_2bw.start.launch import launch\n"
        "try:\n    launch('megatron_2bw.tasks.gpt')\n"
        "finally:\n    assert not {'torch', 'megatron'} & {*sys.modules}, 'imported'"
    )
    report = tmp_path / "error.json"
    variables = os.environ | {"TORCHELASTIC_ERROR_FILE": str(report)}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables)
    assert ran.returncode == 2 and ran.stdout == ""
    assert ran.stderr.splitlines() == [
        "pretrain_gpt_2bw.py: error: argument --num-layers: invalid int value: 'x'",
        "pretrain_gpt_2bw.py: error: unrecognized arguments: --lrr 3 (did you mean --lr?)",
    ]
    assert json.loads(report.read_text())["message"]["message"] == ran.stderr.rstrip()
