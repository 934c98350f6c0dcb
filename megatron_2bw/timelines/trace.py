"""The files of --two-bw-trace: when each action of a stage ran and how long it waited before.

Each rank appends its events to its own file, in Chrome's JSON array format. The closing bracket may be missing, so the
trace of a killed run opens. `merge` joins the files of the stages and draws them, `summary` adds them up.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from megatron_2bw.errors import Parser, UserError, run_program
from megatron_2bw.files import write_whole
from megatron_2bw.schedules import Action, B, F, W
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
        self._emit(_name("process_name", f"pipeline {pipeline}", pipeline))
        self._emit(_name("thread_name", f"stage {stage}", pipeline, tid=stage))

    def write(self, records: list[Record]) -> None:
        """Append; a full disk ends the trace with one line, but not the training."""
        if self._file is None:
            return
        try:
            self._write(records)
        except OSError as error:
            print(f"> --two-bw-trace: {self._file.name} ends here: {error}", file=sys.stderr, flush=True)
            self._file = None

    def _write(self, records: list[Record]) -> None:
        for record in records:
            for event in _spans(record.action, record.asked, record.start, record.end, self.stage, self.pipeline):
                self._emit(event)
        self._file.flush()

    def _emit(self, event: dict[str, Any]) -> None:
        self._file.write(json.dumps(event) + ",\n")


def _name(of: str, name: str, pipeline: int, **stage: int) -> dict[str, Any]:
    """The event that names a pipeline (`of` process_name) or a stage (thread_name)."""
    return {"name": of, "ph": "M", "pid": pipeline, **stage, "args": {"name": name}}


def _spans(
    action: Action, asked: float, start: float, end: float, stage: int, pipeline: int = 0, **more: Any
) -> Iterator[dict[str, Any]]:
    """The events of an action, `more` in its arguments, and of the wait before it. Times in seconds."""

    def span(name: str, kind: str, start: float, end: float) -> dict[str, Any]:
        place = {"name": name, "cat": kind, "ph": "X", "pid": pipeline, "tid": stage}
        return place | {"ts": start * 1e6, "dur": (end - start) * 1e6}

    if start - asked > 1e-6:
        yield span("wait", "wait", asked, start) | {"cname": "grey"}
    kind, number, version, _ = action
    args = {"kind": kind, "microbatch" if kind in (F, B, W) else "batch": number, "version": version, **more}
    yield span(str(action), kind, start, end) | {"args": args | {"waited_ms": (start - asked) * 1e3}}


def forget(directory: Path) -> None:
    """Remove the files of an earlier run, which may have had other stages."""
    for file in (*directory.glob("stage-*-pipeline-*.json"), *directory.glob("timeline.*"), directory / "trace.json"):
        file.unlink(missing_ok=True)


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a TraceWriter's file. The last line of a killed run may be cut off."""
    events = []
    for line in path.read_text(encoding="utf-8").splitlines()[1:]:
        with contextlib.suppress(json.JSONDecodeError):
            events.append(json.loads(line.rstrip(",")))
    return events


