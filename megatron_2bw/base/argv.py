"""The words of a command line: flags with their values, the words of a file, what
stands behind --."""

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
    flags = []
    for word in words:
        if word.startswith("--") or word == "-h" or not flags:
            flags.append([])
        flags[-1].append(word)
    return flags


def split_by(
    words: Iterable[str], flags: Collection[str]
) -> tuple[list[str], list[str]]:
    """The words of these flags with their values, and all others."""
    chosen = []
    others = []
    for group in groups(words):
        part = chosen if flag_of(group[0]) in flags else others
        part += group
    return chosen, others


def merged(defaults: Sequence[str], typed: Sequence[str]) -> list[str]:
    """The flags of both with their values; what is typed replaces a default."""
    replaced = {flag_of(group[0]) for group in groups(typed)}
    _, kept = split_by(defaults, replaced)
    return [*kept, *typed]


def split_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words before and after the first --."""
    words = list(argv)
    place = words.index("--") if "--" in words else len(words)
    return words[:place], words[place + 1 :]


def expand_files(argv: Sequence[str]) -> list[str]:
    """`argv` with the words of a file in the place of each @file. UserError if it
    cannot be read."""
    expanded = []
    for word in argv:
        with file_errors(word):
            if word.startswith("@"):
                expanded += shlex.split(Path(word[1:]).read_text())
            else:
                expanded.append(word)
    return expanded
