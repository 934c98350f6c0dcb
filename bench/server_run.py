"""A training run with a rank on each of two servers, and what the ranks print (bench/slow_links.py).

Invariant: `Run.end` leaves no process of the run behind (`Servers`, none on its servers); every wait has a limit.
"""

from __future__ import annotations

import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field

from bench.server_rank import PREFIX
from bench.servers import ADDRESSES, INTERFACE, Servers
from megatron_2bw.processes import stop_tree
from tests.e2e.launcher import ROOT

BUBBLE = re.compile(r"iteration +(\d+)/.* bubble: ([\d.]+)%/([\d.]+)%")


class RunError(RuntimeError):
    """A training run failed or stood still; the message holds the end of its ranks' output."""


@dataclass
class Observed:
    """What the ranks of a run printed: (seconds, bytes sent) at the end of each iteration, and bubbles by iteration."""

    ends: list[list[tuple[float, int]]] = field(default_factory=lambda: [[], []])
    bubbles: dict[int, tuple[float, float]] = field(default_factory=dict)


class Run:
    """A rank on each server, and what they print."""

    def __init__(self, servers: Servers, sleep: list[float], argv: list[str]):
        self.observed, self.output = Observed(), ([], [])
        self._new: queue.SimpleQueue = queue.SimpleQueue()
        cores = sorted(os.sched_getaffinity(0))
        self.processes = [
            servers.start(
                rank,
                [sys.executable, "bench/server_rank.py", *map(str, (cores[rank % len(cores)], *sleep)), *argv],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=os.environ
                | {
                    "RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "LOCAL_RANK": "0",
                    "LOCAL_WORLD_SIZE": "1",
                    "MASTER_ADDR": ADDRESSES[0],
                    "MASTER_PORT": "29500",
                    "GLOO_SOCKET_IFNAME": INTERFACE,
                    "OMP_NUM_THREADS": "1",
                    "PYTHONWARNINGS": "ignore",
                    "PYTHONUNBUFFERED": "1",
                },
            )
            for rank in (0, 1)
        ]
        for rank, process in enumerate(self.processes):
            threading.Thread(target=self._read, args=(rank, process), daemon=True).start()

    def _read(self, rank: int, process: subprocess.Popen) -> None:
        for line in process.stdout:
            self._new.put((rank, line.rstrip("\n")))
        self._new.put((rank, None))

    def until(self, iteration: int | None, patience: float) -> None:
        """Take what the ranks print until both have ended `iteration` (None: until they end).

        RunError if a rank fails, or no iteration ends for `patience` seconds.
        """
        deadline = time.monotonic() + patience
        while iteration is None or min(len(ends) for ends in self.observed.ends) < iteration:
            try:
                rank, line = self._new.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise RunError(f"no iteration ended for {patience:.0f} s\n{self._end_of_output()}") from None
            if line is None:
                status = self.processes[rank].wait(patience)
                if status or iteration is not None:
                    raise RunError(f"rank {rank} ended with status {status}\n{self._end_of_output()}")
                if all(process.poll() is not None for process in self.processes):
                    return
            elif self._take(rank, line):
                deadline = time.monotonic() + patience

    def _take(self, rank: int, line: str) -> bool:
        """Whether `line` tells that an iteration has ended."""
        if line.startswith(PREFIX):
            told = json.loads(line.removeprefix(PREFIX))
            self.observed.ends[rank].append((told["end"], told["sent"]))
            return True
        if line:
            self.output[rank].append(line)
        if match := BUBBLE.search(line):
            self.observed.bubbles[int(match[1])] = float(match[2]) / 100, float(match[3]) / 100
        return False

    def _end_of_output(self) -> str:
        return "\n".join(f"--- rank {rank}\n" + "\n".join(lines[-15:]) for rank, lines in enumerate(self.output))

    def end(self) -> None:
        for process in self.processes:
            stop_tree(process)
            process.wait()