def merge(directory: Path, batches: int = 4) -> list[Path]:
    """Write DIR/trace.json (all stages, opens in Perfetto) and, if a batch is whole, the last whole batches, `batches`
    at most, as DIR/timeline.png and DIR/timeline.html. Returns what was written.

    Raises OSError, and UserError if there is no stage's file.
    """
    events = _events(directory)
    written = [directory / "trace.json"]
    write_whole(written[0], json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    found = measured.last_batches([event for event in events if event["pid"] == 0], batches)
    if found is not None:
        from megatron_2bw.timelines.picture import draw_events

        picture, page = directory / "timeline.png", directory / "timeline.html"
        shown = [event for event in cut(found.events, found.begin) if event.start >= 0]
        draw_events(shown, found.stages, found.microbatches, picture, found.title)
        write_whole(page, measured.html(found))
        written += [picture, page]
    return written


def _events(directory: Path) -> list[dict[str, Any]]:
    files = sorted(directory.glob("stage-*-pipeline-*.json"))
    if not files:
        raise UserError(f"{directory}: there is no stage-*.json of --two-bw-trace")
    return [event for file in files for event in read(file)]


def summary(directory: Path) -> list[str]:
    """Lines: the time of an iteration, and how each stage spends its time, in the steady state.

    That is from the first batch's reduction to the last but one's: without the fill and the drain of the pipeline.
    Shares are means over the pipelines. Raises as `merge` does, and UserError without three batches.
    """
    lanes: dict[tuple[int, int], list[dict[str, Any]]] = {}  # by stage and pipeline
    for event in _events(directory):
        if event["ph"] == "X":
            lanes.setdefault((event["tid"], event["pid"]), []).append(event)
    ends = [{e["args"]["batch"]: e["ts"] + e["dur"] for e in own if e["cat"] == "R"} for own in lanes.values()]
    batches = sorted(set.intersection(*map(set, ends)))[:-1] if ends else []
    if len(batches) < 2:
        raise UserError(f"{directory}: --summary needs three batches that all stages have reduced")
    spent: dict[int, Counter[str]] = {}
    for ((stage, _), own), end in zip(lanes.items(), ends):
        spent.setdefault(stage, Counter()).update(_spent(own, end[batches[0]], end[batches[-1]]))
    times = [end[after] - end[before] for end in ends for before, after in pairwise(batches)]
    rows = [
        f"batches {batches[1]} to {batches[-1]}, median time of an iteration: {statistics.median(times) / 1e3:.1f} ms"
    ]
    rows.append("".join(f"{name:>15}" for name in ("stage", *COLUMNS.values(), "rest")))
    for stage, parts in sorted(spent.items()):
        shares = [parts[name] / parts["all"] for name in COLUMNS]
        rows.append(f"{stage:15}" + "".join(f"{share:15.1%}" for share in [*shares, 1 - sum(shares)]))
    return rows


COLUMNS = {"busy": "busy", "F": "wait before F", "B": "before B", "RS": "before R and S", "in RS": "in R and S"}


def _spent(events: list[dict[str, Any]], begin: float, end: float) -> Counter[str]:
    """Microseconds by COLUMNS that the events of a stage take between two times, and of "all" of it."""
    spent, waited = Counter(all=end - begin), 0.0
    for event in events:
        if event["ts"] < begin or event["ts"] + event["dur"] > end:
            continue
        if event["cat"] == "wait":
            waited = event["dur"]
            continue
        reduces = event["cat"] in "RS"
        spent["RS" if reduces else event["cat"]] += waited
        spent["in RS" if reduces else "busy"] += event["dur"]
        waited = 0.0
    return spent


def of_events(events: Iterable[Event], stages: int, title: str) -> dict[str, Any]:
    """A simulated timeline, with times in seconds, in the form of a merged trace: waits are events too."""
    found = [_name("process_name", f"pipeline: {title}", 0)]
    found += [_name("thread_name", f"stage {stage}", 0, tid=stage) for stage in range(stages)]
    free = [0.0] * stages
    for stage, action, start, end in events:
        found += _spans(action, min(free[stage], start), start, end, stage, chunk=action.chunk)
        free[stage] = end
    return {"traceEvents": found, "displayTimeUnit": "ms"}


def main(words: Sequence[str] | None = None, prog: str = "megatron_2bw.timelines.trace") -> int:
    parser = Parser(prog=prog, description="Joins the stages' files of --two-bw-trace DIR into DIR/trace.json.")
    parser.add_argument("folder", type=Path, metavar="DIR")
    text = "print how busy the stages are instead: waits, and the time of an iteration, in the steady state"
    parser.add_argument("--summary", action="store_true", help=text)
    options = parser.parse_args(words)
    work = summary if options.summary else merge
    return run_program(parser.prog, lambda: print(*work(options.folder), sep="\n"))


if __name__ == "__main__":
    sys.exit(main())
