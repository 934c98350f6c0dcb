"""Megatron's log: the one parser of its lines.

A line of iteration N gives means over the iterations since the line before it: of the
loss without skipped iterations, of the time with them. Caveat: the first line of each
start of a run is one more than --log-interval asks for, and Megatron does not begin new
means after it, so the next line's means include the first iteration again. With
--log-interval 1 the line of iteration 2 shows the mean of 1 and 2. No line comes after
the last whole interval.

Megatron prints no loss if its mean is not above 0: for NaN, and at first where all
steps were skipped.
"""

import contextlib
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_TRAINING = re.compile(
    r"\biteration +(?P<iteration>\d+)/ *(?P<planned>\d+) \|(?P<fields>.*)"
)
_VALIDATION = re.compile(
    r"\bvalidation loss at iteration (?P<iteration>\d+)"
    r"(?: on (?P<dataset>[\w ]+?))? \|(?P<fields>.*)"
)
_FIELD = re.compile(r" *([^|:]+): *([^|]*?) *\|")  # whole ones: the last may be cut off
_ERROR = re.compile(r"([\w.]+: error|[\w.]*(Error|Exception)): \S")
_KILLED = re.compile(r"Signal \d+ \(SIG\w+\) received by")  # torchrun


class LogLine(NamedTuple):
    """A line about an iteration that has ended.

    planned  iterations of the whole run; 0 in a validation's line
    dataset  of a validation: "validation set", "test set" or ""
    fields   the values as printed, by name
    """

    iteration: int
    planned: int
    dataset: str
    fields: dict[str, str]

    @property
    def loss(self) -> float | None:
        """The loss of training or of a validation, nats per token."""
        validation = "lm loss value"
        return self._number(validation if validation in self.fields else "lm loss")

    @property
    def milliseconds(self) -> float | None:
        """Mean time of an iteration."""
        return self._number("elapsed time per iteration (ms)")

    @property
    def skipped(self) -> int:
        """Iterations since the line before whose step was skipped, for inf or nan
        gradients."""
        return int(self._number("number of skipped iterations") or 0)

    @property
    def stage_memory(self) -> list[float]:
        """GiB at most on each stage, in the lines of this project's schedules; else
        empty."""
        sizes = self.fields.get("peak memory by stage (GiB)", "")
        return list(map(float, sizes.split()))

    def _number(self, name: str) -> float | None:
        """None also where another process's output has broken the field."""
        with contextlib.suppress(KeyError, ValueError):
            return float(self.fields[name])
        return None


def training(log: str | Iterable[str]) -> Iterator[LogLine]:
    """The lines of iterations, of a text or of its lines."""
    return _lines(_TRAINING, log)


def validations(log: str | Iterable[str]) -> Iterator[LogLine]:
    """The lines of validations, of a text or of its lines."""
    return _lines(_VALIDATION, log)


def _lines(pattern: re.Pattern, log: str | Iterable[str]) -> Iterator[LogLine]:
    if isinstance(log, str):
        log = log.splitlines()
    for line in log:
        match = pattern.search(line)
        if match:
            found = match.groupdict()
            yield LogLine(
                iteration=int(found["iteration"]),
                planned=int(found.get("planned", 0)),
                dataset=found.get("dataset") or "",
                fields=dict(_FIELD.findall(found["fields"])),
            )


def cause(log: str) -> str:
    """The line that says why a run failed: the first error (the others are its
    consequences), a signal, the last."""
    lines = []
    for line in log.splitlines():
        if line.strip():
            lines.append(re.sub(r"^\[rank\d+\]: *", "", line.strip()))
    for is_cause in (_ERROR.match, _KILLED.search):
        for line in lines:
            if is_cause(line):
                return line
    return lines[-1] if lines else "no output"
