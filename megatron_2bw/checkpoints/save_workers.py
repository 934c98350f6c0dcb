"""Worker processes that write a rank's checkpoints: only where they are needed, and none outlives its rank.

A killed rank cannot stop its workers. A worker that survives holds memory that the next start of the job needs, and
keeps the job's output open, so that its reader never sees the end.
"""

from __future__ import annotations

import logging
import multiprocessing
import queue
from multiprocessing.managers import SyncManager
from typing import Any

from megatron_2bw.processes import end_with_parent

_queue: Any = None


def async_loop(
    rank: int,
    queue: Any,
    preload_q: Any,
    comp_q: Any,
    log_level: int = logging.INFO,
    cpu_priority: int = 10,
    io_priority: int | None = None,
) -> None:
    """The worker of asynchronous saves: Megatron's, which alone would wait forever once its rank is killed."""
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    end_with_parent()  # the rank, or a fork server that ends with it
    # In a new process this name is Megatron's own.
    PersistentAsyncCaller.async_loop(rank, queue, preload_q, comp_q, log_level, cpu_priority, io_priority)


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
