"""A training run with a rank on each of two servers, and its output (bench/slow_links.py).

Invariant: no process of the run survives `Run.end`, and none on a server survives `Servers`; every wait has a limit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field

from bench.common import Output
from bench.server_rank import PREFIX
from bench.servers import ADDRESSES, INTERFACE, Servers
from megatron_2bw import run_log
from megatron_2bw.local_ranks import WorldError
from megatron_2bw.processes import stop_tree
from megatron_2bw.start.torchrun import ROOT, environment


@dataclass
class Observed:
    """What the ranks of a run printed: (seconds, bytes sent) at the end of each iteration, and bubbles by iteration."""

    ends: list[list[tuple[float, int]]] = field(default_factory=lambda: [[], []])
    bubbles: dict[int, tuple[float, float]] = field(default_factory=dict)


class Run:
    """A rank on each server, and what they print."""

    def __init__(self, servers: Servers, sleep: list[float], argv: list[str]):
        self.observed, self.output = Observed(), ([], [])
        cores = sorted(os.sched_getaffinity(0))
        self.processes = [
            servers.start(
                rank,
                [sys.executable, "bench/server_rank.py", *map(str, (cores[rank % len(cores)], *sleep)), *argv],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment(
                    RANK=str(rank),
                    WORLD_SIZE="2",
                    LOCAL_RANK="0",
                    LOCAL_WORLD_SIZE="1",
                    MASTER_ADDR=ADDRESSES[0],
                    MASTER_PORT="29500",
                    GLOO_SOCKET_IFNAME=INTERFACE,
                    OMP_NUM_THREADS="1",
                    PYTHONUNBUFFERED="1",
                ),
            )
            for rank in (0, 1)
        ]
        self._lines = Output(self.processes)

    def until(self, iteration: int | None, patience: float) -> None:
        """Take what the ranks print until both have ended `iteration` (None: until they end).

        WorldError if a rank fails, or no iteration ends for `patience` seconds.
        """
        deadline = time.monotonic() + patience
        while iteration is None or min(len(ends) for ends in self.observed.ends) < iteration:
            try:
                rank, line, _ = self._lines.next(deadline - time.monotonic())
            except TimeoutError:
                raise WorldError(f"no iteration ended for {patience:.0f} s\n{self._end_of_output()}") from None
            if line is None:
                status = self.processes[rank].wait(patience)
                if status or iteration is not None:
                    raise WorldError(f"rank {rank} ended with status {status}\n{self._end_of_output()}")
                if all(process.poll() is not None for process in self.processes):
                    return
            elif self._take(rank, line):
                deadline = time.monotonic() + patience

    def _take(self, rank: int, line: str) -> bool:
        """Whether `line` reports the end of an iteration."""
        if line.startswith(PREFIX):
            ended = json.loads(line.removeprefix(PREFIX))
            self.observed.ends[rank].append((ended["end"], ended["sent"]))
            return True
        if line:
            self.output[rank].append(line)
        for record in run_log.training([line]):
            if shares := record.fields.get("bubble"):
                self.observed.bubbles[record.iteration] = tuple(float(x.rstrip("%")) / 100 for x in shares.split("/"))
        return False

    def _end_of_output(self) -> str:
        return "\n".join(f"--- rank {rank}\n" + "\n".join(lines[-15:]) for rank, lines in enumerate(self.output))

    def end(self) -> None:
        for process in self.processes:
            stop_tree(process)
