"""The pages of the repository: what they link to and name exists, and they have the
size that they should have."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
WIDTH = 120  # of prose; tables, links and commands may be longer
# by the commands of the pages
MADE = re.compile(r"(out|build|logs|checkpoints|data|my_\w+)/|\.(venv|venv/.*)$")
TOP = "|".join(
    path.name
    for path in ROOT.iterdir()
    if path.is_dir() and not path.name.startswith(".")
)


def prose(text: str) -> str:
    """The page without blocks of commands."""
    return re.sub(r"^( *)```.*?^ *```$|^    [^\n]*$", "", text, flags=re.S | re.M)


@cache
def anchors(page: Path) -> set[str]:
    """The fragments under which GitHub shows the page's headings."""
    titles = re.findall(r"^#+ (.+)$", prose(page.read_text()), re.M)
    return {
        re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", title).lower()).replace(
            " ", "-"
        )
        for title in titles
    }


def links(page: Path) -> list[str]:
    """Relative targets of the page's links and pictures."""
    text = page.read_text()
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(text)) + re.findall(
        r'(?:src|href)="([^"]+)"', text
    )
    return [target for target in targets if not re.match(r"\w+:", target)]


def named_paths(page: Path) -> set[str]:
    """The files and folders of the repository that `code` names, test functions' files
    among them."""
    words = [
        word
        for code in re.findall(r"`([^`\n]+)`", prose(page.read_text()))
        for word in code.split()
    ]
    paths = {word.split("::")[0].rstrip(",;:.") for word in words}
    return {
        path
        for path in paths
        if re.match(rf"({TOP})/[\w.*/-]*$", path) and not MADE.match(path)
    }


def exists(path: str) -> bool:
    return any(ROOT.glob(path)) if "*" in path else (ROOT / path).exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_names(page):
    missing = []
    for target in links(page):
        path, _, fragment = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        if not other.exists() or (
            fragment and other.suffix == ".md" and fragment not in anchors(other)
        ):
            missing.append(target)
    missing += [path for path in named_paths(page) if not exists(path)]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_prose_is_no_wider_than_the_code(page):
    if page.name != "flags.md" and page.parent.name != "planner":  # written by programs
        lines = prose(page.read_text()).splitlines()
        assert [
            line
            for line in lines
            if len(line) > WIDTH and not re.match(r"\||!\[|\(?`|<", line)
        ] == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 900


def test_the_notes_that_code_cites_exist():
    cited = {
        " ".join(note.split())
        for path in (ROOT / "megatron_2bw").rglob("*.py")
        for note in re.findall(r"\[Note:\s([^\]]+)\]", path.read_text())
    }
    notes = re.findall(
        r"^### \[Note: (.+)\]$", (ROOT / "docs" / "design.md").read_text(), re.M
    )
    assert len(notes) == 4 and cited <= set(notes)


def test_make_test_proves_each_claim():
    """Of each file of tests/distributed that a claim names, `make test` runs a test."""
    files = {
        path
        for path in named_paths(ROOT / "docs" / "claims.md")
        if path.startswith("tests/distributed/")
    }
    assert (
        len(files) > 10
        and [
            path
            for path in files
            if "@pytest.mark.proof" not in (ROOT / path).read_text()
        ]
        == []
    )
