"""Flags that stand in YAML files, one for a module.

Invariant: a file has options of argparse's `add_argument`, with types by name.
"""

from argparse import SUPPRESS
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_2bw.base.errors import Parser, whole_number
from megatron_2bw.base.files import read_yaml

TYPES = {
    "path": Path,
    "number": whole_number(0),
    "number above 0": whole_number(1),
    "port": whole_number(1, 65535),
    "float": float,
}
Types = Mapping[str, Callable[[str], Any]]


def table_of(module: str) -> dict[str, Any]:
    """The content of the YAML file of a module's `__file__`."""
    return read_yaml(Path(module).with_suffix(".yaml"))


def parser_of(prog: str, module: str, types: Types = TYPES) -> Parser:
    """The parser of the `flags` of a module; of each table in `one_of` exactly one flag
    is given."""
    content = table_of(module)
    parser = Parser(
        prog,
        description=content["description"],
        epilog=content.get("epilog"),
        allow_abbrev=False,
    )
    add_options(parser, content["flags"], types)
    for flags in content.get("one_of", ()):
        add_options(parser.add_mutually_exclusive_group(required=True), flags, types)
    return parser


def add_options(group: Any, flags: dict[str, dict], types: Types = TYPES) -> None:
    """Add flags, each with its options, to a parser or a group of it. A flag may have
    two names; --help shows those with a help."""
    for names, options in flags.items():
        chosen = {"help": SUPPRESS, **options}
        if "type" in options:
            chosen["type"] = types[options["type"]]
        group.add_argument(*names.split(), **chosen)
