"""All flags of this project, and every rule about flags, as the page docs/flags.md.

    python scripts/list_flags.py > docs/flags.md
    python scripts/list_flags.py --megatron > megatron_2bw/flags/megatron_flags.json

Invariant: nothing is written down twice: each row is read from the parser of its command, or from the tables of rules.
"""

from __future__ import annotations

import argparse
import enum
import importlib
import importlib.metadata
import itertools
import json
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_2bw import sizes  # noqa: E402
from megatron_2bw.flags import environment  # noqa: E402
from megatron_2bw.flags.checks import CHECKS  # noqa: E402
from megatron_2bw.flags.own import OWN, add_flags  # noqa: E402
from megatron_2bw.flags.rule import Rule  # noqa: E402
from megatron_2bw.flags.unsupported import UNSUPPORTED  # noqa: E402

HEAD = """# All flags

Made by `python scripts/list_flags.py > docs/flags.md` from the parsers of the commands; `tests/unit/test_flags.py`
holds it to them.

`pretrain_gpt_2bw.py` and `pretrain_bert_2bw.py` take Megatron's own flags too (`--help` lists them, about eight
hundred), but for those of the other tables. Benchmarks have theirs in their first lines (`bench/*.py`).

A flag that is typed several times keeps its last value, as in Megatron: a job script has its defaults before "$@". One
line, a warning, names the flag and all of its values.

A run looks at every rule of these tables before training, from the first to the last; the first that is broken ends it
with one line, which names the flag or the variable, and status 2.

"""

SET = """Export another value and it stays. None of these values has been measured on a GPU."""

# What is typed, and the module whose `main` parses it.
COMMANDS = {
    "`megatron-2bw-plan`": "megatron_2bw.planner.cli",
    "`megatron-2bw-plan profile`": "megatron_2bw.planner.cli",
    "`megatron-2bw-plan simulate`": "megatron_2bw.planner.cli",
    "`megatron-2bw-plan calibrate`": "megatron_2bw.planner.cli",
    "`megatron-2bw convert import`": "megatron_2bw.cli",
    "`megatron-2bw convert export`": "megatron_2bw.cli",
    "`scripts/preprocess_data.py`": "megatron_2bw.data.preprocess_cli",
    "`scripts/paper.py`": "scripts.paper",
    "`scripts/slurm/sweep.py`": "scripts.slurm.sweep",
    "`scripts/demo.py`": "megatron_2bw.demo",
    "`scripts/convergence.py`": "megatron_2bw.convergence.run",
    "`scripts/finetune_bert.py`": "scripts.finetune_bert",
    "`scripts/table2.py`": "scripts.table2",
    "`python -m megatron_2bw.data.corpus`": "megatron_2bw.data.corpus",
}

WHEN = {
    "any": "always",
    "ours": "with this project's schedules",
    "no flush": "with `2bw` and `pipedream`",
    "local": "with Megatron's local layers",
    "bert": "for a BERT",
    "line": "always",
}

# In the order in which a run looks at them.
RULES = {
    "What is not supported": UNSUPPORTED,
    "Values and combinations that do not work": (*CHECKS, *OWN),
    "Environment variables that do not work": environment.REFUSED,
}


class _Caught(Exception):
    pass


def parser_of(main: Callable, argv: list[str]) -> argparse.ArgumentParser:
    """The parser with which `main` begins when `argv` is typed."""

    def catch(self, *args, **kwargs):
        raise _Caught(self)

    typed = mock.patch.object(sys, "argv", ["command", *argv])
    with typed, mock.patch.object(argparse.ArgumentParser, "parse_known_args", catch):
        try:
            main()
        except _Caught as caught:
            return caught.args[0]
    raise AssertionError(f"{main} does not parse its arguments")


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """(what is typed, its parser), the main job first."""
    yield "`pretrain_gpt_2bw.py`, `pretrain_bert_2bw.py`", add_flags(argparse.ArgumentParser())
    for typed, module in COMMANDS.items():
        parser = parser_of(importlib.import_module(module).main, typed.strip("`").split()[1:])
        yield typed, parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from ((f"{typed[:-1]} {command}`", own) for command, own in action.choices.items())


def rows() -> Iterator[tuple[str, str, str, list[str]]]:
    """(flag with its values, default, meaning, the commands that have it): each flag once."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for typed, parser in parsers():
        for action in parser._actions:
            hidden = action.help == argparse.SUPPRESS
            if not hidden and not isinstance(action, (argparse._HelpAction, argparse._SubParsersAction)):
                found.setdefault((_flag(action), _default(action), _meaning(action)), []).append(typed)
    yield from ((*texts, commands) for texts, commands in found.items())


def _flag(action: argparse.Action) -> str:
    name = ", ".join(action.option_strings) or action.metavar or action.dest
    if action.nargs == 0 or not action.option_strings:
        return f"`{name}`"
    if action.choices:
        return f"`{name}` " + ", ".join(f"`{choice}`" for choice in action.choices)
    return f"`{name} {action.metavar or action.dest.upper()}`" + (" ..." if action.nargs in ("+", "*") else "")


def _default(action: argparse.Action) -> str:
    default = action.default
    if action.nargs == 0 or default is None or default == argparse.SUPPRESS or default in ((), []):
        return ("must be given" if action.required else "") if action.option_strings else ""
    if isinstance(default, Path) and default.is_absolute():
        default = default.relative_to(ROOT) if default.is_relative_to(ROOT) else default.name
    return f"`{','.join(map(str, default)) if isinstance(default, (tuple, list)) else default}`"


def _meaning(action: argparse.Action) -> str:
    text = (action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%")
    return _cell(" ".join(text.split()))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def texts_of(rule: Rule | sizes.Check) -> tuple[str, str, str]:
    """(flag, when, the rule) in words."""
    if not isinstance(rule, Rule):
        text = " ".join(rule.__doc__.split("\n\n")[0].split())
        return ", ".join(f"`{flag}`" for flag in dict.fromkeys(re.findall(r"--[\w-]+", text))), "always", text
    text = re.sub(r" ?\{[^}]*\}", "", rule.why).removeprefix(":").strip()
    text = text.replace(f"leave {rule.flag} out", "leave it out")
    when = WHEN.get(rule.scope, f"with `{rule.scope}`")
    return f"`{rule.flag}`" + " (in some cases)" * (rule.when is not None and rule.scope != "line"), when, text


def page() -> str:
    """The whole of docs/flags.md; neighbours among the rules that say the same share a row."""
    lines = ["| flag | default | meaning | of |", "| --- | --- | --- | --- |"]
    for flag, default, meaning, commands in rows():
        lines.append(f"| {_cell(flag)} | {_cell(default)} | {meaning} | {', '.join(commands)} |")
    for title, rules in RULES.items():
        lines += ["", f"## {title}", "", "| name | when | rule |", "| --- | --- | --- |"]
        for (when, text), same in itertools.groupby(map(texts_of, rules), key=lambda texts: texts[1:]):
            lines.append(f"| {', '.join(flag for flag, _, _ in same)} | {when} | {_cell(text)} |")
    lines += ["", "## Environment variables that a run sets", "", SET, "", "| name | value | when | meaning |"]
    lines.append("| --- | --- | --- | --- |")
    lines += [f"| `{name}` | `{texts[0]}` | {' | '.join(texts[1:])} |" for name, texts in environment.SET.items()]
    return HEAD + "\n".join(lines) + "\n"


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
    print(megatron_flags() if sys.argv[1:] == ["--megatron"] else page(), end="")
