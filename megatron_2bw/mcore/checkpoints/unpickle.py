"""What of a checkpoint is unpickled: only the classes that torch and Megatron save.

Invariant: loading a checkpoint runs no code of whoever wrote it.
"""

import dataclasses
import enum
import io
import pickle
import re
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import CheckpointException  # noqa: F401  (whose causes these are)

_CHECKPOINT = "torch.distributed.checkpoint"
_MODULES = [f"{_CHECKPOINT}.{name}" for name in ("metadata", "planner", "filesystem")]
_NAMES = {
    "torch.Size",
    "torch.serialization._get_layout",
    "collections.OrderedDict",
}


class Refused(pickle.UnpicklingError):
    """The checkpoint names what torch and Megatron do not save."""


class _Metadata(pickle.Unpickler):
    """Reads a file .metadata: the records that torch writes there, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" in _NAMES:
            return super().find_class(module, name)
        # the latter from Python 3.13 on
        if module in ("pathlib", "pathlib._local") and name == "PosixPath":
            return Path
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module in _MODULES:
            entry = super().find_class(module, name)
            if _is_record(entry) and entry.__module__ == module:
                return entry
        raise Refused(
            f".metadata names {module}.{name}, which is no record of torch's and could "
            "run code"
        )


def _is_record(entry: Any) -> bool:
    if not isinstance(entry, type):
        return False
    return dataclasses.is_dataclass(entry) or issubclass(entry, enum.Enum)


def read_metadata(file: BinaryIO) -> Any:
    """torch's Metadata from an open file .metadata. Raises Refused if it names anything
    else."""
    return _Metadata(file).load()


def check_bytes(name: str, content: io.BytesIO) -> None:
    """Raise Refused if the entry `name` holds what torch.load refuses with
    weights_only, its default."""
    try:
        torch.load(content, map_location="cpu")
    except pickle.UnpicklingError as error:
        match = re.search(r"Unsupported \w+:? (?:GLOBAL )?(\S+)", str(error))
        refused = match[1] if match else "what weights_only refuses"
        raise Refused(
            f"{name} names {refused}, which could run code: if you trust who wrote it, "
            "set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1"
        ) from None
    content.seek(0)


def causes(error: BaseException) -> str:
    """The messages of all ranks, which torch collects, without its lists of all
    names."""
    failures = getattr(error, "failures", None) or {}
    texts = set()
    for cause in failures.values():
        if isinstance(cause, tuple):
            cause = cause[0]
        texts.add(str(cause))
    text = "; ".join(sorted(texts)) or str(error)
    return re.sub(r": \[[^]]*\]", "", text)
