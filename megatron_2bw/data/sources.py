"""Sources of documents: text files, JSON lines, plain or compressed, and datasets; cut into shards.

Invariant: the consecutive shards of a source hold each of its documents once and in order, for any cuts. A shard is
read independently: from a range of a file's bytes, or from lines that were decompressed for it. At most a shard and one
document are in memory.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import itertools
import json
import lzma
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from megatron_2bw.errors import UserError

try:
    from compression import zstd  # from Python 3.14 on
except ImportError:
    zstd = None

JSON_SUFFIXES = {".jsonl", ".json", ".ndjson"}
_BOM = b"\xef\xbb\xbf"
# By the suffix of a file's name; a damaged file raises one of DAMAGED while it is read.
_OPEN = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open} | ({".zst": zstd.open} if zstd else {})
UNREADABLE = {".zst", ".zip", ".tar", ".tgz", ".7z", ".parquet", ".arrow", ".bin", ".idx", ".pdf"} - set(_OPEN)
DAMAGED = (EOFError, OSError, lzma.LZMAError, zlib.error, *([zstd.ZstdError] if zstd else []))
Document = Callable[[Any, Counter[str]], Any]  # of what a source holds: a text, an object of JSON lines, a row


class Piece(NamedTuple):
    """A range of a file's bytes; a document belongs to the piece in which it starts. `end` None: to the file's end."""

    path: str
    start: int = 0
    end: int | None = None


class Shard(NamedTuple):
    """A part of a source: pieces of files, decompressed `data` of one file, or rows of a dataset."""

    number: int
    size: int  # bytes of the input as it lies there, for the progress
    pieces: tuple[Piece, ...] = ()
    data: bytes | None = None
    rows: range | None = None


def checked(text: object, counts: Counter[str]) -> str:
    """`text` if it is one; its bytes are counted. A UnicodeError for half of a surrogate pair, which JSON can spell."""
    if not isinstance(text, str):
        raise ValueError(f"the text is {'null' if text is None else type(text).__name__}, not a string")
    counts["bytes"] += len(text.encode())
    return text


def is_compressed(file: str) -> bool:
    return Path(file).suffix.lower() in _OPEN


def opened(file: str, raw: BinaryIO) -> contextlib.AbstractContextManager[BinaryIO]:
    """The content of `raw`, the open `file`: decompressed if its name says so."""
    if not is_compressed(file):
        return contextlib.nullcontext(raw)
    return _OPEN[Path(file).suffix.lower()](raw, "rb")


@dataclass(frozen=True)
class FileSource:
    """Documents in files. `documents` of a text file: file, blank-lines or lines; `key`: of the text in JSON lines, or
    None for the whole object."""

    files: tuple[str, ...]
    format: str = "auto"  # auto, text, jsonl
    documents: str = "file"
    key: str | None = "text"
    skip_bad: bool = False

    def size(self) -> int:
        return sum(os.path.getsize(file) for file in self.files)

    def expands(self) -> bool:
        """Whether the text may be longer than `size` bytes."""
        return any(map(is_compressed, self.files))

    def identity(self) -> list:
        """What two calls that share their work must agree on."""
        return identity(self.files)

    def is_json(self, file: str) -> bool:
        if self.format != "auto":
            return self.format == "jsonl"
        path = Path(file)
        return (path.with_suffix("") if is_compressed(file) else path).suffix.lower() in JSON_SUFFIXES

    def _whole(self, file: str) -> bool:
        return self.documents == "file" and not self.is_json(file)

    def shards(self, limit: int) -> Iterator[Shard]:
        """Shards of about `limit` bytes; larger only for a larger document."""
        numbers, pieces, taken = itertools.count(), [], 0
        for piece, size, data in self._parts(limit):
            if pieces and (data is not None or taken + size > limit):
                yield Shard(next(numbers), taken, tuple(pieces))
                pieces, taken = [], 0
            if data is not None:
                yield Shard(next(numbers), size, (piece,), data)
            else:
                pieces.append(piece)
                taken += size
        if pieces:
            yield Shard(next(numbers), taken, tuple(pieces))

    def _parts(self, limit: int) -> Iterator[tuple[Piece, int, bytes | None]]:
        """Each piece, its bytes in the file, and what was decompressed for it."""
        for file in self.files:
            size = os.path.getsize(file)
            if self._whole(file):
                yield Piece(file), size, None
            elif is_compressed(file):
                yield from ((Piece(file), read, data) for data, read in self._decompressed(file, limit))
            else:
                for start in range(0, size, limit):
                    end = min(start + limit, size)
                    yield Piece(file, start, end), end - start, None

    def _decompressed(self, file: str, limit: int) -> Iterator[tuple[bytes, int]]:
        """(part, its bytes in the file): the lines, in parts of about `limit` bytes that begin with a document."""
        at_blank = self.documents == "blank-lines" and not self.is_json(file)
        try:
            with open(file, "rb") as raw, opened(file, raw) as stream:
                before = 0
                while data := stream.read(limit):
                    rest = [stream.readline()]  # of the last line
                    while at_blank and (line := stream.readline()):
                        rest.append(line)
                        if not line.strip():
                            break
                    data, position = b"".join([data, *rest]), raw.tell()
                    yield data.removeprefix(_BOM) if before == 0 else data, position - before
                    before = position
        except DAMAGED as error:
            raise UserError(f"{file}: cannot be read, {error}") from error

    def texts(self, shard: Shard, counts: Counter[str], document: Document = checked) -> Iterator[Any]:
        """The documents of a shard, each by `document`. A bad one raises UserError, or is counted with `skip_bad`."""
        for piece in shard.pieces:
            for position, raw in self._raw(piece, shard.data):
                try:
                    found = document(self._field(raw) if self.is_json(piece.path) else raw.decode("utf-8"), counts)
                except ValueError as error:
                    where = "" if self.skip_bad else self._place(piece.path, position, raw, shard.data)
                    bad(where, error, self.skip_bad, counts)
                else:
                    yield found

    def _place(self, path: str, position: int, raw: bytes, data: bytes | None) -> str:
        if data is not None:  # of a compressed file
            return f"{path}, {raw[:40]!r}"
        if self._whole(path):
            return path
        with open(path, "rb") as file:
            read = iter(lambda: file.read(min(1 << 20, position - file.tell())), b"")
            return f"{path}, line {1 + sum(part.count(b'\n') for part in read):,}"

    def _raw(self, piece: Piece, data: bytes | None) -> Iterator[tuple[int, bytes]]:
        """Each document's place and bytes."""
        try:
            with io.BytesIO(data) if data is not None else open(piece.path, "rb") as file:
                if self._whole(piece.path):
                    with opened(piece.path, file) as stream:
                        yield 0, stream.read().removeprefix(_BOM)
                elif self.documents == "blank-lines" and not self.is_json(piece.path):
                    yield from _blocks(file, piece.start, piece.end)
                else:
                    found = _lines(file, piece.start, piece.end)
                    yield from ((place, line.rstrip(b"\r\n")) for place, line in found if line.strip())
        except DAMAGED as error:
            raise UserError(f"{piece.path}: cannot be read, {error}") from error

    def _field(self, line: bytes) -> Any:
        record = json.loads(line)
        if not isinstance(record, dict):
            raise ValueError("not a JSON object; each line must be one")
        if self.key is None:
            return record
        if self.key not in record:
            raise ValueError(f"no key {self.key!r}, only {', '.join(record) or 'none'}: give --json-keys")
        return record[self.key]


