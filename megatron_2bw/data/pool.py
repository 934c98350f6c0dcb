"""Worker processes that run one task after another.

Invariant: no worker outlives the pool, even if an error, a signal or a kill ends the pool's process. At most one task
waits for a worker.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any

from megatron_2bw.errors import UserError
from megatron_2bw.processes import end_with_parent

_job: Callable[[Any], Any]  # of a worker's pool; it may keep what it loads


def _begin(job: Callable[[Any], Any]) -> None:
    global _job
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the pool stops its workers
    _job = job


def _work(task: Any) -> Any:
    try:
        return _job(task)
    except UserError:
        raise
    except OSError as error:
        raise ChildProcessError(f"{error.filename or 'a file'}: {error.strerror or error}") from None
    except Exception as error:  # of a library, on some text: the line must name it
        reason = (str(error).splitlines() or [""])[0]
        raise ChildProcessError(f"a worker failed with {type(error).__name__}: {reason}") from None


class Pool:
    """`count` processes that call `job`, which must be picklable. Use as a context manager."""

    def __init__(self, count: int, job: Callable[[Any], Any]):
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process for each core is enough
        context = multiprocessing.get_context("spawn")  # threads of the libraries do not survive a fork
        self._count, self._executor = count, ProcessPoolExecutor(count, context, _begin, (job,))
        self._processes = self._executor._processes  # by id; the executor forgets them when it ends

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_error) -> None:
        """Kill the workers, by their ids: their unfinished files are not in place yet."""
        for process in self._processes.values():
            process.kill()
        self._executor.shutdown()

    def map(self, tasks: Iterable[Any]) -> Iterator[Any]:
        """The results, in order of completion. Raises the first error."""
        tasks, running = iter(tasks), set[Future]()
        while True:
            for task in islice(tasks, self._count + 1 - len(running)):  # one is read while the workers are busy
                running.add(self._executor.submit(_work, task))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            try:
                yield from [future.result() for future in done]
            except BrokenProcessPool:
                self._executor.shutdown()  # the others end by SIGTERM
                codes = {process.exitcode for process in self._processes.values()} - {0, -signal.SIGTERM}
                code = min(codes, default=-signal.SIGTERM)
                killed = "was killed, perhaps for memory: fewer --workers need less"
                raise ChildProcessError(f"a worker process {killed if code == -9 else f'ended with {code}'}") from None
