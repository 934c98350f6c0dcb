"""Ending a failed run: the rank that failed reports first, and every rank exits.

torchrun stops the other ranks of a node as soon as one has exited. Until then they see
closed connections. Those errors would hide the cause, so these ranks wait before they
report them.
"""

import contextlib
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from megatron_2bw.base.errors import UserError, one_line, report_error
from megatron_2bw.run.flags.stop import PATIENCE, program
from megatron_2bw.run.start import screen

GRACE = 20  # seconds that Python may take to exit: a flush can wait for a lost rank

# torch's messages on a rank that has lost another one.
_LOST = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused|aborted)|broken "
    r"pipe|socket (closed|has timed out|timeout)|"
    r"failed to (recv|send), |client socket has failed|"
    r"remote process|(gloo|nccl).*(timed out|abort|connect)|"
    r"ncclRemoteError|ncclSystemError|watchdog|connectFullMesh|wait timeout|"
    r"timed out waiting|recvValue failed|sendBytes failed",
    re.IGNORECASE | re.DOTALL,
)


def is_peer_failure(error: BaseException) -> bool:
    """Whether the error comes from the loss of another rank, or is reported there."""
    if isinstance(error, UserError):
        return error.reported_elsewhere
    import torch.distributed as dist

    # No other class: where a library cannot reach its server, the traceback is wanted.
    torchs = type(error) is RuntimeError or isinstance(error, dist.DistError)
    return torchs and bool(_LOST.search(str(error)))


def leave(error: Exception, flush: Callable | None = None) -> NoReturn:
    """End this rank after an exception in training, with status 1.

    flush: called after the report; the process ends within GRACE seconds in any case.
    """
    rank = os.environ.get("RANK", "0")
    why = ""
    if is_peer_failure(error):
        time.sleep(PATIENCE)
        line = one_line(error)
        why = f": another rank has ended or does not answer ({line})"
    elif isinstance(error, UserError):
        report_error(program(), error)
    else:
        screen.record(error)
        line = one_line(traceback.format_exception_only(error)[-1])
        why = f" with an exception: {line}"
        if place := screen.place():
            why += f" (traceback: {place})"
    if why:
        print(f"{program()}: rank {rank} ends{why}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    # the kernel ends the process then, even if Python waits
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(GRACE)
    if flush is not None:
        with contextlib.suppress(Exception):
            flush()
    sys.exit(1)
