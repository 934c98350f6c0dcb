"""docs/flags.md has every flag of this project, every limit, and every variable that a
run reads or sets."""

import argparse
from pathlib import Path

from megatron_2bw.run.flags import environment
from megatron_2bw.run.flags.project_flags import add_flags
from megatron_2bw.run.flags.unsupported import UNSUPPORTED, WITHOUT


def test_the_page_is_complete():
    page = (Path(__file__).parents[2] / "docs" / "flags.md").read_text()
    own = add_flags(argparse.ArgumentParser(add_help=False))._option_string_actions
    names = [*own, *environment.SET, *environment.REFUSED]
    for rule in (*UNSUPPORTED, *dict(WITHOUT)):
        names.append(rule.flag.split()[0])
    for name in names:
        assert f"`{name}" in page, name
