"""Errors that a program reports to its user in one line, without a traceback."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn


class UserError(RuntimeError):
    """A program cannot continue, and its user can change that. The message is one line that says what to do.

    reported_elsewhere: another rank reports it; this one only ends.
    """

    def __init__(self, message: str, reported_elsewhere: bool = False):
        super().__init__(message)
        self.reported_elsewhere = reported_elsewhere


def report(prog: str, error: object) -> None:
    """Print "prog: error: line" on standard error. The line of a file's OSError is "file: reason"."""
    sys.stdout.flush()
    line = str(error)
    if isinstance(error, OSError) and error.strerror:
        line = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    print(f"{prog}: error: {' '.join(line.split())}", file=sys.stderr, flush=True)


def usage_error(prog: str, line: object) -> NoReturn:
    """Report the line and exit with status 2, as argparse does."""
    report(prog, line)
    sys.exit(2)


class Parser(argparse.ArgumentParser):
    """Reports an error in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        usage_error(self.prog, message)
