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

from __future__ import annotations

import io
import json
import os
import shutil
import time
import uuid
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

from megatron_2bw.base.files import write_whole

TRACKER = "latest_checkpointed_iteration.txt"
ASIDE = "replaced_"  # prefix of an old checkpoint while its iteration is saved again
DELETED = "deleted_"  # prefix of what is being deleted, which can take long


def checkpoint_name(iteration: int) -> str:
    return f"iter_{iteration:07d}"


# --- writing
# --------------------------------------------------------------------------------------


class TrackerFiles:
    """Megatron's access to files, with trackers that are replaced in one step."""

    def __init__(self, original: Any):
        self._original = original

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._original, attribute)

    def open(self, path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if (
            mode == "w"
            and os.path.basename(str(path)) == TRACKER
            and "://" not in str(path)
        ):
            return _Tracker(Path(path))
        return self._original.open(path, mode, *args, **kwargs)


class _Tracker(io.StringIO):
    """The new content of a tracker, which replaces the old one at the end of a `with`
    without an exception."""

    def __init__(self, path: Path):
        super().__init__()
        self._path = path

    def __exit__(self, kind: Any, *exception: Any) -> None:
        text = self.getvalue()
        self.close()
        if kind is not None:
            return
        write_whole(
            self._path, text, sync=True, before=partial(self._replace_old, text)
        )
        _delete_leftovers(self._path.parent)

    def _replace_old(self, text: str) -> None:
        """The new tracker is on the disk: the old checkpoint loses precedence."""
        if text.strip().isdecimal():
            aside = self._path.with_name(ASIDE + checkpoint_name(int(text)))
            if aside.is_dir():
                aside.rename(aside.with_name(f"{DELETED}{uuid.uuid4().hex}"))


def _delete_leftovers(folder: Path) -> None:
    for path in folder.glob(DELETED + "*"):
        shutil.rmtree(path, ignore_errors=True)
    # of a run that was killed while it wrote the tracker
    for path in folder.glob(f".{TRACKER}.*"):
        path.unlink(missing_ok=True)


def set_aside_old(folder: str | os.PathLike, iteration: int) -> None:
    """Before a checkpoint is written: keep the one of the same iteration, if it is
    whole.

    On one rank only, before any rank writes.
    """
    _delete_leftovers(Path(folder))
    target = Path(folder, checkpoint_name(iteration))
    aside = target.with_name(ASIDE + target.name)
    if not aside.exists() and not target.is_symlink() and _is_whole(target):
        target.rename(aside)


def restore_old(folder: str | os.PathLike) -> None:
    """After a run that ended while it saved an iteration again: put the old checkpoint
    back.

    On one rank only, in the folder that this run saves to, and only while no checkpoint
    is written.
    """
    for aside in Path(folder).glob(ASIDE + "iter_*"):
        target = aside.with_name(aside.name.removeprefix(ASIDE))
        shutil.rmtree(target, ignore_errors=True)
        aside.rename(target)


def await_restored(folder: str | os.PathLike, seconds: float = 60) -> None:
    """On the other ranks: wait until the first has put the old checkpoints back."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(Path(folder).glob(ASIDE + "iter_*")):
        time.sleep(0.1)


def same_folder(one: str | None, other: str | None) -> bool:
    """Whether two flags name the same folder of this file system."""
    return (
        bool(one and other)
        and "://" not in one
        and os.path.realpath(one) == os.path.realpath(other)
    )


def source(args) -> tuple[str, str | None]:
    """The flag whose folder a run with these arguments loads, by Megatron's choice, and
    the folder."""
    own = args.load and os.path.isfile(Path(args.load, TRACKER))
    flag = (
        "--load" if own or not args.pretrained_checkpoint else "--pretrained-checkpoint"
    )
    return flag, args.load if flag == "--load" else args.pretrained_checkpoint


def _is_whole(checkpoint: Path) -> bool:
    """Whether it has the last file of a distributed format, or the files of the older
    format."""
    last = any(
        Path(checkpoint, file).is_file() for file in ("metadata.json", ".metadata")
    )
    return last or any(checkpoint.glob("mp_rank_*/*.pt"))


def root(error: BaseException) -> BaseException:
    """The system's error behind an error of torch's stream writer, or the error
    itself."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return found or error


# --- reading
# --------------------------------------------------------------------------------------


def saved_iterations(folder: str | os.PathLike) -> list[int]:
    """The iterations with a whole checkpoint, ascending."""
    numbers = [
        path.name.removeprefix("iter_")
        for path in Path(folder).glob("iter_*")
        if _is_whole(path)
    ]
    return sorted(int(number) for number in numbers if number.isdecimal())


def latest_iteration(folder: str | os.PathLike) -> int | None:
    """The iteration that the tracker names; None if it names none."""
    try:
        text = Path(folder, TRACKER).read_text().strip()
    except (OSError, ValueError):
        return None
    return int(text) if text.isdecimal() else None


def problem(
    folder: str | os.PathLike,
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
    text = str(step or Path(folder, TRACKER).read_text(errors="replace").strip())
    which = checkpoint_name(int(text)) if text.isdecimal() else text
    checkpoint, aside = Path(folder, which), Path(folder, ASIDE + which)
    others = [
        str(number)
        for number in saved_iterations(folder)
        if checkpoint_name(number) != which
    ][-5:]
    remedy = (
        f"load another with --ckpt-step N, whole ones are {', '.join(others)}"
        if others
        else "there is no other"
    )
    if aside.is_dir() and which:
        if not ours:
            return (
                f"{which} is being saved again, or a run was killed during that: a "
                "run with it as --save repairs it"
            )
        checkpoint = aside
    if not which or not checkpoint.is_dir():
        return f"there is no {which[:40] or f'iteration in {TRACKER}'}: {remedy}"
    # these write no file last
    damage = None if kind in ("torch_dcp", "fsdp_dtensor") else _damage(checkpoint)
    return damage and f"{which} {damage}: {remedy}"


def _damage(checkpoint: Path) -> str | None:
    from megatron_2bw.mcore.checkpoints.unpickle import Refused, read_metadata

    if older := sorted(checkpoint.glob("mp_rank_*/*.pt")):
        bad = [path for path in older if not zipfile.is_zipfile(path)]
        return (
            f"is damaged ({bad[0].relative_to(checkpoint)} is cut short or no file of torch)"
            if bad
            else None
        )
    try:
        json.loads(Path(checkpoint, "metadata.json").read_text())
        with open(checkpoint / ".metadata", "rb") as file:
            places = read_metadata(file).storage_data.values()
    except Refused as error:
        return f"is refused ({error})"
    except FileNotFoundError as error:
        return (
            "was not written to its end, or not by Megatron (no file "
            f"{Path(error.filename).name})"
        )
    except Exception as error:  # unpickling fails in many ways
        return f"is damaged (metadata.json or .metadata: {type(error).__name__})"
    needed: dict[str, int] = {}
    for place in places:
        needed[place.relative_path] = max(
            needed.get(place.relative_path, 0), place.offset + place.length
        )
    for path, size in sorted(needed.items()):
        found = (
            Path(checkpoint, path).stat().st_size
            if Path(checkpoint, path).is_file()
            else 0
        )
        if found < size:
            return f"is damaged ({path} has {found} of {size} bytes)"
    return None
