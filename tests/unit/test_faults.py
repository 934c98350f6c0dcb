"""Whose error is a cause and whose an effect, and what is said at the end."""

import multiprocessing
import signal
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest
import torch.distributed as dist

from megatron_2bw.base.errors import UserError
from megatron_2bw.mcore.repairs import queue_in_process
from megatron_2bw.run.start import exits

EFFECTS = [
    RuntimeError(
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed "
        "by peer [127.0.0.1]:5823"
    ),
    dist.DistNetworkError(
        "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown?"
    ),
    dist.DistNetworkError(
        "The client socket has failed to connect to any network address of (host, 29500)."
    ),
    dist.DistBackendError(
        "NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited"
    ),
    RuntimeError("[Rank 1] Watchdog caught collective operation timeout"),
    UserError("reported by another", reported_elsewhere=True),
]
CAUSES = [
    RuntimeError("found NaN in local forward loss calculation"),
    dist.DistBackendError(
        "NCCL error in: ProcessGroupNCCL.cpp:77, invalid usage: Duplicate GPU detected"
    ),
    dist.DistBackendError(
        "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error: Cuda failure 2 'out of memory'"
    ),
    dist.DistNetworkError(
        "The server socket has failed to listen on any local network address. port: 29500"
    ),
    ConnectionResetError(104, "Connection reset by peer"),
    RuntimeError("DataLoader timed out after 60 seconds"),
    OSError("HTTPSConnectionPool: Max retries exceeded: Connection refused"),
]


@pytest.mark.parametrize("error", EFFECTS + CAUSES, ids=str)
def test_effects_of_another_rank(error):
    assert exits.is_peer_failure(error) == (error in EFFECTS)


@pytest.mark.parametrize(
    "error, line, waits",
    [
        (UserError("--save x: no space\nleft"), "error: --save x: no space left", []),
        (ValueError("here"), "rank 3 ends with an exception: ValueError: here", []),
        (
            EFFECTS[0],
            "rank 3 ends: another rank has ended or does not answer",
            [exits.PATIENCE],
        ),
    ],
)
def test_a_cause_is_told_at_once_and_before_the_last_words_which_cannot_hide_it(
    error, line, waits, monkeypatch, capfd
):
    """In one line, but for an exception, whose traceback comes before. An effect waits
    for the cause."""
    waited = []
    before = []
    monkeypatch.setattr(exits.time, "sleep", waited.append)
    monkeypatch.setattr(exits, "signal", mock.Mock())
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr("megatron_2bw.run.start.screen._record", None)

    def last_words() -> None:
        before.extend(capfd.readouterr().err.splitlines())
        raise KeyError("there")

    with pytest.raises(SystemExit) as ended:
        exits.leave(error, last_words)
    assert ended.value.code == 1 and waited == waits and capfd.readouterr().err == ""
    assert line in before[-1]
    assert (len(before) > 1) == (type(error) is ValueError)


def test_a_rank_that_cannot_leave_is_ended(tmp_path):
    """A thread that waits for a lost rank for ever must not keep the process."""
    script = tmp_path / "script.py"
    script.write_text(
        "import threading, time\nfrom megatron_2bw.run.start import exits\nexits.GRACE = 1\n"
        "threading.Thread(target=time.sleep, args=(100,)).start()\n"
        "try:\n    raise ValueError('here')\nexcept ValueError as error:\n    exits.leave(error)\n"
    )
    run = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == -signal.SIGALRM and "ValueError: here" in run.stderr


def saving_rank(numbers) -> None:
    """A rank with an asynchronous save: it starts the process of its results and waits
    to be killed."""
    import megatron.training

    megatron.training.get_args = lambda: SimpleNamespace(async_save=True)
    results = queue_in_process(pytest.fail)("fork")
    results.put({"written": 1})
    assert results.get_nowait() == {"written": 1}
    numbers.put([child.pid for child in psutil.Process().children()])
    signal.pause()


def test_the_process_of_a_killed_ranks_results_ends():
    context = multiprocessing.get_context("fork")
    numbers = context.Queue()
    process = context.Process(target=saving_rank, args=(numbers,))
    process.start()
    try:
        (number,) = numbers.get(timeout=60)
        child = psutil.Process(number)
        assert child.is_running()
    finally:
        process.kill()
        process.join()
    assert psutil.wait_procs([child], timeout=20)[1] == []
