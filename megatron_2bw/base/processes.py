"""Child processes: none outlives its parent, a tree ends as a whole, a port stays free
until its server starts."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import socket
import subprocess
import sys

import psutil

PR_SET_PDEATHSIG = 1  # from Linux' prctl.h


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Let the kernel signal this process when the thread that started it ends; kill it
    if the parent has ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        os.kill(os.getpid(), signal.SIGKILL)


def exit_on_signals() -> None:
    """SIGTERM and SIGHUP raise SystemExit, so that `finally` blocks stop the children;
    nohup's SIGHUP stays ignored."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _exit)


def _exit(number: int, frame: object) -> None:
    sys.exit(128 + number)


def stop_tree(process: subprocess.Popen, patience: float = 0.0) -> None:
    """Stop a process and all its descendants: it gets SIGTERM, and what is left after
    `patience` seconds SIGKILL.

    By process id, and by the groups that the tree has made: torchrun's ranks lead
    groups of their own, and a group also holds the processes whose parents have ended.
    Waits for all of them.
    """
    if process.poll() is not None:
        return
    root = psutil.Process(process.pid)
    tree = root.children(recursive=True)
    groups = set()
    for member in (root, *tree):
        with contextlib.suppress(ProcessLookupError):
            groups.add(os.getpgid(member.pid))
    if patience:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    process.kill()
    for member in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()  # refuses an id that another process has by now
    for group in groups - {os.getpgrp()}:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    process.wait()
    psutil.wait_procs(tree, 5)


def free_port() -> int:
    """A port that the kernel gives to no other process for a minute, but to a server
    that sets SO_REUSEADDR.

    Torch's stores and Slurm's daemons set it. A connection that was closed on this side
    keeps its port in TIME_WAIT; a port that was only seen to be free may be another
    process's, or a gloo socket's, before its server starts.
    """
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        with socket.create_connection(server.getsockname()):
            server.accept()[0].close()  # first on this side
            return server.getsockname()[1]
