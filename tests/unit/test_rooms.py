"""The sizes of the rooms. `make lint` checks the order in which they import each other
(pyproject.toml, import-linter).

Each number of TOKENS may only shrink: a change that needs more tokens in a room takes
them from another one.
"""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Tokens of the *.py at most: names, operators, numbers, and strings but docstrings.
# Lines would reward packed code.
TOKENS = {
    "megatron_2bw/base": 3708,
    "megatron_2bw/schedules": 4620,
    "megatron_2bw/engine": 8084,
    "megatron_2bw/mcore": 28143,
    "megatron_2bw/run": 21822,
    "megatron_2bw/tools/planner": 43544,
    "megatron_2bw/tools": 84100,
    "megatron_2bw": 151108,
    "scripts bench": 37217,
    "tests": 153404,
}
DOCS = 2900  # lines of docs/*.md

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
