"""Progress of long work on stderr: a bar on a terminal, elsewhere a line every few seconds."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

PROG = "preprocess_data.py"
EVERY = 5.0  # seconds between two lines


def say(text: str) -> None:
    tqdm.write(f"{PROG}: {text}", file=sys.stderr)
    sys.stderr.flush()


class Progress:
    """Of `total` bytes."""

    def __init__(self, total: int):
        self._total, self._done, self._skipped = total, 0, 0
        self._began = self._said = time.monotonic()
        self._bar = tqdm(total=total, unit="B", unit_scale=True, dynamic_ncols=True, disable=not sys.stderr.isatty())

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_error) -> None:
        self._bar.close()

    def skip(self, size: int) -> None:
        """Count the work of an earlier call."""
        self._done += size
        self._skipped += size
        if not self._bar.disable:
            self._bar.initial += size
        self._bar.update(size)

    def advance(self, size: int) -> None:
        self._done += size
        self._bar.update(size)
        now = time.monotonic()
        if self._bar.disable and now - self._said >= EVERY:
            self._said = now
            rate = max(self._done - self._skipped, 1) / (now - self._began)
            left = (self._total - self._done) / rate
            say(f"{self._done / 1e6:,.0f} of {self._total / 1e6:,.0f} MB, {rate / 1e6:.1f} MB/s, {left:,.0f} s left")
