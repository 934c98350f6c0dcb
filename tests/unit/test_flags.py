"""docs/flags.md is what scripts/list_flags.py prints, and that is what the commands take."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from megatron_2bw.flags.unsupported import UNSUPPORTED
from scripts import list_flags

PAGE = Path(__file__).parents[2] / "docs" / "flags.md"


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == list_flags.page(), "run: python scripts/list_flags.py > docs/flags.md"


def test_every_flag_of_every_command_is_on_it():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    for typed, parser in list_flags.parsers():
        for name in parser._option_string_actions:
            if name in ("-h", "--help") or parser._option_string_actions[name].help == "==SUPPRESS==":
                continue
            assert any(re.search(rf"{name}\b", row.split(" | ")[0]) and typed in row for row in rows), (typed, name)


def test_every_rule_is_on_it():
    """With its flag; a rule without code of its own with its words too."""
    rows = PAGE.read_text().splitlines()
    for rule in itertools.chain(*list_flags.RULES.values()):
        flags, when, text = list_flags.texts_of(rule)
        assert text and any(flags in row and row.endswith(f" | {when} | {text} |") for row in rows), rule
    assert {rule.flag for rule in list_flags.RULES["What is not supported"]} == {rule.flag for rule in UNSUPPORTED}


def test_no_path_of_this_machine_is_on_it():
    assert str(Path.home()) not in PAGE.read_text() and str(PAGE.parents[2]) + "/" not in PAGE.read_text()
