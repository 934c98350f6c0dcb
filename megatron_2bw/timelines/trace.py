"""The files of --two-bw-trace: when each action of a stage ran and how long it waited before.

Each rank appends its events to a file of its own, in Chrome's JSON array format, which may end without its closing
bracket: a run that is killed leaves a trace that opens. `merge` joins the files of the stages and draws them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, TextIO

from megatron_2bw.core.recorder import Record
from megatron_2bw.schedules import parse


class TraceWriter:
    """Appends the records of one rank to DIR/stage-S-pipeline-P.json."""

    def __init__(self, directory: Path, stage: int, pipeline: int):
        directory.mkdir(parents=True, exist_ok=True)
        self.stage, self.pipeline = stage, pipeline
        path = directory / f"stage-{stage:02d}-pipeline-{pipeline}.json"
        self._file: TextIO | None = open(path, "w", encoding="utf-8")
        self._file.write("[\n")
        self._emit(name="process_name", ph="M", pid=pipeline, args={"name": f"pipeline {pipeline}"})
        self._emit(name="thread_name", ph="M", pid=pipeline, tid=stage, args={"name": f"stage {stage}"})

    def write(self, records: list[Record]) -> None:
        """Append; a disk that takes no more ends the trace with one line, and not the training."""
        if self._file is None:
            return
        try:
            self._write(records)
        except OSError as error:
            print(f"> --two-bw-trace: {self._file.name} ends here: {error}", file=sys.stderr, flush=True)
            self._file = None

    def _write(self, records: list[Record]) -> None:
        for record in records:
            if record.start - record.asked > 1e-6:
                self._emit(
                    name="wait",
                    cat="wait",
                    ph="X",
                    pid=self.pipeline,
                    tid=self.stage,
                    ts=record.asked * 1e6,
                    dur=(record.start - record.asked) * 1e6,
                    cname="grey",
                )
            kind, microbatch, version, _ = record.action
            self._emit(
                name=str(record.action),
                cat=kind,
                ph="X",
                pid=self.pipeline,
                tid=self.stage,
                ts=record.start * 1e6,
                dur=(record.end - record.start) * 1e6,
                args={
                    "kind": kind,
                    "microbatch" if kind in "FB" else "batch": microbatch,
                    "version": version,
                    "waited_ms": (record.start - record.asked) * 1e3,
                },
            )
        self._file.flush()

    def _emit(self, **event: Any) -> None:
        self._file.write(json.dumps(event) + ",\n")


def forget(directory: Path) -> None:
    """Remove the files of an earlier run, which may have had other stages."""
    for file in (*directory.glob("stage-*-pipeline-*.json"), directory / "trace.json", directory / "timeline.png"):
        file.unlink(missing_ok=True)


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a file of TraceWriter, also of one whose writer was killed."""
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    events = []
    for line in lines:
        try:
            events.append(json.loads(line.rstrip(",")))
        except json.JSONDecodeError:  # cut off in the middle
            break
    return events


def merge(directory: Path, batches: int = 4) -> list[Path]:
    """Write DIR/trace.json (all stages, opens in Perfetto) and DIR/timeline.png (the last `batches` whole batches, if
    there is one). Returns what was written.

    Raises FileNotFoundError if no stage has left a file.
    """
    files = sorted(directory.glob("stage-*-pipeline-*.json"))
    if not files:
        raise FileNotFoundError(f"no stage-*.json in {directory}")
    events = [event for file in files for event in read(file)]
    trace, picture = directory / "trace.json", directory / "timeline.png"
    trace.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
    _draw([event for event in events if event["pid"] == 0], batches, picture)
    return [path for path in (trace, picture) if path.exists()]


def _draw(events: list[dict[str, Any]], batches: int, picture: Path) -> None:
    from megatron_2bw.timelines.picture import draw_events
    from megatron_2bw.timelines.simulator import Event

    timed = [event for event in events if event["ph"] == "X" and event["cat"] != "wait"]
    reduces = [event for event in timed if event["cat"] == "R"]
    if not reduces:
        return
    last = min(max(e["args"]["batch"] for e in reduces if e["tid"] == stage) for stage in {e["tid"] for e in reduces})
    first = max(last - batches + 1, min(event["args"]["batch"] for event in reduces))
    ends = {e["args"]["batch"]: e["ts"] for e in reduces if e["tid"] == 0}
    begin = ends.get(first - 1, min(event["ts"] for event in timed))
    shown = [
        Event(e["tid"], parse(e["name"])[0], (e["ts"] - begin) / 1e6, (e["ts"] + e["dur"] - begin) / 1e6)
        for e in timed
        if e["ts"] >= begin
    ]
    count = sum(e["cat"] == "B" and e["tid"] == 0 for e in timed)
    microbatches = count // max(1, len({e["args"]["batch"] for e in reduces if e["tid"] == 0}))
    stages = 1 + max(event.stage for event in shown)
    draw_events(shown, stages, max(microbatches, 1), picture, f"batches {first} to {last}")


if __name__ == "__main__":
    print(*merge(Path(sys.argv[1])), sep="\n")
