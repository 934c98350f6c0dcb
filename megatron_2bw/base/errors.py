"""Errors that a program reports to its user in one line, without a traceback; parsers
of command lines that do so."""

import argparse
import contextlib
import difflib
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NoReturn


class UserError(RuntimeError):
    """A program cannot continue, and its user can change that. The message is one line
    that says what to do.

    reported_elsewhere: another rank reports it; this one only ends.
    """

    def __init__(self, message: str, reported_elsewhere: bool = False):
        super().__init__(message)
        self.reported_elsewhere = reported_elsewhere


def report_error(prog: str, error: object, remedy: str = "") -> None:
    """Print "prog: error: line; remedy" on standard error. The line of a file's OSError
    is "file: reason"."""
    sys.stdout.flush()
    line = str(error)
    if isinstance(error, OSError) and error.strerror:
        line = error.strerror
        if error.filename:
            line = f"{error.filename}: {line}"
    line = one_line(line)
    if remedy:
        line += f"; {remedy}"
    print(f"{prog}: error: {line}", file=sys.stderr, flush=True)


def one_line(text: object) -> str:
    """The text without line breaks."""
    return " ".join(str(text).split())


def usage_error(prog: str, line: object) -> NoReturn:
    """Report the line and exit with status 2, as argparse does."""
    report_error(prog, line)
    sys.exit(2)


def run_program(prog: str, work: Callable[[], int | None], remedy: str = "") -> int:
    """The exit status of `work`: what it returns, 1 after a UserError or OSError, 130
    after Ctrl-C; reports in a line.

    remedy: of what is not the user's mistake
    """
    try:
        return work() or 0
    except UserError as error:
        report_error(prog, error)
    except OSError as error:
        report_error(prog, error, remedy)
    except KeyboardInterrupt:
        line = f"{prog}: stopped"
        if remedy:
            line += f"; {remedy}"
        print(line, file=sys.stderr)
        return 130
    return 1


@contextlib.contextmanager
def file_errors(what: str) -> Iterator[None]:
    """Raise an OSError, or a ValueError, as a UserError: `what`, such as a flag with
    its path, and the reason."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise UserError(f"{what}: {reason}") from None


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The end of a line about an unknown word: " (did you mean NAME?)", or nothing."""
    similar = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f" (did you mean {similar[0]}?)" if similar else ""


def comma_separated(text: str) -> tuple[str, ...]:
    """A comma-separated list, for argparse."""
    return tuple(word.strip() for word in text.split(","))


def list_of(
    known: Collection, read: Callable[[str], Any] = str
) -> Callable[[str], tuple]:
    """A comma-separated list of known names or numbers, each as `read` reads it, for
    argparse."""

    def parse(text: str) -> tuple:
        names = tuple(map(read, comma_separated(text)))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(
                    f"{name} is not one of {', '.join(map(str, known))}"
                )
        return names

    return parse


def whole_number(least: int, most: float = math.inf) -> Callable[[str], int]:
    """A parser of a flag's value: a whole number from `least` to `most`."""
    bounds = f"of {least} or more" if most == math.inf else f"from {least} to {most}"

    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text}: must be a whole number {bounds}")
        return int(text)

    return parse


class Parser(argparse.ArgumentParser):
    """Reports an error in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        usage_error(self.prog, message)
