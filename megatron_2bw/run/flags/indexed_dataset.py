"""Reads the index of Megatron's indexed datasets, and of their tokens what a check
needs."""

import struct
from typing import NamedTuple

import numpy

_INDEX = struct.Struct("<17xBQQ")  # behind a magic word and the version


class _Header(NamedTuple):
    token_type: int
    sequences: int
    document_ends: int  # one more than documents


def _header(prefix: str) -> _Header:
    with open(prefix + ".idx", "rb") as file:
        return _Header._make(_INDEX.unpack(file.read(_INDEX.size)))


def divided(prefix: str, bert: bool) -> int:
    """The number of what --split divides: the documents of a BERT, the sequences of a
    GPT."""
    header = _header(prefix)
    return header.document_ends - 1 if bert else header.sequences


def has_prompts(prefix: str) -> bool:
    """Whether a dataset is of --task sft, whose first token is negative
    (conversations.py)."""
    with open(prefix + ".bin", "rb") as file:
        # int32, little-endian
        return _header(prefix).token_type == 4 and file.read(4)[3:] >= b"\x80"


def has_target(prefix: str, length: int) -> bool:
    """Whether a conversation of --task sft has a target among its first `length`
    tokens. One that is whole has."""
    sequences = _header(prefix).sequences
    sizes = numpy.fromfile(prefix + ".idx", "<i4", sequences, offset=_INDEX.size)
    if sizes.min() <= length:
        return True
    tokens = numpy.memmap(prefix + ".bin", "<i4", "r")
    for start in sizes.cumsum(dtype=int) - sizes:
        if (tokens[start : start + length] >= 0).any():
            return True
    return False
