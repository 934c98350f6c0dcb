"""One run at a time saves to a folder: its first rank holds a lock of the kernel on a
file there.

Invariant: the lock ends with the process that holds it, however it ends, and with
nothing else.
"""

import errno
import os
import socket
import time
from pathlib import Path

from filelock import FileLock, Timeout

from megatron_2bw.base.errors import UserError, file_errors

OWNER = ".owner.lock"
# seconds after which a server of NFS has dropped the locks of a host that is gone (90
# by default)
LEASE = 120.0

_held = {}  # locks, by file


def hold(folder: str | os.PathLike) -> None:
    """Claim the folder until this process ends. On the first rank only.

    Raises UserError if another run holds it, or if the folder cannot be written to.
    """
    file = Path(os.path.realpath(folder), OWNER)
    if "://" in str(folder) or file in _held:
        return
    lock = FileLock(file, mode=0o666, thread_local=False, fallback_to_soft=False)
    here = socket.gethostname()
    with file_errors(f"--save {folder}"):
        file.parent.mkdir(parents=True, exist_ok=True)
        run = file.read_text(errors="replace") if file.exists() else ""
        elsewhere = run and f" on {here} " not in run
        try:
            lock.acquire(timeout=LEASE if elsewhere else 1)
        except Timeout:
            who = file.read_text(errors="replace") or "another run"
            line = f"{who} saves there: give each run its own folder"
            raise UserError(f"--save {folder}: {line}") from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            line = f"no locks there ({error.strerror}): nothing keeps a second run out"
            print(f"> --save {folder}: {line}", flush=True)
            return
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        file.write_text(f"the run of process {os.getpid()} on {here} (since {since})")
    _held[file] = lock
