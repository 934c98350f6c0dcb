"""docs/flags.md is what scripts/list_flags.py prints, and that is what the commands take."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_2bw.flags.parse import REFUSED
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
    for refusal in REFUSED:
        assert any(row.startswith(f"| `{refusal.flag}`") and row.endswith(f"{refusal.reason} |") for row in rows)


def test_no_path_of_this_machine_is_on_it():
    assert str(Path.home()) not in PAGE.read_text() and str(PAGE.parents[2]) + "/" not in PAGE.read_text()
