"""Records of actions, their files, and what becomes of them."""

import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron_2bw.engine.recorder import Recorder
from megatron_2bw.engine.trace_file import Record, TraceWriter, forget
from megatron_2bw.schedules import SCHEDULES, Action, Shape
from megatron_2bw.tools.timelines.measured import (
    as_1f1b,
    last_batches,
    timelines,
)
from megatron_2bw.tools.timelines.simulator import Times, by_stage, simulate
from megatron_2bw.tools.timelines.trace import main, merge, read, timed

CPU = torch.device("cpu")


def test_marks_become_times():
    recorder = Recorder(CPU)
    before = time.time()
    asked = recorder.mark()
    time.sleep(0.02)
    start = recorder.mark()
    recorder.add(Action("F", 3, 1), asked, start, recorder.mark())
    (record,) = recorder.resolve(recorder.cut())
    assert record.action == Action("F", 3, 1)
    assert before - 0.01 <= record.asked
    assert record.asked + 0.02 <= record.start <= record.end
    assert record.end <= time.time() + 0.01
    assert recorder.cut() == []


def records_of(
    stage: int, shape: Shape, name: str = "2bw", times: Times = Times()
) -> list[Record]:
    """A simulated run as if it had been measured; the wait is the time since the action
    before, or for a late step.

    With a flush the wait for the step is in it.
    """
    schedule = SCHEDULES[name]
    free = 0.0
    records = []
    for event in by_stage(simulate(schedule, shape, times), shape.stages)[stage]:
        start = event.start
        if event.action.kind == "S":
            start = event.end if schedule.late_step else free
        records.append(Record(event.action, free, start, event.end))
        free = event.end
    return records


def write(
    folder: Path, shape: Shape, name: str = "2bw", times: Times = Times()
) -> None:
    for stage in range(shape.stages):
        writer = TraceWriter(folder, stage, pipeline=0)
        for record in records_of(stage, shape, name, times):
            writer.write([record])


def page_of(folder: Path, batches: int) -> dict:
    """What the page of a folder's files shows."""
    events = []
    for file in folder.iterdir():
        events += timed(read(file))
    return timelines(last_batches(events, batches))


def test_files_hold_every_action_and_every_wait(tmp_path):
    shape = Shape(3, 3, 0, 3)
    write(tmp_path, shape)
    for stage in range(3):
        events = read(tmp_path / f"stage-{stage:02d}-pipeline-0.json")
        expected = records_of(stage, shape)
        waited = 0.0
        for event, record in zip(timed(events), expected, strict=True):
            assert event.action == record.action
            times = (event.asked, event.start, event.end)
            assert times == pytest.approx((record.asked, record.start, record.end))
            waited += record.start - record.asked
        waits = [event["dur"] for event in events if event.get("cat") == "wait"]
        assert sum(waits) == pytest.approx(1e6 * waited)


# Megatron's loop adds a joint step to it
@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - {"pipedream"}))
def test_the_simulated_run_of_the_page_is_the_measured_one_where_all_times_are_equal(
    name, tmp_path
):
    late = SCHEDULES[name].late_step  # its step is not in the trace
    step = 0 if late else 0.75
    times = Times([1, 1.5, 1], [2, 2, 2.5], transfer=[0.5, 0.25, 0], step=step)
    write(tmp_path, Shape(3, 4, 0, 5), name, times)
    page = page_of(tmp_path, 2)
    measured, simulated = page["timelines"].values()
    assert measured["actions"] == simulated["actions"]
    for stage, text in enumerate(measured["actions"]):
        actions = text.split()
        assert len(actions) >= 2 * 2 * 4
        for place, action in enumerate(actions):
            if late or action[0] != "S":
                for field in ("starts", "ends"):
                    expected = pytest.approx(simulated[field][stage][place], abs=1e-2)
                    assert measured[field][stage][place] == expected
        if late:
            waits = measured["waits"][stage]
            expected = simulated["waits"][stage]
            assert waits == [pytest.approx(wait, abs=1e-2) for wait in expected]
    assert page["medians"]["forward"] == pytest.approx([1000, 1500, 1000])
    assert page["medians"]["message"] == pytest.approx([500, 250, 0], abs=1e-2)
    assert measured["makespan"] == pytest.approx(simulated["makespan"])


def test_in_the_order_of_1f1b_each_action_takes_as_long_as_in_the_run():
    shape = Shape(3, 4, 0, 3)
    times = Times([1, 1.5, 1], [2, 2, 2.5], step=0.75)
    ends = []
    for events in (
        as_1f1b(simulate(SCHEDULES["gpipe"], shape, times), shape),
        simulate(SCHEDULES["pipedream-flush"], shape, times),
    ):
        ends.append({(event.stage, event.action): event.end for event in events})
    found, expected = ends
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("stage", [0, 1])
def test_without_a_batch_that_all_stages_have_reduced_there_is_no_timeline(
    stage, tmp_path
):
    """A run is killed when one stage's file holds its first lines only."""
    write(tmp_path, Shape(2, 4, 0, 3))
    file = tmp_path / f"stage-{stage:02d}-pipeline-0.json"
    text = file.read_text()
    file.write_text(text[: text.index("B0@0")])
    assert merge(tmp_path) == [tmp_path / "trace.json"]


def test_a_run_that_was_killed_leaves_what_it_had_written(tmp_path):
    write(tmp_path, Shape(2, 2, 0, 3))
    file = tmp_path / "stage-01-pipeline-0.json"
    events = read(file)
    file.write_text(file.read_text()[:-40])
    assert read(file) == events[:-1]
    assert main([str(tmp_path)]) == 0


def test_a_full_disk_ends_the_trace_and_not_the_run(tmp_path, capsys):
    writer = TraceWriter(tmp_path, 0, pipeline=0)
    writer._file = SimpleNamespace(
        name="trace", write=mock.Mock(side_effect=OSError("No space left on device"))
    )
    for _ in range(2):
        writer.write(records_of(0, Shape(1, 1, 0, 2)))
    line = "> --pipeline-trace: trace ends here: No space left on device\n"
    assert capsys.readouterr().err == line


def test_an_earlier_run_is_forgotten(tmp_path):
    write(tmp_path, Shape(3, 3, 0, 3))
    merge(tmp_path)
    forget(tmp_path)
    assert list(tmp_path.iterdir()) == []
    writer = TraceWriter(tmp_path, 0, pipeline=0)
    # ended before its first reduction
    writer.write(records_of(0, Shape(1, 2, 0, 2))[:2])
    assert merge(tmp_path) == [tmp_path / "trace.json"]
