"""Cuts a sequence into lists of a bounded size. Pure Python."""

from collections.abc import Callable, Iterable, Iterator


def portions[Item](
    items: Iterable[Item], size: Callable[[Item], int], limit: int
) -> Iterator[list[Item]]:
    """The items in order, in lists whose sizes add up to `limit` at most, or of one
    item."""
    portion = []
    total = 0
    for item in items:
        if portion and total + size(item) > limit:
            yield portion
            portion = []
            total = 0
        portion.append(item)
        total += size(item)
    if portion:
        yield portion
