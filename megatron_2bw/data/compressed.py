"""Compressed input, by the suffix of a file's name, with Python's own modules.

Invariant: a file is decompressed while it is read; a damaged file raises one of DAMAGED.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import lzma
import zlib
from pathlib import Path
from typing import BinaryIO

try:
    from compression import zstd  # from Python 3.14 on
except ImportError:
    zstd = None

_OPEN = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open} | ({".zst": zstd.open} if zstd else {})
UNREADABLE = {".zst", ".zip", ".tar", ".tgz", ".7z", ".parquet", ".arrow", ".bin", ".idx", ".pdf"} - set(_OPEN)
DAMAGED = (EOFError, OSError, lzma.LZMAError, zlib.error, *([zstd.ZstdError] if zstd else []))


def is_compressed(file: str) -> bool:
    return Path(file).suffix.lower() in _OPEN


def opened(file: str, raw: BinaryIO) -> contextlib.AbstractContextManager[BinaryIO]:
    """The content of `raw`, the open `file`: decompressed if its name says so."""
    if not is_compressed(file):
        return contextlib.nullcontext(raw)
    return _OPEN[Path(file).suffix.lower()](raw, "rb")
