"""The command line, checked before torch and Megatron are imported: in half a second,
where they take several.

The first run writes a table of Megatron's flags to the user's cache folder, by
Megatron's version; the next ones read it. Without a table, or with one older than a
package that was installed since, only the whole check runs (`parse.py`).

Invariant: a command line that the whole check accepts is not refused here.
"""

import argparse
import contextlib
import enum
import functools
import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron_2bw.base.errors import UserError
from megatron_2bw.base.files import write_json
from megatron_2bw.run.flags import project_flags
from megatron_2bw.run.flags.parse import QUICK, prepare

# other: what a function of Megatron's parses
KINDS = {"int": int, "float": float, "str": str, "other": str}


def mistake(argv: Sequence[str], task: str, world: int) -> str | None:
    """A line about a mistake in the command line of `task` ("gpt", "bert") for `world`
    processes; or None."""
    if not table() or {"-h", "--help"} & {*argv}:
        return None
    try:
        args = parser_of(task, "megatron").parse_args(argv)
        if args.pipeline_schedule != "megatron":
            # with the defaults of all other schedules
            args = parser_of(task, "2bw").parse_args(argv)
        project_flags.translate(args)
    except UserError as error:
        return str(error)
    if args.use_checkpoint_args:
        return None  # a checkpoint brings other arguments
    args.world_size = world
    for rule in QUICK:
        with contextlib.suppress(Exception):  # of a size that Megatron refuses
            if line := rule(args):
                return line
    return None


def refuse(line: str) -> NoReturn:
    """Raise UserError: the `stop` of a caller that continues."""
    raise UserError(line)


@functools.cache
def parser_of(task: str, schedule: str) -> argparse.ArgumentParser:
    """Megatron's parser as the table describes it, with this project's flags. It raises
    UserError."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.register("action", "optional", argparse.BooleanOptionalAction)
    for names, options in table():
        if "type" in options:
            options = options | {"type": KINDS[options["type"]]}
        parser.add_argument(*names, **options)
    early = argparse.Namespace(task=task, pipeline_schedule=schedule)
    return prepare(parser, early, refuse)


@functools.cache
def table() -> list[tuple[list[str], dict[str, Any]]]:
    """The names of each of Megatron's flags, and its options for `add_argument`; [] if
    no run has written them."""
    packages = importlib.util.find_spec("megatron").submodule_search_locations
    installed = max(Path(folder).parent.stat().st_mtime for folder in packages)
    with contextlib.suppress(OSError, ValueError):
        if _file().stat().st_mtime >= installed:
            return json.loads(_file().read_text())
    return []


def remember(parser: argparse.ArgumentParser) -> None:
    """Write the table of Megatron's own parser if there is none. A folder that cannot
    be written to is no error."""
    if table():
        return
    rows = [_row(action) for action in parser._actions if action.dest != "help"]
    with contextlib.suppress(OSError, TypeError):
        _file().parent.mkdir(parents=True, exist_ok=True)
        write_json(_file(), rows, indent=None)


def _file() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    version = importlib.metadata.version("megatron-core")
    return Path(cache, "megatron_2bw", f"flags-{version}.json")


def _row(action: argparse.Action) -> tuple[list[str], dict[str, Any]]:
    names = list(action.option_strings)
    options = {"dest": action.dest, "default": _plain(action.default)}
    if isinstance(action, argparse.BooleanOptionalAction):
        options["action"] = "optional"
        names = [name for name in names if not name.startswith("--no-")]
    elif action.nargs == 0:
        options["action"] = "store_true" if action.const else "store_false"
    else:
        options["nargs"] = action.nargs
        kind = getattr(action.type, "__name__", "str")
        choices = list(action.choices or ())
        names_of_choices = [_plain(choice) for choice in choices]
        if kind not in KINDS:
            # an enumeration, by the names of its members, or a function
            kind = "other" if names_of_choices == choices else "str"
        options["type"] = kind
        if choices and kind != "other":
            options["choices"] = names_of_choices
    return names, options


def _plain(value: Any) -> Any:
    """The name of an enumeration's member."""
    is_name = isinstance(value, enum.Enum) and not isinstance(value, int)
    return value.name if is_name else value
