"""How a run ends that cannot go on: the rank with the cause speaks first, and no rank stays behind.

torchrun ends the other ranks of a node as soon as one has ended. What those see before that, a connection that is
closed, is an effect and would bury the cause: they wait for a while before they speak.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

import torch.distributed as dist

PATIENCE = 5  # seconds that a rank without a cause of its own waits to be ended
GRACE = 20  # seconds that Python may take to leave: its last words can wait for a rank that is gone


class Fault(RuntimeError):
    """What ends a run and is told to the user in one line, without a traceback.

    told: another rank tells it.
    """

    def __init__(self, message: str, told: bool = False):
        super().__init__(message)
        self.told = told


# What torch says on a rank when another one is gone.
_LOST = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused|aborted)|broken pipe|socket (closed|has timed out|timeout)|"
    r"failed to (recv|send), |client socket has failed|"
    r"remote process|(gloo|nccl).*(timed out|abort|connect)|"
    r"ncclRemoteError|ncclSystemError|watchdog|connectFullMesh|wait timeout|"
    r"timed out waiting|recvValue failed|sendBytes failed",
    re.IGNORECASE | re.DOTALL,
)


def is_effect(error: BaseException) -> bool:
    """Whether the error says that another rank is gone, or is told there."""
    if isinstance(error, Fault):
        return error.told
    # Not other kinds: a library that cannot reach its server is a cause, whose traceback is wanted.
    ours = type(error) is RuntimeError or isinstance(error, dist.DistError)
    return ours and bool(_LOST.search(str(error)))


def end(error: Exception, last_words: Callable[[], None] | None = None) -> NoReturn:
    """End this rank after an exception in training, with status 1.

    last_words: called once the cause is told; whatever it does, the process ends within GRACE seconds.
    """
    rank = os.environ.get("RANK", "0")
    if is_effect(error):
        time.sleep(PATIENCE)
        line = " ".join(str(error).split())
        text = f"{_program()}: rank {rank} ends: another rank has ended or does not answer ({line})"
    elif isinstance(error, Fault):
        text = f"{_program()}: error: {' '.join(str(error).split())}"
    else:
        text = f"{_program()}: rank {rank} ends with an exception\n" + "".join(traceback.format_exception(error))
    sys.stdout.flush()
    print(text.rstrip(), file=sys.stderr, flush=True)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the system ends the process then, whatever Python waits for
    signal.alarm(GRACE)
    if last_words is not None:
        with contextlib.suppress(Exception):
            last_words()
    sys.exit(1)


def _program() -> str:
    return os.path.basename(sys.argv[0])
