"""The process that holds the results of a rank's saves: only where it is needed, and it does not outlive its rank.

A killed rank cannot stop it. If it survives it keeps the job's output open, and the reader of the output never sees the
end.
"""

from __future__ import annotations

import multiprocessing
import queue
from multiprocessing.managers import SyncManager
from typing import Any

from megatron_2bw.processes import end_with_parent

_queue: Any = None


def root(error: BaseException) -> BaseException:
    """The system's error behind an error of torch's stream writer, or the error itself."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError):
            return found
        found = found.__cause__ or found.__context__
    return error


def results_queue(mp_mode: str = "spawn") -> Any:
    """The queue of a save's write results: replaces Megatron's get_write_results_queue.

    A synchronous save puts and gets in one process. An asynchronous one writes in another process, and its results may
    be larger than a pipe's buffer, so a third process holds them.
    """
    from megatron.training import get_args

    global _queue
    if not get_args().async_save:
        return queue.Queue()
    if _queue is None:
        manager = SyncManager(ctx=multiprocessing.get_context(mp_mode))
        manager.start(end_with_parent)
        _queue = manager.Queue()
    return _queue
