"""The typed reading of the files that describe a model or a cluster: a mapping becomes
a dataclass."""

import re
import tomllib
from importlib.resources import files
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Gt, Le

from megatron_2bw.base.errors import UserError, did_you_mean

Count = Annotated[int, Ge(1)]
Positive = Annotated[float, Gt(0)]
Amount = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]


class Described:
    """A dataclass of which files have all entries by name. A name may be written as a
    number."""

    __pydantic_config__: ClassVar = {
        "extra": "forbid",
        "allow_inf_nan": False,
        "coerce_numbers_to_str": True,
    }


def plain(name: str) -> str:
    """A name without case, blanks and punctuation: rtx4090."""
    return re.sub(r"[\W_]", "", name.lower())


def data_file(name: str) -> dict[str, dict[str, Any]]:
    """A TOML file of this folder."""
    return tomllib.loads(files(__package__).joinpath(name).read_text())


def presets(name: str) -> dict[str, dict[str, Any]]:
    """The tables of a TOML file of this folder. An entry also has the values of the
    entry of `shared` that it is `like`."""
    tables = data_file(name)
    shared = tables["shared"]
    for table in tables.values():
        for name, entry in table.items():
            if "like" in entry:
                table[name] = shared[entry.pop("like")] | entry
    return tables


def named[Kind](presets: dict[str, Kind], name: str, flag: str) -> Kind:
    """The preset of a name as people write it. UserError lists the names."""
    for known, preset in presets.items():
        if plain(known) == plain(name.rpartition("/")[2]):
            return preset
    raise UserError(
        f"{flag} {name}: not one of {', '.join(presets)}, and no file{did_you_mean(name, presets)}"
    )


def described[Kind](kind: type[Kind], entries: Any, where: str) -> Kind:
    """The dataclass that a mapping describes, its parts included. UserError begins with
    `where` and names the entry.

    Files outlast the version that wrote them, so a new field needs a default.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind).validate_python({} if entries is None else entries)
    except ValidationError as error:
        fault = error.errors(include_input=False)[0]
    entry = ".".join(map(str, fault["loc"]))
    raise UserError(f"{where}: {entry}: {fault['msg']}")
