"""One run at a time saves to a folder: its first rank claims the folder in `.owner.json`.

Invariant: a run that is not the owner, or no longer, names no checkpoint in the folder. A dead run's claim is taken
over. On this host the process id and start time show whether the owner lives, elsewhere the age of its last heartbeat.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import socket
import threading
import time
import uuid
from pathlib import Path

from megatron_2bw.errors import UserError, file_errors

OWNER = ".owner.json"
BEAT = 10.0  # seconds between two heartbeats, which set the time of the file
SILENCE = 120.0  # seconds without a heartbeat after which an owner on another host counts as dead

_held: set[Path] = set()


def hold(folder: str | os.PathLike) -> None:
    """Claim the folder for this process, or check that the claim still stands. On the first rank only.

    Raises UserError if another run owns the folder, or if the folder cannot be written to.
    """
    if "://" in str(folder):
        return
    file, own = Path(os.path.realpath(folder), OWNER), _claim()
    with file_errors(f"--save {folder}"):
        file.parent.mkdir(parents=True, exist_ok=True)
        while (found := _read(file)) != own:
            if found is None:
                with contextlib.suppress(FileExistsError), open(file, "x") as new:
                    new.write(own)
                continue
            owner = _parsed(found)
            if owner is None:  # is it being written?
                time.sleep(1)
            if file in _held or (owner is not None and _lives(owner, file)):
                run = owner and "the run of process {pid} on {host} (claim of {time})".format(**owner)
                raise UserError(f"--save {folder}: {run or 'another run'} saves there: give each run its own folder")
            if _read(file) == found:
                file.unlink(missing_ok=True)
    if file not in _held:
        _held.add(file)
        atexit.register(_release, file, os.getpid())
        threading.Thread(target=_beat, args=(file,), name="owner", daemon=True).start()


def check(folder: str | os.PathLike) -> None:
    """Raises UserError if this process claimed the folder, and another run has taken it over."""
    if Path(os.path.realpath(folder), OWNER) in _held:
        hold(folder)


@functools.cache
def _claim() -> str:
    return json.dumps(
        {
            "host": socket.gethostname(),
            "kernel": _kernel(),
            "pid": os.getpid(),
            "started": _started(os.getpid()),
            "job": os.environ.get("SLURM_JOB_ID"),
            "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
    )


def _kernel() -> str:
    """Where process ids mean the same: this boot of this host, and the container."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")


def _started(pid: int) -> int | None:
    """When the process started, in clock ticks since the host did; None if it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(fields[18])


def _read(file: Path) -> str | None:
    try:
        return file.read_text(errors="replace")
    except FileNotFoundError:
        return None


def _parsed(text: str) -> dict | None:
    """The claim; None of a file that was not written to its end."""
    try:
        owner = json.loads(text)
    except ValueError:
        return None
    return owner if isinstance(owner, dict) and owner.keys() == json.loads(_claim()).keys() else None


def _lives(owner: dict, file: Path) -> bool:
    if owner["kernel"] == _kernel():
        return _started(owner["pid"]) == owner["started"]
    if owner["job"] is not None and owner["job"] == os.environ.get("SLURM_JOB_ID"):
        return False  # Slurm has requeued this job, and ended its processes before
    try:
        last = file.stat().st_mtime
        while _now(file.parent) - last < SILENCE:
            time.sleep(BEAT / 10)
            if file.stat().st_mtime != last:
                return True
    except FileNotFoundError:
        pass
    return False


def _now(folder: Path) -> float:
    """The time by the clock of the folder's file system."""
    probe = folder / f"{OWNER}.{uuid.uuid4().hex}"
    try:
        probe.touch()
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _beat(file: Path) -> None:
    while file in _held:
        with contextlib.suppress(OSError):
            if _read(file) == _claim():
                os.utime(file)
        time.sleep(BEAT)


def _release(file: Path, pid: int) -> None:
    with contextlib.suppress(OSError):
        if os.getpid() == pid and _read(file) == _claim():
            file.unlink()
