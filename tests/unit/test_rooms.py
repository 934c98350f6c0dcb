"""Fences between the rooms of the package: who may import whom, read from the source
with `ast`; and their sizes.

A line of KNOWN is a violation that stands today. The list, and each number of TOKENS,
may only shrink: a change that needs more tokens in a room takes them from another one.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "megatron_2bw"

# Room -> what it may import, apart from itself and the standard library.
GROUND = {f"megatron_2bw.{name}" for name in ("errors", "files", "schedules")}
PURE = {
    "schedules": set(),
    "core": {"torch", "megatron_2bw.schedules"},
    "models": {
        "annotated_types",
        "argparse",
        "pydantic",
        "transformers",
        "yaml",
        *GROUND,
    },
}
HEAVY = {"megatron", "torch", "wandb", "datasets", "transformers"}
AT_IMPORT = {"models": HEAVY, "planner": HEAVY}  # not before they are used

# The planner's drawers in order: each may import itself and those before it. Modules
# outside of them may import all.
DRAWERS = ("cost", "find", "tell", "measure")

KNOWN: set[str] = set()

# Tokens of the *.py at most: names, operators, numbers, and strings but docstrings.
# Lines would reward packed code.
TOKENS = {
    "megatron_2bw/schedules megatron_2bw/core": 12257,
    "megatron_2bw/mcore": 21306,
    "megatron_2bw/checkpoints": 5329,
    "megatron_2bw/flags": 9199,
    "megatron_2bw/start megatron_2bw/tasks": 12128,
    "megatron_2bw/models": 10916,
    "megatron_2bw/planner": 33943,
    "megatron_2bw/timelines": 8411,
    "megatron_2bw/data": 9116,
    "megatron_2bw/convert": 9716,
    "megatron_2bw/convergence": 6645,
    "megatron_2bw/slurm": 2808,
    "megatron_2bw/gpu_check": 3921,
    "megatron_2bw/*.py": 7444,
    "megatron_2bw": 153139,
    "scripts bench": 38724,
    "tests": 162863,
}
DOCS = 2900  # lines of docs/*.md


def modules() -> dict[str, Path]:
    paths = (ROOT / PACKAGE).rglob("*.py")
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path
        for path in paths
    }


def imports(path: Path, at_import: bool = False) -> Iterator[str]:
    """The dotted names that a file imports; at_import: outside of functions only."""

    def walk(node: ast.AST) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            if at_import and isinstance(
                child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
            ):
                continue
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
            yield child
            yield from walk(child)

    for node in walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def violations() -> Iterator[str]:
    for module, path in modules().items():
        allowed = PURE.get(room(module))
        for name in imports(path):
            root = name.split(".")[0]
            if allowed is None or root in allowed:
                continue
            inside = root == PACKAGE and (
                room(name) == room(module) or f"{PACKAGE}.{room(name)}" in allowed
            )
            if root == "argparse" or not (inside or root in sys.stdlib_module_names):
                yield f"{module} imports {name}"
        for name in imports(path, at_import=True):
            if name.split(".")[0] in AT_IMPORT.get(room(module), ()):
                yield f"{module} imports {name}"


def test_no_room_imports_what_it_must_not():
    assert set(violations()) == KNOWN, (
        "a new violation, or one that is mended and still listed"
    )


def test_the_package_imports_neither_tests_nor_scripts():
    outside = {"tests", "scripts", "bench"}
    found = {
        (module, name) for module, path in modules().items() for name in imports(path)
    }
    assert not {
        (module, name) for module, name in found if name.split(".")[0] in outside
    }


def test_the_planners_drawers_import_in_order():
    planner = f"{PACKAGE}.planner."
    for module, path in modules().items():
        drawer = module.removeprefix(planner).split(".")[0]
        if module.startswith(planner) and drawer in DRAWERS:
            used = {
                name.split(".")[2] for name in imports(path) if name.startswith(planner)
            }
            assert used <= {*DRAWERS[: DRAWERS.index(drawer) + 1]}, (
                f"{module} imports a later drawer"
            )


def test_no_import_cycle():
    """Not even by imports inside of functions."""
    known = modules()
    edges = {}
    for module, path in known.items():
        names = set(imports(path))
        edges[module] = {
            name if name in known else name.rpartition(".")[0] for name in names
        } & known.keys() - {module}
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join((*way[way.index(module) :], module))
        if module not in done:
            for other in edges[module]:
                visit(other, (*way, module))
            done.add(module)

    for module in edges:
        visit(module, ())


KINDS = (
    tokenize.NAME,
    tokenize.OP,
    tokenize.NUMBER,
    tokenize.STRING,
    tokenize.FSTRING_START,
)


def files_of(room: str) -> set[Path]:
    """The *.py of folders, or the files of a pattern."""
    found: set[Path] = set()
    for name in room.split():
        if "*" in name:
            found.update(ROOT.glob(name))
        else:
            found.update((ROOT / name).rglob("*.py"))
    return found


def tokens(file: Path) -> int:
    source = file.read_text()
    docstrings = {
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }
    count = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.STRING and token.start[0] in docstrings:
            continue
        count += token.type in KINDS
    return count


def test_no_room_is_larger_than_its_budget():
    sizes = {room: sum(map(tokens, files_of(room))) for room in TOKENS}
    assert {
        room: (size, TOKENS[room])
        for room, size in sizes.items()
        if size > TOKENS[room]
    } == {}, "tokens, at most"


def test_the_docs_are_no_longer_than_their_budget():
    assert (
        sum(page.read_text().count("\n") for page in (ROOT / "docs").glob("*.md"))
        <= DOCS
    )
