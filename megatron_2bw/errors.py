"""Errors that a program reports to its user in one line, without a traceback."""

from __future__ import annotations

import sys
from typing import NoReturn


class UserError(RuntimeError):
    """A program cannot go on, and its user can change that. The message is one line that says what to do.

    reported_elsewhere: another rank reports it; this one only ends.
    """

    def __init__(self, message: str, reported_elsewhere: bool = False):
        super().__init__(message)
        self.reported_elsewhere = reported_elsewhere


def usage_error(prog: str, line: str) -> NoReturn:
    """Print "prog: error: line" on standard error and exit with status 2, as argparse does."""
    sys.stdout.flush()
    print(f"{prog}: error: {' '.join(line.split())}", file=sys.stderr, flush=True)
    sys.exit(2)
