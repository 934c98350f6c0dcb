"""The file of --pipeline-trace that a rank writes: when each action of a stage ran and
how long it waited before.

Each rank appends its events to its own file, in Chrome's JSON array format. The closing
bracket may be missing, so the trace of a killed run opens.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from megatron_2bw.schedules import Action, B, F


@dataclass(frozen=True)
class Record:
    """One action in time, in seconds since the epoch.

    asked  when the stage was free for it
    start  when its inputs had arrived
    """

    action: Action
    asked: float
    start: float
    end: float


class TraceWriter:
    """Appends the records of one rank to DIR/stage-S-pipeline-P.json."""

    def __init__(
        self,
        directory: Path,
        stage: int,
        pipeline: int,
    ):
        directory.mkdir(parents=True, exist_ok=True)
        self.stage = stage
        self.pipeline = pipeline
        path = directory / f"stage-{stage:02d}-pipeline-{pipeline}.json"
        self._file: TextIO | None = open(path, "w", encoding="utf-8")
        self._file.write("[\n")
        self._emit(names_of(f"pipeline {pipeline}", [stage], pipeline))

    def write(self, records: Iterable[Record]) -> None:
        """Append; a full disk ends the trace with one line, but not the training."""
        if self._file is None:
            return
        spans: list[dict[str, Any]] = []
        for record in records:
            spans += spans_of(record, self.stage, self.pipeline)
        try:
            self._emit(spans)
        except OSError as error:
            print(
                f"> --pipeline-trace: {self._file.name} ends here: {error}",
                file=sys.stderr,
                flush=True,
            )
            self._file = None

    def _emit(self, events: list[dict[str, Any]]) -> None:
        assert self._file is not None
        for event in events:
            self._file.write(json.dumps(event) + ",\n")
        self._file.flush()


def names_of(
    title: str,
    stages: Iterable[int],
    pipeline: int = 0,
) -> list[dict[str, Any]]:
    """The events that name a pipeline and its stages."""
    place = {"ph": "M", "pid": pipeline}
    names = [place | {"name": "process_name", "args": {"name": title}}]
    for stage in stages:
        name = {"name": f"stage {stage}"}
        names.append(place | {"name": "thread_name", "tid": stage, "args": name})
    return names


def spans_of(
    record: Record,
    stage: int,
    pipeline: int = 0,
    **more: Any,
) -> Iterator[dict[str, Any]]:
    """The events of a record, `more` in its arguments, and of the wait before it. Its
    times are in seconds."""

    def span(name: str, kind: str, start: float, end: float) -> dict[str, Any]:
        return {
            "name": name,
            "cat": kind,
            "ph": "X",
            "pid": pipeline,
            "tid": stage,
            "ts": start * 1e6,
            "dur": (end - start) * 1e6,
        }

    action = record.action
    waited = record.start - record.asked
    if waited > 1e-6:
        yield span("wait", "wait", record.asked, record.start) | {"cname": "grey"}
    number = "microbatch" if action.kind in (F, B) else "batch"
    args = {
        "kind": action.kind,
        number: action.number,
        "version": action.version,
        **more,
        "waited_ms": waited * 1e3,
    }
    yield span(str(action), action.kind, record.start, record.end) | {"args": args}


def forget(directory: Path) -> None:
    """Remove the files of an earlier run, which may have had other stages."""
    for file in (
        *directory.glob("stage-*-pipeline-*.json"),
        *directory.glob("timeline.*"),
        directory / "trace.json",
    ):
        file.unlink(missing_ok=True)