@dataclass(frozen=True)
class DatasetSource:
    """The column `key` of a dataset of the datasets library, or with None the rows."""

    name: str
    dataset: object
    key: str | None
    skip_bad: bool = False

    def size(self) -> int:
        return self.dataset.data.nbytes

    def expands(self) -> bool:
        return False

    def identity(self) -> list:
        files = identity(entry["filename"] for entry in self.dataset.cache_files)
        return [len(self.dataset), self.dataset.info.config_name, str(self.dataset.split), files]

    def shards(self, limit: int) -> Iterator[Shard]:
        rows = len(self.dataset)
        step = max(1, limit * rows // max(self.size(), 1))
        for number, start in enumerate(range(0, rows, step)):
            part = range(start, min(start + step, rows))
            yield Shard(number, self.size() * len(part) // rows, rows=part)

    def texts(self, shard: Shard, counts: Counter[str], document: Document = checked) -> Iterator[Any]:
        for start in range(shard.rows.start, shard.rows.stop, 1000):
            rows = range(start, min(start + 1000, shard.rows.stop))
            held = self.dataset.select(rows) if self.key is None else self.dataset[start : rows.stop][self.key]
            for row, each in zip(rows, held, strict=True):
                try:
                    found = document(each, counts)
                except ValueError as error:
                    bad(f"{self.name}, row {row}", error, self.skip_bad, counts)
                else:
                    yield found


def bad(where: str, error: ValueError, skip: bool, counts: Counter[str]) -> None:
    """Count a document that is not text, or raise UserError."""
    if not skip:
        reason = "not valid UTF-8" if isinstance(error, UnicodeError) else str(error)
        raise UserError(f"{where}: {reason} (--skip-bad-documents leaves such documents out)") from error
    counts["bad"] += 1


def identity(files) -> list:
    """Name, size and time of change of each file."""
    stats = ((os.path.abspath(file), os.stat(file)) for file in files)
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


def _lines(file: BinaryIO, start: int, end: int | None) -> Iterator[tuple[int, bytes]]:
    """The lines that start within the range, each with its position."""
    if start:  # the line that holds the byte before belongs to the range before
        file.seek(start - 1)
        file.readline()
    position = file.tell()
    while end is None or position < end:
        line = file.readline()
        if not line:
            return
        yield position, line if position else line.removeprefix(_BOM)
        position += len(line)


def _blocks(file: BinaryIO, start: int, end: int | None) -> Iterator[tuple[int, bytes]]:
    """The documents between blank lines. One belongs to the range in which the blank line before it starts."""
    block, begin, inside = [], 0, start == 0
    for position, line in _lines(file, start, None):
        past = end is not None and position >= end
        if not line.strip():
            if block:
                yield begin, b"".join(block).rstrip(b"\r\n")
                block = []
            if past:
                return
            inside = True
        elif inside:
            begin = begin if block else position
            block.append(line)
        elif past:
            return
    if block:
        yield begin, b"".join(block).rstrip(b"\r\n")
