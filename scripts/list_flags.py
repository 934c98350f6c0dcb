"""Megatron's own flags, as JSON: python scripts/list_flags.py > megatron_2bw/flags/megatron_flags.json"""

from __future__ import annotations

import argparse
import enum
import importlib.metadata
import json
import signal
from unittest import mock


def megatron_flags() -> str:
    """Megatron's own flags as JSON, a flag a line, with what argparse needs to parse them without Megatron."""
    from megatron.core.extensions import kitchen
    from megatron.training.arguments import add_megatron_arguments

    with mock.patch.object(kitchen, "HAVE_KITCHEN", True):  # it brings flags
        parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False, add_help=False))
    lines = ",\n".join(json.dumps(_as_options(action)) for action in parser._actions)
    release = importlib.metadata.version("megatron-core")
    return f'{{"megatron-core": "{release}", "flags": [\n{lines}\n]}}\n'


_ACTIONS = {
    argparse._StoreTrueAction: "store_true",
    argparse._StoreFalseAction: "store_false",
    argparse.BooleanOptionalAction: "optional",
}


def _as_options(action: argparse.Action) -> dict:
    """The arguments of `add_argument` that make an action like it. "other": a value with a parser of Megatron's."""
    default = action.default.name if type(action.default).__mro__[1] is enum.Enum else action.default
    found = {"names": action.option_strings, "dest": action.dest, "default": default}
    if type(action) in _ACTIONS:
        names = [name for name in action.option_strings if not name.startswith("--no-")]
        both = isinstance(action, argparse.BooleanOptionalAction)
        return found | {"action": _ACTIONS[type(action)]} | ({"names": names} if both else {})
    assert type(action) is argparse._StoreAction, action
    choices = [choice for choice in action.choices or () if not isinstance(choice, signal.Signals)]
    if choices:
        found["choices"] = [choice.name if isinstance(choice, enum.Enum) else choice for choice in choices]
    if action.type is not None and not isinstance(next(iter(choices), None), enum.Enum):
        found["type"] = action.type.__name__ if action.type in (int, float, str) else "other"
    return found | ({"nargs": action.nargs} if action.nargs is not None else {})


if __name__ == "__main__":
    print(megatron_flags(), end="")
