"""The one atomic writer: a file has its old content or its new content, never a part of
either."""

import csv
import io
import json
import math
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_2bw.base.errors import UserError, file_errors, one_line


def write_whole(
    path: str | os.PathLike,
    content: str | bytes,
    sync: bool = False,
    before: Callable | None = None,
) -> None:
    """Replace the file `path` in one step; its folder must exist. Text is written as
    UTF-8.

    sync: the content is on the disk before the file is replaced, so that it also
    survives a power failure.
    before: called when the content is written, before the file is replaced.

    Raises OSError, which names `path`. Devices and pipes, such as /dev/stdout, are
    written in place.
    """
    path = Path(path)
    is_device = path.parent == Path("/dev") or not path.is_file()
    in_place = path.exists() and is_device
    temporary = path
    if not in_place:
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    if isinstance(content, str):
        content = content.encode()
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            if sync and not in_place:
                file.flush()
                os.fsync(file.fileno())
        if before is not None:
            before()
        if not in_place:
            os.replace(temporary, path)
    except BaseException as error:
        if not in_place:
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)
        raise


def write_json(path: str | os.PathLike, content: Any, indent: int | None = 1) -> None:
    """`write_whole` of the content as JSON, with null for infinite numbers and NaN."""
    text = json.dumps(finite(content), indent=indent, allow_nan=False)
    write_whole(path, text + "\n")


def write_csv(path: str | os.PathLike, rows: Sequence[Mapping[str, Any]]) -> None:
    """`write_whole` of the rows, which have the same columns, with a head."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, text.getvalue())


def read_yaml(path: Path, flag: str = "") -> Any:
    """What a YAML or JSON file holds. UserError, which begins with the flag, if it is
    neither, or cannot be read."""
    import yaml

    where = f"{flag} {path}".strip()
    with file_errors(where):
        text = path.read_text(encoding="utf-8")

    class Unique(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names = [name.value for name, _ in node.value]
            if len(set(names)) < len(names):
                raise yaml.YAMLError(f"a name stands twice among {', '.join(names)}")
            return super().construct_mapping(node, deep)

    try:
        if path.suffix == ".json":
            return json.loads(text)
        return yaml.load(text, Unique)
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{where}: {one_line(error)}") from None


def finite(content: Any) -> Any:
    """The content with None for the numbers that JSON does not have."""
    if isinstance(content, dict):
        return {key: finite(entry) for key, entry in content.items()}
    if isinstance(content, (list, tuple)):
        return [finite(entry) for entry in content]
    if isinstance(content, float) and not math.isfinite(content):
        return None
    return content


def new_figure(width: float, height: float) -> Any:
    """An empty figure of matplotlib, in inches."""
    from matplotlib.figure import Figure  # takes a second, and only pictures need it

    return Figure(figsize=(width, height), layout="constrained")


def write_figure(path: str | os.PathLike, figure: Any) -> None:
    """`write_whole` of a figure of matplotlib; the kind of picture by the ending of
    `path`."""
    picture = io.BytesIO()
    figure.savefig(picture, format=Path(path).suffix[1:], dpi=150)
    write_whole(path, picture.getvalue())


def set_aside(path: Path) -> None:
    """Rename what is at `path`, if anything is, to the first free of NAME.1, NAME.2,
    ...; of a file, NAME.1.ENDING."""
    if not path.exists():
        return
    ending = path.suffix if path.is_file() else ""
    stem = path.name.removesuffix(ending)
    number = 0
    target = path
    while target.exists():
        number += 1
        target = path.with_name(f"{stem}.{number}{ending}")
    path.rename(target)
