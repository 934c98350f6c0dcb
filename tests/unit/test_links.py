"""The pages of the repository: what they link to and name exists, and they have the
size that they should have."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
each_page = pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: str(page.relative_to(ROOT))
)
WIDTH = 120  # of prose; tables, links and commands may be longer
# by the commands of the pages
MADE = re.compile(r"(out|build|logs|checkpoints|data|my_\w+)/|\.(venv|venv/.*)$")


def prose(text: str) -> str:
    """The page without blocks of commands."""
    return re.sub(r"^( *)```.*?^ *```$|^    [^\n]*$", "", text, flags=re.S | re.M)


@cache
def anchors(page: Path) -> set[str]:
    """The fragments under which GitHub shows the page's headings."""
    fragments = set()
    for title in re.findall(r"^#+ (.+)$", prose(page.read_text()), re.M):
        words = re.sub(r"\]\([^)]*\)", "", title).lower()
        fragments.add(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    return fragments


def links(page: Path) -> list[str]:
    """Relative targets of the page's links and pictures."""
    text = page.read_text()
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(text))
    targets += re.findall(r'(?:src|href)="([^"]+)"', text)
    return [target for target in targets if not re.match(r"\w+:", target)]


def named_paths(page: Path) -> set[str]:
    """The files and folders of the repository that `code` names, test functions' files
    among them."""
    paths = set()
    for code in re.findall(r"`([^`\n]+)`", prose(page.read_text())):
        for word in code.split():
            path = word.split("::")[0].rstrip(",;:.")
            top, slash, _ = path.partition("/")
            plain = re.fullmatch(r"[\w.*/-]+", path) and not MADE.match(path)
            if slash and plain and top.isidentifier() and (ROOT / top).is_dir():
                paths.add(path)
    return paths


@each_page
def test_links_and_names(page):
    missing = []
    for target in links(page):
        path, _, fragment = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        heading = not fragment or other.suffix != ".md" or fragment in anchors(other)
        if not other.exists() or not heading:
            missing.append(target)
    missing += [path for path in named_paths(page) if not any(ROOT.glob(path))]
    assert not missing


@each_page
def test_prose_is_no_wider_than_the_code(page):
    if page.name != "flags.md":  # written by a program
        for line in prose(page.read_text()).splitlines():
            assert len(line) <= WIDTH or re.match(r"\||!\[|\(?`|<", line)


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 900


def test_the_notes_that_code_cites_exist():
    cited = set()
    for path in (ROOT / "megatron_2bw").rglob("*.py"):
        for note in re.findall(r"\[Note:\s([^\]]+)\]", path.read_text()):
            cited.add(" ".join(note.split()))
    design = (ROOT / "docs/design.md").read_text()
    notes = re.findall(r"^### \[Note: (.+)\]$", design, re.M)
    assert len(notes) == 4 and cited <= set(notes)


def test_make_test_proves_each_claim():
    """With `make test-proofs` it runs a test of each file of tests/distributed that a
    claim names."""
    count = 0
    for path in named_paths(ROOT / "docs/claims.md"):
        if path.startswith("tests/distributed/"):
            count += 1
            assert "@pytest.mark.proof" in (ROOT / path).read_text(), path
    assert count > 10
