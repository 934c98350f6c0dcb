"""docs/flags.md has every flag of this project, every limit, and every variable that a
run reads or sets."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_2bw.run.flags import environment
from megatron_2bw.run.flags.project_flags import add_flags
from megatron_2bw.run.flags.unsupported import UNSUPPORTED, WITHOUT


def test_the_page_is_complete():
    page = (Path(__file__).parents[2] / "docs" / "flags.md").read_text()
    own = {
        name
        for action in add_flags(argparse.ArgumentParser(add_help=False))._actions
        for name in action.option_strings
    }
    rules = (*UNSUPPORTED, *(rule for rule, _ in WITHOUT))
    for name in (
        own
        | {rule.flag.split()[0] for rule in rules}
        | {*environment.SET, *environment.REFUSED}
    ):
        assert f"`{name}" in page, name
