"""Tokenized shards, and the merge into Megatron's .bin and .idx.

Invariant: a shard's file is whole or absent, and so are the merged files. They equal the output of Megatron's
IndexedDatasetBuilder byte for byte, but need only the memory of one shard: the builder holds a Python object for each
sequence, too much for the sentences of a large corpus.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import BinaryIO

import numpy

from megatron_2bw.data.conversations import Conversations
from megatron_2bw.data.encoder import COUNTS, Encoder
from megatron_2bw.data.indexed import _INDEX
from megatron_2bw.data.sources import Shard
from megatron_2bw.files import write_whole

_CODES = {"uint16": 8, "int32": 4}  # Megatron's for the two types that its DType.optimal_dtype gives


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}.npz"


def write_shard(folder: Path, shard: Shard, source, encoder: Encoder | Conversations) -> tuple[int, Counter[str]]:
    """Tokenize a shard into its file. Returns its size in the input, and its counts."""
    counts: Counter[str] = Counter()
    tokens, lengths, ends = encoder.shard(source.texts(shard, counts, encoder.document), counts)
    arrays = {"tokens": tokens, "lengths": lengths, "ends": ends}
    arrays["counts"] = numpy.array([counts[name] for name in COUNTS], numpy.int64)
    write_whole(shard_path(folder, shard.number), lambda file: numpy.savez(file, **arrays), sync=True)
    return shard.size, counts


def read_counts(folder: Path, number: int) -> Counter[str]:
    with numpy.load(shard_path(folder, number)) as arrays:
        return Counter(dict(zip(COUNTS, arrays["counts"].tolist(), strict=True)))


def total_counts(folder: Path, shards: int) -> Counter[str]:
    """Of the shards 0 to `shards` − 1."""
    totals: Counter[str] = Counter()
    for number in range(shards):
        totals.update(read_counts(folder, number))
    return totals


def merge(folder: Path, shards: int, prefix: Path) -> None:
    """Write `prefix`.bin and .idx from the shards 0 to `shards` − 1."""

    def each(name: str):
        for number in range(shards):
            with numpy.load(shard_path(folder, number)) as arrays:
                yield arrays[name]

    totals = total_counts(folder, shards)
    dtype = next(each("tokens")).dtype

    def tokens(file: BinaryIO) -> None:
        for part in each("tokens"):
            file.write(part.tobytes())

    def index(file: BinaryIO) -> None:
        code = _CODES[dtype.name]
        file.write(_INDEX.pack(b"MMIDIDX\x00\x00", 1, code, totals["sequences"], totals["documents"] + 1))
        for lengths in each("lengths"):
            file.write(lengths.tobytes())
        position = 0
        for lengths in each("lengths"):  # where each sequence starts in the .bin
            sizes = lengths.astype(numpy.int64) * dtype.itemsize
            after = position + numpy.cumsum(sizes)
            file.write((after - sizes).tobytes())
            position += int(sizes.sum())
        file.write(numpy.zeros(1, numpy.int64).tobytes())
        before = 0
        for ends, lengths in zip(each("ends"), each("lengths"), strict=True):
            file.write((before + ends).tobytes())
            before += len(lengths)

    write_whole(prefix.with_name(prefix.name + ".bin"), tokens, sync=True)
    write_whole(prefix.with_name(prefix.name + ".idx"), index, sync=True)
