"""The one atomic writer: a file has its old content or its new content, never a part of either."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path


def write_whole(path: str | os.PathLike, content: str | bytes, sync: bool = False) -> None:
    """Replace the file `path` by `content` in one step; its folder must exist. Text is written as UTF-8.

    sync: the content is on the disk before the file is replaced, so that it also survives a power failure.
    The temporary file lies in the same folder. It is removed if writing fails. Raises OSError.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with open(temporary, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
