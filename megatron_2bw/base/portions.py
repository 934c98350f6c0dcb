"""Cuts a sequence into lists of a bounded size. Pure Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator


def portions[Item](
    items: Iterable[Item], size: Callable[[Item], int], limit: int
) -> Iterator[list[Item]]:
    """The items in order, in lists whose sizes add up to `limit` at most, or of one
    item."""
    some, held = list[Item](), 0
    for item in items:
        if some and held + size(item) > limit:
            yield some
            some, held = [], 0
        some.append(item)
        held += size(item)
    if some:
        yield some
