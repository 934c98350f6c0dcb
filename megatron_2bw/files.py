"""The one atomic writer: a file has its old content or its new content, never a part of either."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO


def write_whole(
    path: str | os.PathLike, content: str | bytes | Callable[[BinaryIO], object], sync: bool = False
) -> None:
    """Replace the file `path` in one step; its folder must exist. Text is written as UTF-8.

    content: what to write, or a function that writes it to the open file
    sync: the content is on the disk before the file is replaced, so that it also survives a power failure.
    The temporary file lies in the same folder. It is removed if writing fails. Raises OSError.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with open(temporary, "wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode() if isinstance(content, str) else content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def write_json(path: str | os.PathLike, content: Any, indent: int | None = 1, sync: bool = False) -> None:
    """`write_whole` of the content as JSON, with null for infinite numbers and NaN."""
    write_whole(path, json.dumps(finite(content), indent=indent, allow_nan=False) + "\n", sync)


def finite(content: Any) -> Any:
    """The content with None for the numbers that JSON does not have."""
    if isinstance(content, dict):
        return {key: finite(entry) for key, entry in content.items()}
    if isinstance(content, (list, tuple)):
        return [finite(entry) for entry in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def write_figure(path: str | os.PathLike, figure: Any, dpi: int = 150) -> None:
    """`write_whole` of a figure of matplotlib; the kind of picture by the ending of `path`."""
    picture = io.BytesIO()
    figure.savefig(picture, format=Path(path).suffix[1:], dpi=dpi)
    write_whole(path, picture.getvalue())


def set_aside(path: Path) -> None:
    """Rename what is at `path`, if anything is, to the first free name of NAME.1, NAME.2, ..."""
    names = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
    if path.exists():
        path.rename(next(name for name in names if not name.exists()))
