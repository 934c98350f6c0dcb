"""Megatron's names that this project replaces, sets or reads, in the source of an
installed Megatron or of a checkout.

    python -m tests.megatron_names CHECKOUT

prints each name that is missing there or takes other parameters: what the next version
would need. By AST: nothing of the checkout is imported.
"""

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from megatron_2bw.base.command_line import table_of
from megatron_2bw.mcore import cpu

# The names that patches.py has no row for, by module:class.
NAMES = table_of(__file__)


def parsed(names: str) -> list[tuple[str, str | None]]:
    """Each name with its parameters; None if it has no parentheses."""
    matches = re.finditer(r"(\w+)(?:\(([^)]*)\))?", names)
    return [(match[1], match[2]) for match in matches]


def replaced() -> list:
    """All rows of patches.py."""
    cpu.install()
    from megatron_2bw.mcore import patches
    from megatron_2bw.mcore.runtime import MegatronRuntime

    runtime = MegatronRuntime(None, None)
    return [
        *patches.for_schedule(runtime),
        *patches.for_log(runtime),
        *patches.for_late_step(runtime),
        *patches.for_checkpoints(),
        *patches.repairs(),
        *patches.for_cpu(),
    ]


class Definition(NamedTuple):
    module: str
    node: ast.AST


@functools.cache
def _tree(module: Path) -> ast.Module:
    for file in (module.with_suffix(".py"), module / "__init__.py"):
        if file.is_file():
            return ast.parse(file.read_text())
    return ast.Module([], [])


class Source:
    """The modules under a folder."""

    def __init__(self, root: Path):
        self._root = root

    def _path(self, module: str) -> Path:
        return self._root / module.replace(".", "/")

    def find(self, module: str, name: str) -> Definition | None:
        """A name with or without dots, through imports and bases."""
        first, _, rest = name.partition(".")
        for node in ast.walk(_tree(self._path(module))):
            definition = Definition(module, node)
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == first:
                return self._member(definition, rest) if rest else definition
            if isinstance(node, ast.ImportFrom):
                imported = self._imported(module, node, name)
                if imported:
                    return imported
            elif isinstance(node, ast.Name) and node.id == name:
                if isinstance(node.ctx, ast.Store):
                    return definition
        return None

    def _imported(
        self, module: str, node: ast.ImportFrom, name: str
    ) -> Definition | None:
        first = name.partition(".")[0]
        for alias in node.names:
            if alias.name != first:
                continue
            above = []
            if node.level:
                parts = module.split(".")
                if not self._path(module).is_dir():
                    parts.pop()
                above = parts[: len(parts) + 1 - node.level]
            return self.find(".".join([*above, node.module or ""]), name)
        return None

    def classes(self, definition: Definition) -> Iterator[Definition]:
        """A class and its bases; nothing if it is none."""
        if isinstance(definition.node, ast.ClassDef):
            yield definition
        for base in getattr(definition.node, "bases", ()):
            parent = self.find(definition.module, ast.unparse(base).split(".")[-1])
            if parent:
                yield from self.classes(parent)

    def _member(self, owner: Definition, name: str) -> Definition | None:
        for module, node in self.classes(owner):
            for child in node.body:
                if getattr(child, "name", None) == name:
                    return Definition(module, child)
        return None

    def _has_field(self, module: str, name: str) -> bool:
        owner, _, attribute = name.rpartition(".")
        definition = self.find(module, owner) if owner else None
        if definition is None:
            return False
        for each in self.classes(definition):
            for node in ast.walk(each.node):
                if getattr(node, "attr", getattr(node, "id", "")) == attribute:
                    return True
        return False

    def fault(self, module: str, name: str, parameters: str | None) -> str | None:
        """What is different about a name: "is missing" or its parameters; None if
        nothing is."""
        definition = self.find(module, name)
        if definition is None:
            if parameters is None and self._has_field(module, name):
                return None
            return "is missing"
        if parameters is None or not isinstance(definition.node, ast.FunctionDef):
            return None
        args = definition.node.args
        every = [*args.posonlyargs, *args.args, args.vararg]
        every += [*args.kwonlyargs, args.kwarg]
        taken = [arg.arg for arg in every if arg is not None]
        if taken == parameters.split():
            return None
        return f"takes ({', '.join(taken)}), not ({parameters})"


def faults(root: Path) -> list[str]:
    """A line for each of Megatron's names that is not in the source under `root` as
    this project needs it."""
    rows = [(row.module, row.name, row.parameters) for row in replaced()]
    for place, names in NAMES.items():
        module, owner = place.split(":")
        for name, parameters in parsed(names):
            if owner:
                name = f"{owner}.{name}"
                if parameters is not None:
                    parameters = f"self {parameters}".strip()
            rows.append((module, name, parameters))
    source = Source(root)
    lines = []
    for module, name, parameters in rows:
        if module.startswith("megatron."):
            fault = source.fault(module, name, parameters)
            if fault:
                lines.append(f"{module}.{name} {fault}")
    return lines


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print("\n".join(faults(Path(sys.argv[1]))))
