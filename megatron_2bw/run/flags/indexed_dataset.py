"""Reads the index of Megatron's indexed datasets, and of their tokens what a check
needs."""

from __future__ import annotations

import struct

import numpy

# magic, version, code of the token type, sequences, documents and the end
_INDEX = struct.Struct("<9sQBQQ")


def _header(prefix: str) -> tuple[int, int, int]:
    with open(prefix + ".idx", "rb") as file:
        return _INDEX.unpack(file.read(_INDEX.size))[2:]


def divided(prefix: str, bert: bool) -> int:
    """The number of what --split divides: the documents of a BERT, the sequences of a
    GPT."""
    _, sequences, documents = _header(prefix)
    return documents - 1 if bert else sequences


def has_prompts(prefix: str) -> bool:
    """Whether a dataset is of --task sft, whose first token is negative
    (conversations.py)."""
    with open(prefix + ".bin", "rb") as file:
        # int32, little-endian
        return _header(prefix)[0] == 4 and file.read(4)[3:] >= b"\x80"


def has_target(prefix: str, length: int) -> bool:
    """Whether a conversation of --task sft has a target among its first `length`
    tokens. One that is whole has."""
    _, sequences, _ = _header(prefix)
    sizes = numpy.fromfile(prefix + ".idx", "<i4", sequences, offset=_INDEX.size)
    if sizes.min() <= length:
        return True
    tokens, ends = numpy.memmap(prefix + ".bin", "<i4", "r"), sizes.cumsum(dtype=int)
    return any((tokens[start : start + length] >= 0).any() for start in ends - sizes)
