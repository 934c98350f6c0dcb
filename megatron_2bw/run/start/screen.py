"""What a run prints: all of it goes to a file for each rank, and the screen shows the
lines that SHOWN matches.

Invariant: nothing that Python or a library in C++ prints is lost, and no release of a
library adds lines to the screen. A log that cannot be written ends no run.
"""

import os
import re
import sys
import tempfile
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from megatron_2bw.base import run_log

SHOWN = re.compile(
    r"> (--[\w-]+|[\w.=-]+:|on the CPU:|rank \d)"  # of this project
    r"|(\[rank\d+\]: *)?([\w.-]+: (error:|rank "
    r"\d)|[\w.]*(Error|Exception|Interrupt|Exit)\b|ERROR:|CRITICAL:)"
    # of Megatron
    r"|\s*(\[[^]]*\] *)?(iteration +\d+/|(saving|successfully \w+|loading) .*checkpoint)"
    r"| *validation loss at|\[(exiting program|before the start of training "
    r"step)|.*could not find the metadata file"
    r"|wandb: .*http|.*GPTModel IS DEPRECATED"
)
# An iteration's line on a terminal: other names for its fields, and "" for those that
# only the file has.
SHORT = {
    "consumed samples": "",
    "global batch size": "",
    "tokens": "",
    "lm loss": "loss",
    "learning rate": "lr",
    "elapsed time per iteration (ms)": "ms",
    "peak memory by stage (GiB)": "GiB",
    "number of skipped iterations": "skipped",
    "number of nan iterations": "nan",
}
_record = None  # this rank's open file


class _Stream:
    """A standard stream: all text goes to the record, lines that SHOWN matches
    (verbose: all) also to the screen."""

    def __init__(self, screen: int, verbose: bool):
        self._screen = screen
        self._verbose = verbose
        self._short = os.isatty(screen) and not verbose
        self._begun = {}  # the line that a thread has begun

    def __getattr__(self, name: str) -> Any:
        return getattr(_record, name)

    def write(self, text: str) -> int:
        with suppress(OSError):
            _record.write(text)
        thread = threading.get_ident()
        *lines, begun = (self._begun.get(thread, "") + text).split("\n")
        self._begun[thread] = begun
        shown = ""
        for line in lines:
            if self._verbose or SHOWN.match(line):
                shown += (for_terminal(line) if self._short else line) + "\n"
        if shown:
            with suppress(OSError):  # a full disk, or the reader of a pipe has ended
                os.write(self._screen, shown.encode(errors="backslashreplace"))
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            _record.flush()


def for_terminal(line: str) -> str:
    """An iteration's line with the loss first, short numbers, and no counts of 0; any
    other line as it is."""
    step = next(run_log.training(line), None)
    if step is None:
        return line
    iteration = str(step.iteration).rjust(len(str(step.planned)))
    words = [f" iteration {iteration}/{step.planned}"]
    losses = [name for name in step.fields if name.endswith("loss")]
    for name in dict.fromkeys([*losses, *step.fields]):
        text = step.fields[name]
        short = SHORT.get(name, name)
        if re.fullmatch(r"[\d.]+E[+-]\d+", text):
            text = format(float(text), "#.4g" if name in losses else ".4g")
        if short == "GiB":
            text = max(text.split(), key=float)
        if short and step.fields[name] != "0" and (name, text) != ("loss scale", "1.0"):
            words.append(f"{short} {text}")
    return " | ".join(words)


def begin(verbose: bool) -> None:
    """From now on this rank prints so; to a temporary file until `move_to`."""
    global _record
    _record = _opened(tempfile.mkstemp(f"_{_name()}", "megatron_2bw_")[1])
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        stream.flush()
        screen = os.dup(stream.fileno())
        os.dup2(_record.fileno(), number)  # what libraries in C++ print
        setattr(sys, name, _Stream(screen, verbose))


def move_to(folder: str | os.PathLike | None) -> str:
    """Move the record to a file in the run's folder, if it has one; the file's name."""
    global _record
    if folder and "://" not in str(folder):
        with suppress(OSError):  # the run reports later what is wrong with its folder
            path = Path(folder, "output", _name())
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = _record
            _record = _opened(path)
            for number in (1, 2):
                os.dup2(_record.fileno(), number)
            _record.write(Path(temporary.name).read_text(errors="backslashreplace"))
            os.unlink(temporary.name)
    return place()


def _name() -> str:
    return f"rank-{os.environ.get('RANK', '0')}.txt"


def _opened(path: str | os.PathLike) -> TextIO:
    return open(path, "a", buffering=1, errors="backslashreplace")


def place() -> str:
    """The name of this rank's file; "" before `begin`."""
    return _record.name if _record is not None else ""


def record(error: BaseException) -> None:
    """Write the traceback to this rank's file; on the screen only with --verbose."""
    if _record is None or "--verbose" in sys.argv:
        traceback.print_exception(error)
    else:
        with suppress(OSError):
            traceback.print_exception(error, file=_record)
