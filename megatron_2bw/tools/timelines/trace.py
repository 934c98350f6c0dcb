"""The files of --pipeline-trace: when each action of a stage ran and how long it waited
before.

`merge` joins the files that the ranks have written (trace_file.py) and draws them.
"""

import contextlib
import itertools
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron_2bw.base.command_line import parser_of
from megatron_2bw.base.errors import UserError, run_program
from megatron_2bw.base.files import write_whole
from megatron_2bw.schedules import parse_actions
from megatron_2bw.tools.timelines import measured
from megatron_2bw.tools.timelines.page import HERE, bundle
from megatron_2bw.tools.timelines.simulator import Event, Events
from megatron_2bw.tools.timelines.waits import cut

BATCHES = 3  # in the picture and on the page


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a TraceWriter's file. The last line of a killed run may be cut
    off."""
    events = []
    for line in path.read_text(encoding="utf-8").splitlines()[1:]:
        with contextlib.suppress(json.JSONDecodeError):
            events.append(json.loads(line.rstrip(",")))
    return events


def timed(events: Iterable[dict[str, Any]]) -> Events:
    """The actions among a file's events, with their times in seconds since the
    epoch."""
    actions = []
    for event in events:
        if event["ph"] == "X" and event["cat"] != "wait":
            (action,) = parse_actions(event["name"])
            start = event["ts"] / 1e6
            end = (event["ts"] + event["dur"]) / 1e6
            asked = start - event["args"]["waited_ms"] / 1e3
            actions.append(Event(event["tid"], action, start, end, asked, end))
    return actions


def merge(directory: Path) -> list[Path]:
    """Write DIR/trace.json (all stages, opens in Perfetto) and, if a batch is whole,
    the last whole batches, BATCHES at most, as DIR/timeline.png and
    DIR/timeline.html. Returns what was written.

    Raises OSError, and UserError if there is no stage's file.
    """
    files = sorted(directory.glob("stage-*-pipeline-*.json"))
    if not files:
        raise UserError(f"{directory}: there is no stage-*.json of --pipeline-trace")
    everything = list(itertools.chain(*map(read, files)))
    trace = directory / "trace.json"
    content = {"traceEvents": everything, "displayTimeUnit": "ms"}
    write_whole(trace, json.dumps(content))
    first = timed(event for event in everything if event["pid"] == 0)
    last = measured.last_batches(first, BATCHES) if first else None
    if last is None:
        return [trace]
    from megatron_2bw.tools.timelines.picture import draw_events

    picture = directory / "timeline.png"
    page = directory / "timeline.html"
    shown = cut(last.events, last.begin)
    draw_events(shown, last.stages, last.microbatches, picture, last.title)
    content = {"trace": measured.timelines(last)}
    write_whole(page, bundle(HERE / "trace.html", content))
    return [trace, picture, page]


def main(
    words: Sequence[str] | None = None, prog: str = "megatron_2bw.tools.timelines.trace"
) -> int:
    options = parser_of(prog, __file__).parse_args(words)

    def work() -> None:
        for path in merge(options.folder):
            print(path)

    return run_program(prog, work)


if __name__ == "__main__":
    sys.exit(main())
