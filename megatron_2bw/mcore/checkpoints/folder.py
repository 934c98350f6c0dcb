"""The folder of a run's checkpoints: no saved checkpoint is lost, and each is checked
before it is read.

Megatron writes a checkpoint to iter_NNNNNNN and then its name to the tracker,
latest_checkpointed_iteration.txt.

Invariants:
- the tracker is never empty or half-written, and names a checkpoint that was whole;
- when an iteration is saved again, its old checkpoint is kept, whole, as
  replaced_iter_NNNNNNN until the tracker names the new one. While it exists it takes
  precedence: `restore_old` puts it back.
"""

import contextlib
import io
import json
import os
import shutil
import time
import uuid
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from megatron_2bw.base.files import write_whole

TRACKER = "latest_checkpointed_iteration.txt"
ASIDE = "replaced_"  # prefix of an old checkpoint while its iteration is saved again
DELETED = "deleted_"  # prefix of what is being deleted, which can take long

type Folder = str | os.PathLike


def checkpoint_name(iteration: int) -> str:
    return f"iter_{iteration:07d}"


class TrackerFiles:
    """Megatron's access to files, with trackers that are replaced in one step."""

    def __init__(self, original: Any):
        self._original = original

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._original, attribute)

    def open(self, path: Folder, mode: str = "r", *args, **kwargs) -> Any:
        local = "://" not in str(path)
        if mode == "w" and local and os.path.basename(path) == TRACKER:
            return _new_tracker(Path(path))
        return self._original.open(path, mode, *args, **kwargs)


@contextlib.contextmanager
def _new_tracker(path: Path) -> Iterator[io.StringIO]:
    """Inside, the new content is written; it replaces the old one at the end, without
    an exception."""
    file = io.StringIO()
    yield file
    text = file.getvalue()
    write_whole(path, text, sync=True, before=partial(_drop_old, path.parent, text))
    _delete_leftovers(path.parent)


def _drop_old(folder: Path, iteration: str) -> None:
    """The new tracker is on the disk: the old checkpoint loses precedence."""
    if not iteration.strip().isdecimal():
        return
    aside = folder / f"{ASIDE}{checkpoint_name(int(iteration))}"
    if aside.is_dir():
        aside.rename(folder / f"{DELETED}{uuid.uuid4().hex}")


def _delete_leftovers(folder: Path) -> None:
    for path in folder.glob(DELETED + "*"):
        shutil.rmtree(path, ignore_errors=True)
    # A run that was killed while it wrote the tracker leaves these.
    for path in folder.glob(f".{TRACKER}.*"):
        path.unlink(missing_ok=True)


def set_aside_old(folder: Folder, iteration: int) -> None:
    """Before a checkpoint is written: keep the one of the same iteration, if it is
    whole.

    On one rank only, before any rank writes.
    """
    _delete_leftovers(Path(folder))
    target = Path(folder, checkpoint_name(iteration))
    aside = target.with_name(ASIDE + target.name)
    if not aside.exists() and not target.is_symlink() and _is_whole(target):
        target.rename(aside)


def restore_old(folder: Folder) -> None:
    """After a run that ended while it saved an iteration again: put the old checkpoint
    back.

    On one rank only, in the folder that this run saves to, and only while no checkpoint
    is written.
    """
    for aside in _set_aside(folder):
        target = aside.with_name(aside.name.removeprefix(ASIDE))
        shutil.rmtree(target, ignore_errors=True)
        aside.rename(target)


def await_restored(folder: Folder) -> None:
    """On the other ranks: wait until the first has put the old checkpoints back, at
    most a minute."""
    deadline = time.monotonic() + 60
    while _set_aside(folder) and time.monotonic() < deadline:
        time.sleep(0.1)


def _set_aside(folder: Folder) -> list[Path]:
    """The old checkpoints whose iterations are being saved again."""
    return list(Path(folder).glob(ASIDE + "iter_*"))


def same_folder(one: str | None, other: str | None) -> bool:
    """Whether two flags name the same folder of this file system."""
    if not one or not other or "://" in one:
        return False
    return os.path.realpath(one) == os.path.realpath(other)


