"""Everything that knows Megatron's training loop. For an entry script of your own:
`add_flags`, `check`, `install`."""

from importlib import import_module
from typing import Any

__all__ = ["add_flags", "check", "install"]


def __getattr__(name: str) -> Any:
    # When asked for (PEP 562): their module starts a run, so it imports this package.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("megatron_2bw.run.install"), name)
