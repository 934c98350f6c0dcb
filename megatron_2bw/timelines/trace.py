"""The files of --two-bw-trace: when each action of a stage ran and how long it waited
before.

Each rank appends its events to its own file, in Chrome's JSON array format. The closing
bracket may be missing, so the trace of a killed run opens. `merge` joins the files of
the stages and draws them.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from megatron_2bw.errors import Parser, UserError, run_program
from megatron_2bw.files import write_whole
from megatron_2bw.schedules import B, F, W, parse
from megatron_2bw.timelines import measured
from megatron_2bw.timelines.simulator import Event
from megatron_2bw.timelines.waits import cut

if TYPE_CHECKING:
    from megatron_2bw.core.recorder import Record  # it imports torch


class TraceWriter:
    """Appends the records of one rank to DIR/stage-S-pipeline-P.json."""

    def __init__(self, directory: Path, stage: int, pipeline: int):
        directory.mkdir(parents=True, exist_ok=True)
        self.stage, self.pipeline = stage, pipeline
        path = directory / f"stage-{stage:02d}-pipeline-{pipeline}.json"
        self._file: TextIO | None = open(path, "w", encoding="utf-8")
        self._file.write("[\n")
        self._emit(*_names(f"pipeline {pipeline}", [stage], pipeline))

    def write(self, records: list[Record]) -> None:
        """Append; a full disk ends the trace with one line, but not the training."""
        if self._file is None:
            return
        try:
            self._emit(
                *(
                    span
                    for record in records
                    for span in _spans(record, self.stage, self.pipeline)
                )
            )
        except OSError as error:
            print(
                f"> --two-bw-trace: {self._file.name} ends here: {error}",
                file=sys.stderr,
                flush=True,
            )
            self._file = None

    def _emit(self, *events: dict[str, Any]) -> None:
        self._file.write("".join(json.dumps(event) + ",\n" for event in events))
        self._file.flush()


def _names(
    title: str, stages: Iterable[int], pipeline: int = 0
) -> list[dict[str, Any]]:
    """The events that name a pipeline and its stages."""
    place = {"ph": "M", "pid": pipeline}
    names = [
        {
            "name": "thread_name",
            **place,
            "tid": stage,
            "args": {"name": f"stage {stage}"},
        }
        for stage in stages
    ]
    return [{"name": "process_name", **place, "args": {"name": title}}, *names]


def _spans(
    timed: Record | Event, stage: int, pipeline: int = 0, **more: Any
) -> Iterator[dict[str, Any]]:
    """The events of an action, `more` in its arguments, and of the wait before it. Its
    times are in seconds."""

    def span(name: str, kind: str, start: float, end: float) -> dict[str, Any]:
        place = {"name": name, "cat": kind, "ph": "X", "pid": pipeline, "tid": stage}
        return place | {"ts": start * 1e6, "dur": (end - start) * 1e6}

    action, waited = timed.action, timed.start - timed.asked
    if waited > 1e-6:
        yield span("wait", "wait", timed.asked, timed.start) | {"cname": "grey"}
    number = "microbatch" if action.kind in (F, B, W) else "batch"
    args = {
        "kind": action.kind,
        number: action.number,
        "version": action.version,
        **more,
        "waited_ms": waited * 1e3,
    }
    yield span(str(action), action.kind, timed.start, timed.end) | {"args": args}


def forget(directory: Path) -> None:
    """Remove the files of an earlier run, which may have had other stages."""
    for file in (
        *directory.glob("stage-*-pipeline-*.json"),
        *directory.glob("timeline.*"),
        directory / "trace.json",
    ):
        file.unlink(missing_ok=True)


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a TraceWriter's file. The last line of a killed run may be cut
    off."""
    events = []
    for line in path.read_text(encoding="utf-8").splitlines()[1:]:
        with contextlib.suppress(json.JSONDecodeError):
            events.append(json.loads(line.rstrip(",")))
    return events


def timed(events: Iterable[dict[str, Any]]) -> list[Event]:
    """The actions among a file's events, with their times in seconds since the
    epoch."""
    found = []
    for event in events:
        if event["ph"] == "X" and event["cat"] != "wait":
            start, end = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
            asked = start - event["args"]["waited_ms"] / 1e3
            found.append(
                Event(event["tid"], parse(event["name"])[0], start, end, asked, end)
            )
    return found


def merge(directory: Path, batches: int = 3) -> list[Path]:
    """Write DIR/trace.json (all stages, opens in Perfetto) and, if a batch is whole,
    the last whole batches, `batches` at most, as DIR/timeline.png and
    DIR/timeline.html. Returns what was written.

    Raises OSError, and UserError if there is no stage's file.
    """
    written = [directory / "trace.json"]
    everything = [event for own in _files(directory) for event in own]
    write_whole(
        written[0], json.dumps({"traceEvents": everything, "displayTimeUnit": "ms"})
    )
    first = timed(event for event in everything if event["pid"] == 0)
    found = measured.last_batches(first, batches) if first else None
    if found is not None:
        from megatron_2bw.timelines.picture import draw_events

        picture, page = directory / "timeline.png", directory / "timeline.html"
        shown = [event for event in cut(found.events, found.begin) if event.start >= 0]
        draw_events(shown, found.stages, found.microbatches, picture, found.title)
        write_whole(page, measured.html(found))
        written += [picture, page]
    return written


def _files(directory: Path) -> list[list[dict[str, Any]]]:
    """The events of each stage of each pipeline."""
    files = sorted(directory.glob("stage-*-pipeline-*.json"))
    if not files:
        raise UserError(f"{directory}: there is no stage-*.json of --two-bw-trace")
    return [read(file) for file in files]


def of_events(events: Iterable[Event], stages: int, title: str) -> dict[str, Any]:
    """A simulated timeline, with times in seconds, in the form of a merged trace: waits
    are events too."""
    found = _names(f"pipeline: {title}", range(stages))
    found += [
        span
        for event in events
        for span in _spans(event, event.stage, chunk=event.action.chunk)
    ]
    return {"traceEvents": found, "displayTimeUnit": "ms"}


def main(
    words: Sequence[str] | None = None, prog: str = "megatron_2bw.timelines.trace"
) -> int:
    parser = Parser(
        prog=prog,
        description="Joins the stages' files of --two-bw-trace DIR into DIR/trace.json.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    options = parser.parse_args(words)
    return run_program(parser.prog, lambda: print(*merge(options.folder), sep="\n"))


if __name__ == "__main__":
    sys.exit(main())
