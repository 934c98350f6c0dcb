"""Checks that the installed Megatron has every name that this project rebinds, replaces or reads, and rebinds.

Invariant: if Megatron has drifted from any row of `patches.py` or `required.py`, nothing is rebound, and the program
stops with one line that names the version found and the one expected.
"""

from __future__ import annotations

import dis
import functools
import inspect
import pkgutil
import re
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

SUPPORTED = "0.19"


class DriftError(RuntimeError):
    """The installed Megatron is not the one that the rows were written for."""


@dataclass(frozen=True)
class Patch:
    """One rebinding: `module.name`, whose parameters must be `parameters`, becomes `replace(original)`.

    `name` may be that of a method, Class.method. `parameters` are names with spaces between; None for what is not
    called.
    """

    module: str
    name: str
    parameters: str | None
    reason: str
    replace: Callable[[Any], Any]

    def put(self, value: Any) -> None:
        holder, _, name = self.name.rpartition(".")
        owner = _find(self.module, holder)
        static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        setattr(owner, name, staticmethod(value) if static else value)

    def original(self) -> Any:
        """What Megatron holds now. Raises DriftError if it is missing or has other parameters."""
        found = _find(self.module, self.name)
        _check_parameters(f"{self.module}.{self.name}", found, self.parameters)
        return found


def row(module: str, names: str, reason: str, replace: Callable) -> Patch:
    """A patch of "name(parameters)"; a name without parentheses is not called."""
    ((name, parameters),) = _parsed(names)
    return Patch(module, name, parameters, reason, replace)


def around(replacement: Callable) -> Callable:
    """Decorates a function, or a method, that is called with the original and its arguments: the `replace` of a Patch.

    What has the replacement already is left as it is.
    """

    def replace(*bound: Any) -> Callable:  # the method's object, if it is one, and the original
        *_, original = bound
        if getattr(original, "replacement", None) == (replacement, *bound[:-1]):
            return original

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return replacement(*bound, *args, **kwargs)

        call.replacement = (replacement, *bound[:-1])
        return call

    return replace


def arguments(function: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the function's names of them, with its defaults."""
    values = inspect.signature(function).bind(*args, **kwargs)
    values.apply_defaults()
    return values.arguments


def _parsed(names: str) -> list[tuple[str, str | None]]:
    """Each name with its parameters; None if it has no parentheses."""
    return [(match[1], match[2]) for match in re.finditer(r"([\w.]+)(?:\(([^)]*)\))?", names)]


@dataclass(frozen=True)
class Required:
    """Names of one class (or module, if `owner` is empty) of Megatron that this project replaces, sets or reads.

    names  with spaces between: a method with its parameters, "self" left out, as in step(increment); an attribute that
           the class's methods set, or a field, as in timers
    """

    module: str
    owner: str
    reason: str
    names: str

    def parsed(self) -> list[tuple[str, str | None]]:
        """Each name with its parameters; None for an attribute."""
        return _parsed(self.names)

    def check(self) -> None:
        """Raises DriftError at the first name that is missing or has other parameters."""
        where = f"{self.module}.{self.owner}".rstrip(".")
        owner = _find(self.module, self.owner)
        for name, parameters in self.parsed():
            if not hasattr(owner, name) and not (self.owner and parameters is None and name in _attributes(owner)):
                raise _drift(f"{where}.{name} is missing")
            if parameters is not None:
                expected = f"self {parameters}" if self.owner else parameters
                _check_parameters(f"{where}.{name}", getattr(owner, name), expected)


def _find(module: str, name: str) -> Any:
    """What the module holds under a name with or without dots; without a name the module itself."""
    try:
        return pkgutil.resolve_name(f"{module}:{name}")
    except (ImportError, AttributeError) as error:
        raise _drift(f"{module}.{name}".rstrip(".") + " is missing") from error


def _check_parameters(where: str, found: Any, expected: str | None) -> None:
    if expected is not None:
        parameters = tuple(inspect.signature(found).parameters)
        if parameters != tuple(expected.split()):
            raise _drift(f"{where} takes ({', '.join(parameters)}), expected ({', '.join(expected.split())})")


@functools.cache
def _attributes(owner: type) -> frozenset[str]:
    """The fields of a class and its bases, and what their methods set on any object."""
    return frozenset(name for base in owner.__mro__ for name in _own_attributes(base))


def _own_attributes(owner: type) -> Iterator[str]:
    yield from getattr(owner, "__annotations__", ())
    for member in vars(owner).values():
        member = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        code = getattr(inspect.unwrap(member) if callable(member) else member, "__code__", None)
        if isinstance(code, types.CodeType):
            yield from (i.argval for i in dis.get_instructions(code) if i.opname == "STORE_ATTR")


def apply(patches: Sequence[Patch], required: Iterable[Required] = ()) -> Callable[[], None]:
    """Check all rows, then make all rebindings. Returns a function that undoes them. Raises DriftError."""
    _check_version()
    for row in required:
        row.check()
    originals = [patch.original() for patch in patches]
    for patch, original in zip(patches, originals):
        patch.put(patch.replace(original))

    def undo() -> None:
        for patch, original in reversed(list(zip(patches, originals))):
            patch.put(original)

    return undo


def _version() -> tuple[int, ...]:
    # `__version__` carries the git revision of whatever checkout holds the environment; VERSION does not.
    from megatron.core.package_info import VERSION

    return VERSION


def _check_version() -> None:
    if ".".join(map(str, _version()[:2])) != SUPPORTED:
        raise DriftError(
            f"megatron-core {'.'.join(map(str, _version()[:3]))} is installed, megatron_2bw needs {SUPPORTED}"
        )


def _drift(what: str) -> DriftError:
    found = ".".join(map(str, _version()[:3]))
    return DriftError(f"{what}: megatron_2bw needs megatron-core {SUPPORTED} as released, found {found}")
