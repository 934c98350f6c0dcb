"""Checks that the installed Megatron has every name that this project rebinds, and
rebinds.

Invariant: if Megatron has drifted from any row of `patches.py`, nothing is rebound, and
the program stops with one line that names the version found and the one expected.
(tests/megatron_names.py has the names that are only set or read.)
"""

import contextlib
import functools
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Sequence
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
    replace: Callable[[Any], Any]

    def put(self, value: Any) -> None:
        holder, _, name = self.name.rpartition(".")
        owner = _find(self.module, holder)
        if isinstance(inspect.getattr_static(owner, name), staticmethod):
            value = staticmethod(value)
        setattr(owner, name, value)

    def original(self) -> Any:
        """What Megatron holds now. Raises DriftError if it is missing or has other
        parameters."""
        original = _find(self.module, self.name)
        if self.parameters is not None:
            taken = ", ".join(inspect.signature(original).parameters)
            expected = ", ".join(self.parameters.split())
            if taken != expected:
                where = f"{self.module}.{self.name}"
                raise _drift(f"{where} takes ({taken}), expected ({expected})")
        return original


def rows(modules: dict[str, dict[str, Callable]]) -> list[Patch]:
    """Patches of "name(parameters)" in each module; a name without parentheses is not
    called."""
    patches = []
    for module, replacements in modules.items():
        for signature, replace in replacements.items():
            name, called, parameters = signature.removesuffix(")").partition("(")
            taken = parameters if called else None
            patches.append(Patch(module, name, taken, replace))
    return patches


def constant(value: Any) -> Callable:
    """A function that returns the value, whatever its arguments. As the `replace` of a
    Patch: the value, whatever Megatron has."""

    def function(*args, **kwargs) -> Any:
        return value

    return function


def unchanged(value: Any, *args, **kwargs) -> Any:
    """In the place of a function that has nothing to do: its first argument."""
    return value


def around(replacement: Callable) -> Callable:
    """Decorates a function, or a method, that is called with the original and its
    arguments: the `replace` of a Patch.

    What has the replacement already is left as it is.
    """

    # the method's object, if it is one, and the original
    def replace(*bound: Any) -> Callable:
        original = bound[-1]
        mark = (replacement, *bound[:-1])
        if getattr(original, "replacement", None) == mark:
            return original

        @functools.wraps(original)
        def call(*args, **kwargs) -> Any:
            return replacement(*bound, *args, **kwargs)

        call.replacement = mark
        return call

    return replace


@contextlib.contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[dict[str, Any]]:
    """Inside, attributes of `owner` have these values; yields what they were."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield before
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


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


def apply(patches: Sequence[Patch]) -> Callable:
    """Check all rows, then make all rebindings. Returns a function that undoes them.
    Raises DriftError."""
    version = _installed()
    if version.rpartition(".")[0] not in SUPPORTED:
        raise DriftError(
            f"megatron-core {version} is installed, megatron_2bw needs {SUPPORTED[0]}"
        )
    undo = contextlib.ExitStack()
    originals = [patch.original() for patch in patches]
    for patch, original in zip(patches, originals):
        patch.put(patch.replace(original))
        undo.callback(patch.put, original)
    return undo.close


def _installed() -> str:
    # `__version__` carries the git revision of whatever checkout holds the environment;
    # VERSION does not.
    from megatron.core.package_info import VERSION

    return ".".join(map(str, VERSION[:3]))


def _drift(what: str) -> DriftError:
    return DriftError(
        f"{what}: megatron_2bw needs megatron-core {SUPPORTED[0]} as released, found "
        f"{_installed()}"
    )
