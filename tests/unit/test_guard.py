"""Every name of Megatron that is touched has a row, and the installed Megatron has it
as the row says."""

import ast
from collections.abc import Iterator
from pathlib import Path

import megatron.core

from megatron_2bw.mcore import cpu
from tests import megatron_names

PACKAGE = Path(__file__).parents[2] / "megatron_2bw"


def test_the_installed_megatron_has_not_drifted():
    try:
        assert megatron_names.faults(Path(megatron.core.__path__[0]).parents[1]) == []
    finally:
        cpu.uninstall()


# Variables that hold no object of Megatron: this project's own, and torch's. (A
# parameter has both's attributes.) The arguments are checked by the parser.
OTHERS = """
    self self.working self._proxies self._stage proxies.model neighbours sender receiver write
    runtime batch torch _torchs args plain norm
""".split()
# "name": of `use_group`, a loop over two names that have rows; data and grad: of torch's
# parameters; param_groups: of its optimizers; sequence_parallel: Megatron's mark of a
# parameter.
KNOWN = {"name", "data", "grad", "param_groups", "sequence_parallel"}


def touched(path: Path) -> Iterator[tuple[str, str, int]]:
    """(object, attribute, line) of each attribute that is set, or private and read, on
    a foreign object."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            private = node.attr.startswith("_") and not node.attr.startswith("__")
            if isinstance(node.ctx, (ast.Store, ast.Del)) or private:
                yield ast.unparse(node.value), node.attr, node.lineno
        elif isinstance(node, ast.Call):
            if ast.unparse(node.func) in ("setattr", "delattr"):
                owner, name = map(ast.unparse, node.args[:2])
                yield owner, name, node.lineno


def test_every_touched_name_of_megatron_has_a_row():
    known = set(KNOWN)
    for names in megatron_names.NAMES.values():
        known.update(name for name, _ in megatron_names.parsed(names))
    unguarded = []
    for room in ("engine", "mcore", "mcore/checkpoints"):
        for path in (PACKAGE / room).glob("*.py"):
            if path.name in ("cpu.py", "rebinding.py"):
                continue  # torch's names, and its own
            for owner, name, line in touched(path):
                if owner not in OTHERS and name not in known:
                    unguarded.append(f"{path.name}:{line}: {owner}.{name}")
    assert unguarded == []
