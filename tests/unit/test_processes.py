"""Child processes and ports."""

import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from megatron_2bw.base.processes import exit_on_signals, free_port, stop_tree

SLEEP = "import time; time.sleep(60)"


def gone(pid: int) -> bool:
    if not psutil.pid_exists(pid):
        return True
    return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("patience", [0, 5])
def test_a_tree_is_stopped_with_its_sessions(patience):
    worker = (
        f"subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True)"
    )
    script = (
        f"import subprocess, sys, time; print({worker}.pid, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    child = int(process.stdout.readline())
    stop_tree(process, patience)
    assert process.wait(5) == -(signal.SIGTERM if patience else signal.SIGKILL)
    assert gone(child)
    stop_tree(process)  # nothing left: no error


def test_a_child_whose_parent_has_ended_is_stopped_with_its_group():
    """The worker leads a group; its first child has ended and left a grandchild, which
    is now a child of init."""
    orphan = f"subprocess.Popen([sys.executable, '-c', {SLEEP!r}])"
    middle = f"import subprocess, sys; print({orphan}.pid, flush=True)"
    script = (
        "import subprocess, sys, time; subprocess.run([sys.executable, '-c', "
        f"{middle!r}]); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True
    )
    left = int(process.stdout.readline())
    deadline = time.monotonic() + 10
    while (
        psutil.Process(left).ppid() not in (1, os.getpid())
        and time.monotonic() < deadline
    ):
        time.sleep(0.01)
    stop_tree(process)
    process.wait(5)
    while not gone(left) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert gone(left)


def test_a_port_is_kept_for_a_server_that_reuses_addresses():
    port = free_port()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        # what is refused by name is not given by the kernel's choice either
        other.bind(("127.0.0.1", port))
    with (
        socket.create_server(("127.0.0.1", port)) as server,
        socket.create_connection(server.getsockname()),
    ):
        assert server.getsockname()[1] == port


def test_signals_end_the_script_but_for_the_hangup_that_nohup_ignores():
    before = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        before[number] = signal.getsignal(number)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        exit_on_signals()
        for number in before:
            with pytest.raises(SystemExit) as end:
                signal.raise_signal(number)
            assert end.value.code == 128 + number
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        exit_on_signals()
        signal.raise_signal(signal.SIGHUP)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
