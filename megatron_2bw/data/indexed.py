"""Checks Megatron's indexed datasets by header and sizes, without reading the tokens.

Invariant: reads only; each check is a few system calls for any size of dataset (`has_samples`: if its documents are
sound).
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy

LONGEST_SENTENCE = 512  # tokens; Megatron's BERT skips a document with a longer sentence

_INDEX = struct.Struct("<9sQBQQ")  # magic, version, code of the token type, sequences, documents
_LOOK = 1 << 20  # documents, or bytes, that are read together
_TOKEN_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}


def fault(prefix: str) -> str | None:
    """The damage of the dataset `prefix`.idx and .bin, by header and sizes; or None."""
    index, tokens = Path(prefix + ".idx"), Path(prefix + ".bin")
    for file in (index, tokens):
        if not file.is_file():
            return f"there is no file {file}"
    with index.open("rb") as file:
        head = file.read(_INDEX.size)
        if len(head) < _INDEX.size:
            return f"{index} is not an index of Megatron's"
        magic, version, code, count, documents = _INDEX.unpack(head)
        if magic != b"MMIDIDX\x00\x00" or version != 1 or code not in _TOKEN_BYTES:
            return f"{index} is not an index of Megatron's"
        if not count:
            return "it holds no documents"
        size = _INDEX.size + count * (4 + 8) + documents * 8
        if index.stat().st_size not in (size, size + count):  # the latter with a mode for each sequence
            return f"{index} is damaged: {index.stat().st_size} bytes instead of {size}"
        file.seek(_INDEX.size + 4 * (count - 1))
        (length,) = struct.unpack("<i", file.read(4))
        file.seek(_INDEX.size + 4 * count + 8 * (count - 1))
        (start,) = struct.unpack("<q", file.read(8))
        file.seek(8 * (documents - 1), os.SEEK_CUR)
        (end,) = struct.unpack("<q", file.read(8))
    if end != count:
        return f"{index} is damaged: its documents end at sequence {end} of {count}"
    lengths, starts, edges = _tables(prefix, count, documents)
    ends = starts[:_LOOK] + lengths[:_LOOK].astype("i8") * _TOKEN_BYTES[code]
    if starts[0] or (ends[:-1] != starts[1:_LOOK]).any() or (numpy.diff(edges[:_LOOK]) < 0).any() or edges[0]:
        return f"{index} is damaged: its sequences or documents do not follow one another"
    size = start + length * _TOKEN_BYTES[code]
    if tokens.stat().st_size != size:
        return f"{tokens} has {tokens.stat().st_size} bytes, but its index describes {size}: build the dataset again"
    return None


def _tables(prefix: str, count: int, edges: int) -> tuple[numpy.memmap, numpy.memmap, numpy.memmap]:
    """The length and the first byte of each sequence; the first sequence of each document, and the end (`edges`)."""
    kinds = (("<i4", 0, count), ("<i8", 4 * count, count), ("<i8", 12 * count, edges))
    lengths, starts, firsts = (
        numpy.memmap(prefix + ".idx", kind, "r", _INDEX.size + place, (size,)) for kind, place, size in kinds
    )
    return lengths, starts, firsts


def _header(prefix: str) -> tuple[int, int, int]:
    """The code of the token type, the number of sequences, and that of documents and the end, of a sound dataset."""
    with open(prefix + ".idx", "rb") as file:
        return _INDEX.unpack(file.read(_INDEX.size))[2:]


def sequences(prefix: str) -> int:
    """The number of sequences of a sound dataset; --split divides them."""
    return _header(prefix)[1]


def documents(prefix: str) -> int:
    """The number of documents of a sound dataset."""
    return _header(prefix)[2] - 1


def lengths(prefix: str) -> numpy.memmap:
    """The tokens of each sequence of a sound dataset."""
    return _tables(prefix, *_header(prefix)[1:])[0]


def has_prompts(prefix: str) -> bool:
    """Whether a sound dataset is of --task sft, whose first token is negative (conversations.py)."""
    with open(prefix + ".bin", "rb") as file:
        return _header(prefix)[0] == 4 and file.read(4)[3:] >= b"\x80"  # int32, little-endian


def has_samples(prefix: str, start: int, end: int, sentences: int) -> bool:
    """Whether Megatron's BERT finds a sample in documents `start` to `end`: one of `sentences` or more, none too long.

    Reads no further than the first such document.
    """
    lengths, _, edges = _tables(prefix, *_header(prefix)[1:])
    for first in range(start, end, _LOOK):
        some = edges[first : min(first + _LOOK, end) + 1]
        for document in numpy.flatnonzero(numpy.diff(some) >= sentences):
            own = lengths[some[document] : some[document + 1]]
            if len(own) == 1 or own.max() <= LONGEST_SENTENCE:
                return True
    return False
