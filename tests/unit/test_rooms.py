"""The sizes of the rooms. `make lint` checks the order in which they import each other
(pyproject.toml, import-linter).

Each number of TOKENS may only shrink: a change that needs more tokens in a room takes
them from another one.
"""

import ast
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Tokens of the *.py at most: names, operators, numbers, and strings but docstrings.
# Lines would reward packed code.
TOKENS = {
    "megatron_2bw/base": 4013,
    "megatron_2bw/schedules": 4939,
    "megatron_2bw/engine": 8027,
    "megatron_2bw/mcore": 29383,
    "megatron_2bw/run": 21563,
    "megatron_2bw/tools/planner": 32152,
    "megatron_2bw/tools": 70201,
    "megatron_2bw": 138560,
    "scripts bench": 33873,
    "tests": 140690,
}
DOCS = 2900  # lines of docs/*.md

# Tokens in a line with code, at most; and parallel assignments, lambdas and
# comprehensions in 1,000 such lines of the package.
TOKENS_A_LINE = {
    "megatron_2bw/base": 8.5,
    "megatron_2bw/schedules": 8.0,
    "megatron_2bw/engine": 8.0,
    "megatron_2bw/mcore": 8.0,
    "megatron_2bw/run": 8.0,
    "megatron_2bw/tools": 8.5,
    "scripts bench": 9.0,
    "tests": 9.1,
}
PACKED = {"parallel": 4, "lambdas": 4, "comprehensions": 30}
KINDS = (
    tokenize.NAME,
    tokenize.OP,
    tokenize.NUMBER,
    tokenize.STRING,
    tokenize.FSTRING_START,
)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def files_of(room: str) -> list[Path]:
    """The *.py of folders."""
    files = []
    for folder in room.split():
        files += (ROOT / folder).rglob("*.py")
    return files


def count(files: list[Path]) -> Counter[str]:
    """Tokens, lines with code, and packed idioms."""
    counts: Counter[str] = Counter()
    for file in files:
        source = file.read_text()
        lines = set()
        docstrings = set()
        for node in ast.walk(ast.parse(source)):
            counts[packed(node)] += 1
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                docstrings.add(node.lineno)
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            line = token.start[0]
            if token.type in KINDS:
                if token.type != tokenize.STRING or line not in docstrings:
                    counts["tokens"] += 1
                    lines.add(line)
        counts["lines"] += len(lines)
    return counts


def packed(node: ast.AST) -> str:
    if isinstance(node, ast.Lambda):
        return "lambdas"
    if isinstance(node, COMPREHENSIONS):
        return "comprehensions"
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
        if isinstance(node.targets[0], ast.Tuple):
            return "parallel"
    return ""


@pytest.mark.parametrize("room, most", TOKENS.items())
def test_no_room_is_larger_than_its_budget(room, most):
    assert count(files_of(room))["tokens"] <= most


@pytest.mark.parametrize("room, most", TOKENS_A_LINE.items())
def test_no_room_is_packed(room, most):
    counts = count(files_of(room))
    assert counts["tokens"] / counts["lines"] <= most
    if room.startswith("megatron_2bw"):
        for idiom, limit in PACKED.items():
            assert 1000 * counts[idiom] / counts["lines"] <= limit, idiom


def test_a_docstring_is_understood_without_its_neighbour():
    begins = re.compile(r'"""(Of|Those|As|Likewise|The same)\b')
    for file in files_of("megatron_2bw scripts bench tests"):
        assert not begins.search(file.read_text()), file


def test_the_docs_are_no_longer_than_their_budget():
    pages = (ROOT / "docs").glob("*.md")
    assert sum(page.read_text().count("\n") for page in pages) <= DOCS
