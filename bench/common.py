"""What the benchmarks share: their options, how they write results."""

from __future__ import annotations

import argparse
import queue
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from megatron_2bw.errors import words
from megatron_2bw.files import write_figure, write_json


def new_parser(description: str, name: str) -> argparse.ArgumentParser:
    """With --json, by default out/bench/`name`.json."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("out/bench", f"{name}.json"))
    return parser


def numbers(text: str) -> list[int]:
    """A comma-separated list, for argparse."""
    return [int(word) for word in words(text)]


def flag_sets(text: str) -> list[str]:
    """Sets of flags, separated by semicolons, for argparse."""
    return [part.strip() for part in text.split(";")]


def new_figure(width: float, height: float) -> Any:
    """In inches."""
    from matplotlib.figure import Figure  # here, since forked ranks import the benchmark's module

    return Figure(figsize=(width, height), layout="constrained")


def write_result(path: Path, result: Any, figure: Any = None) -> None:
    """Write the JSON, and a picture of the same name if there is one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, result)
    if figure is not None:
        write_figure(path.with_suffix(".png"), figure)
        print(f"wrote {path} and {path.with_suffix('.png')}", flush=True)


class Output:
    """The lines that several processes print, in order of arrival."""

    def __init__(self, processes: list[subprocess.Popen]):
        self._lines: queue.SimpleQueue = queue.SimpleQueue()
        for number, process in enumerate(processes):
            threading.Thread(target=self._read, args=(number, process), daemon=True).start()

    def _read(self, number: int, process: subprocess.Popen) -> None:
        for line in process.stdout:
            self._lines.put((number, line.rstrip("\n"), time.monotonic()))
        self._lines.put((number, None, time.monotonic()))

    def next(self, timeout: float) -> tuple[int, str | None, float]:
        """(number of the process, its next line or None at its end, time). TimeoutError if none comes in time."""
        try:
            return self._lines.get(timeout=max(0.0, timeout))
        except queue.Empty:
            raise TimeoutError(f"nothing printed for {timeout:.0f} s") from None
