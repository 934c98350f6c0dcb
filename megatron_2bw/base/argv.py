"""The words of a command line: flags with their values, the words of a file, what
stands behind --."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from megatron_2bw.base.errors import file_errors


def flag_of(word: str) -> str:
    """The flag of --flag or --flag=value; any other word as it is."""
    return word.partition("=")[0]


def groups(words: Iterable[str]) -> list[list[str]]:
    """Each flag with its values; the first group has no flag if values stand before all
    flags."""
    found: list[list[str]] = []
    for word in words:
        if word.startswith("--") or word == "-h" or not found:
            found.append([])
        found[-1].append(word)
    return found


def split_by(
    words: Iterable[str], flags: Collection[str]
) -> tuple[list[str], list[str]]:
    """The words of these flags with their values, and all others."""
    parts: tuple[list[str], list[str]] = [], []
    for group in groups(words):
        parts[flag_of(group[0]) not in flags].extend(group)
    return parts


def merged(defaults: Sequence[str], typed: Sequence[str]) -> list[str]:
    """The flags of both with their values; what is typed replaces a default."""
    return [
        *split_by(defaults, {flag_of(word) for word in typed if word.startswith("--")})[
            1
        ],
        *typed,
    ]


def split_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words before and after the first --."""
    at = list(argv).index("--") if "--" in argv else len(argv)
    return list(argv[:at]), list(argv[at + 1 :])


def expand_files(argv: Sequence[str]) -> list[str]:
    """`argv` with the words of a file in the place of each @file. UserError if it
    cannot be read."""
    expanded: list[str] = []
    for word in argv:
        with file_errors(word):
            expanded += (
                shlex.split(Path(word[1:]).read_text())
                if word.startswith("@")
                else [word]
            )
    return expanded
