"""Child processes: none outlives its parent, a tree ends as a whole, a port stays free until its server starts."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time

import psutil

PR_SET_PDEATHSIG = 1  # from Linux' prctl.h


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends; here, if the parent has ended already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        os.kill(os.getpid(), signal.SIGKILL)


def exit_on_signals() -> None:
    """SIGTERM and SIGHUP raise SystemExit, so that `finally` blocks stop the children; nohup's SIGHUP stays ignored."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, frame: sys.exit(128 + number))


def stop_tree(process: subprocess.Popen | psutil.Process, patience: float = 0.0) -> None:
    """Stop a process and all its descendants: SIGTERM, and after `patience` seconds, or at once, SIGKILL.

    By process id, and by the groups that the tree has made: torchrun's ranks lead groups of their own, and a group
    also holds the processes whose parents have ended. Waits for the process.
    """
    if isinstance(process, subprocess.Popen) and process.poll() is not None:
        return
    members = []
    with contextlib.suppress(psutil.NoSuchProcess):
        leader = psutil.Process(process.pid)
        members = [leader, *leader.children(recursive=True)]
    for number, seconds in [(signal.SIGTERM, patience)] * (patience > 0) + [(signal.SIGKILL, 5.0)]:
        groups = set()
        for member in members:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                group = os.getpgid(member.pid)
                if group == os.getpgrp():
                    member.send_signal(number)  # refuses an id that another process has by now
                elif member.is_running():
                    groups.add(group)
        for group in groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, number)
        deadline = time.monotonic() + seconds
        while (members := [member for member in members if _runs(member)]) and time.monotonic() < deadline:
            time.sleep(0.02)
    process.wait(5)


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def free_port() -> int:
    """A port that the kernel gives to no other process for a minute, but to a server that sets SO_REUSEADDR.

    Torch's stores and Slurm's daemons set it. A connection that was closed on this side keeps its port in TIME_WAIT; a
    port that was only seen to be free may be another process's, or a gloo socket's, before its server starts.
    """
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        with socket.create_connection(server.getsockname()):
            server.accept()[0].close()  # first on this side
            return server.getsockname()[1]
