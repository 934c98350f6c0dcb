"""The typed reading of the files that describe a model, a cluster or a profile: a mapping becomes a dataclass."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Gt, Le

from megatron_2bw.errors import UserError, file_errors
from megatron_2bw.files import read_yaml

Count = Annotated[int, Ge(1)]
Positive = Annotated[float, Gt(0)]
Amount = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]


class Described:
    """A dataclass of which files have all entries by name. A name may be written as a number."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False, "coerce_numbers_to_str": True}


def content(flag: str, path: Path) -> Any:
    """What the YAML or JSON file of `flag` holds. UserError names both."""
    with file_errors(f"{flag} {path}"):
        try:
            return read_yaml(path)
        except UserError as error:
            raise UserError(f"{flag} {error}") from None


def described[Kind](kind: type[Kind], entries: Any, where: str, names: Mapping[str, str] | None = None) -> Kind:
    """The dataclass that a mapping describes, its parts included. UserError begins with `where` and names the entry.

    Files outlast the version that wrote them, so a new field needs a default.
    names: of the file's entries by field, where they differ
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind).validate_python(entries)
    except ValidationError as error:
        fault = error.errors()[0]
    words = {"missing": "it is missing", "unexpected_keyword_argument": "unknown; correct it or leave it out"}
    what = words.get(fault["type"]) or f"{fault['msg']}, not {fault['input']!r}"
    entry = ".".join((names or {}).get(str(name), str(name)) for name in fault["loc"])
    raise UserError(f"{where}: {entry}: {what}")