def source(args: Any) -> tuple[str, str | None]:
    """The flag whose folder a run with these arguments loads, by Megatron's choice, and
    the folder."""
    saved_here = args.load and os.path.isfile(Path(args.load, TRACKER))
    if args.pretrained_checkpoint and not saved_here:
        return "--pretrained-checkpoint", args.pretrained_checkpoint
    return "--load", args.load


def _is_whole(checkpoint: Path) -> bool:
    """Whether it has the last file of a distributed format, or the files of the older
    format."""
    last = ("metadata.json", ".metadata", "mp_rank_*/*.pt")
    return any(any(checkpoint.glob(name)) for name in last)


def root(error: BaseException) -> BaseException:
    """The system's error behind an error of torch's stream writer, or the error
    itself."""
    cause = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause or error


def saved_iterations(folder: Folder) -> list[int]:
    """The iterations with a whole checkpoint, ascending."""
    iterations = []
    for path in Path(folder).glob("iter_*"):
        number = path.name.removeprefix("iter_")
        if number.isdecimal() and _is_whole(path):
            iterations.append(int(number))
    return sorted(iterations)


def latest_iteration(folder: Folder) -> int | None:
    """The iteration that the tracker names; None if it names none."""
    try:
        text = Path(folder, TRACKER).read_text().strip()
    except (OSError, ValueError):
        return None
    return int(text) if text.isdecimal() else None


def problem(
    folder: Folder,
    step: int | None = None,
    ours: bool = True,
    kind: str = "torch_dist",
) -> str | None:
    """One line about the damage of the checkpoint that would be loaded from `folder`,
    or None.

    step  the iteration, if it is not the tracker's
    ours  whether the run saves there too, and so may put back an old checkpoint
    kind  the run's --ckpt-format

    Checks the sizes of all files, not their content.
    """
    text = str(step or Path(folder, TRACKER).read_text(errors="replace"))
    name = text.strip()
    if name.isdecimal():
        name = checkpoint_name(int(name))
    checkpoint = Path(folder, name)
    aside = Path(folder, ASIDE + name)
    if name and aside.is_dir():
        if not ours:
            return (
                f"{name} is being saved again, or a run was killed during that: a run "
                "with it as --save repairs it"
            )
        checkpoint = aside
    if not name or not checkpoint.is_dir():
        missing = name[:40] or f"iteration in {TRACKER}"
        return f"there is no {missing}: {_remedy(folder, name)}"
    if kind in ("torch_dcp", "fsdp_dtensor"):
        return None  # These formats write no file last.
    damage = _damage(checkpoint)
    if damage is None:
        return None
    return f"{name} {damage}: {_remedy(folder, name)}"


def _remedy(folder: Folder, damaged: str) -> str:
    others = []
    for iteration in saved_iterations(folder):
        if checkpoint_name(iteration) != damaged:
            others.append(str(iteration))
    if not others:
        return "there is no other"
    return f"load another with --ckpt-step N, whole ones are {', '.join(others[-5:])}"


def _damage(checkpoint: Path) -> str | None:
    from megatron_2bw.mcore.checkpoints.unpickle import Refused, read_metadata

    older = sorted(checkpoint.glob("mp_rank_*/*.pt"))
    for file in older:
        if not zipfile.is_zipfile(file):
            name = file.relative_to(checkpoint)
            return f"is damaged ({name} is cut short or no file of torch)"
    if older:
        return None
    try:
        json.loads(Path(checkpoint, "metadata.json").read_text())
        with open(checkpoint / ".metadata", "rb") as file:
            places = read_metadata(file).storage_data.values()
    except Refused as error:
        return f"is refused ({error})"
    except FileNotFoundError as error:
        file_name = os.path.basename(error.filename)
        return f"was not written to its end, or not by Megatron (no file {file_name})"
    except Exception as error:  # unpickling fails in many ways
        return f"is damaged (metadata.json or .metadata: {type(error).__name__})"
    needed = {}
    for place in places:
        size = needed.get(place.relative_path, 0)
        needed[place.relative_path] = max(size, place.offset + place.length)
    for name, size in sorted(needed.items()):
        path = checkpoint / name
        present = path.stat().st_size if path.is_file() else 0
        if present < size:
            return f"is damaged ({name} has {present} of {size} bytes)"
    return None
