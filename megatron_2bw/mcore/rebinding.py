"""Checks that the installed Megatron has every name that this project rebinds, and
rebinds.

Invariant: if Megatron has drifted from any row of `patches.py`, nothing is rebound, and
the program stops with one line that names the version found and the one expected.
(tests/megatron_names.py has the names that are only set or read.)
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_2bw.base.errors import UserError

# the second is Megatron's main branch; `make test-next` runs the bitwise tests on it
SUPPORTED = ("0.19", "0.20")


class DriftError(UserError):
    """The installed Megatron is not the one that the rows were written for."""


@dataclass(frozen=True)
class Patch:
    """One rebinding: `module.name`, whose parameters must be `parameters`, becomes
    `replace(original)`.

    `name` may be Class.method. `parameters` are names with spaces between; None for
    what is not called.
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
        """What Megatron holds now. Raises DriftError if it is missing or has other
        parameters."""
        found = _find(self.module, self.name)
        if self.parameters is not None:
            taken, expected = (
                [*inspect.signature(found).parameters],
                self.parameters.split(),
            )
            if taken != expected:
                where = f"{self.module}.{self.name}"
                raise _drift(
                    f"{where} takes ({', '.join(taken)}), expected ({', '.join(expected)})"
                )
        return found


def row(module: str, names: str, reason: str, replace: Callable) -> Patch:
    """A patch of "name(parameters)"; a name without parentheses is not called."""
    name, called, parameters = names.removesuffix(")").partition("(")
    return Patch(module, name, parameters if called else None, reason, replace)


def around(replacement: Callable) -> Callable:
    """Decorates a function, or a method, that is called with the original and its
    arguments: the `replace` of a Patch.

    What has the replacement already is left as it is.
    """

    # the method's object, if it is one, and the original
    def replace(*bound: Any) -> Callable:
        *_, original = bound
        if getattr(original, "replacement", None) == (replacement, *bound[:-1]):
            return original

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return replacement(*bound, *args, **kwargs)

        call.replacement = (replacement, *bound[:-1])
        return call

    return replace


def arguments(
    function: Callable, args: Sequence[Any], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by the function's names of them, with its defaults."""
    values = inspect.signature(function).bind(*args, **kwargs)
    values.apply_defaults()
    return values.arguments


def _find(module: str, name: str) -> Any:
    """What the module holds under a name with or without dots; without a name the
    module itself."""
    try:
        return pkgutil.resolve_name(f"{module}:{name}")
    except (ImportError, AttributeError) as error:
        raise _drift(f"{module}.{name} is missing") from error


def apply(patches: Sequence[Patch]) -> Callable[[], None]:
    """Check all rows, then make all rebindings. Returns a function that undoes them.
    Raises DriftError."""
    if not _installed().startswith(tuple(f"{version}." for version in SUPPORTED)):
        raise DriftError(
            f"megatron-core {_installed()} is installed, megatron_2bw needs {SUPPORTED[0]}"
        )
    originals = [patch.original() for patch in patches]
    for patch, original in zip(patches, originals):
        patch.put(patch.replace(original))

    def undo() -> None:
        for patch, original in reversed(list(zip(patches, originals))):
            patch.put(original)

    return undo


def _installed() -> str:
    # `__version__` carries the git revision of whatever checkout holds the environment;
    # VERSION does not.
    from megatron.core.package_info import VERSION

    return ".".join(map(str, VERSION[:3]))


def _drift(what: str) -> DriftError:
    return DriftError(
        f"{what}: megatron_2bw needs megatron-core {SUPPORTED[0]} as released, found {_installed()}"
    )
