"""Worker processes that run one task after another.

Invariant: no worker outlives the pool, even if an error, a signal or a kill ends the pool's process. A worker has one
task at a time, so at most one task per worker waits.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

from megatron_2bw.errors import UserError
from megatron_2bw.processes import end_with_parent


def _work(connection: Connection, job: Callable[[Any], Any]) -> None:
    """A worker: answers each task with (True, result) or (False, error)."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the pool stops its workers
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        try:
            answer = (True, job(task))
        except UserError as error:
            answer = (False, error)
        except OSError as error:
            answer = (False, ChildProcessError(f"{error.filename or 'a file'}: {error.strerror or error}"))
        except Exception as error:  # of a library, on some text: the line must name it
            reason = (str(error).splitlines() or [""])[0]
            answer = (False, ChildProcessError(f"a worker failed with {type(error).__name__}: {reason}"))
        connection.send(answer)


class Pool:
    """`count` processes that call `job`, which must be picklable. Use as a context manager."""

    def __init__(self, count: int, job: Callable[[Any], Any]):
        context = multiprocessing.get_context("spawn")  # threads of the libraries do not survive a fork
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process for each core is enough
        self._workers = {}
        try:
            for _ in range(count):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs, job), daemon=True)
                process.start()
                theirs.close()
                self._workers[ours] = process
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_error) -> None:
        self.end()

    def end(self) -> None:
        """Kill the workers, by their ids: their unfinished files are not in place yet."""
        for connection, process in self._workers.items():
            connection.close()
            process.kill()
        for process in self._workers.values():
            process.join()
        self._workers = {}

    def map(self, tasks: Iterable[Any]) -> Iterator[Any]:
        """The results, in order of completion. Raises the first error."""
        tasks, busy, idle = iter(tasks), set(), list(self._workers)
        following = next(tasks, None)
        while following is not None or busy:
            while following is not None and idle:
                connection = idle.pop()
                busy.add(connection)
                self._talk(connection, lambda connection=connection, task=following: connection.send(task))
                following = next(tasks, None)  # read while the workers are busy
            for connection in wait(list(busy)):
                good, result = self._talk(connection, connection.recv)
                busy.discard(connection)
                idle.append(connection)
                if not good:
                    raise result
                yield result

    def _talk(self, connection: Connection, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except (EOFError, OSError):
            process = self._workers[connection]
            process.join(5)
            code = process.exitcode
            reason = "was killed, perhaps for memory: fewer --workers need less" if code == -9 else f"ended with {code}"
            raise ChildProcessError(f"a worker process {reason}") from None
