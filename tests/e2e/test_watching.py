"""TensorBoard has the log's loss, gradient norm, bubble, memory by stage and tokens per
second; a trace all actions."""

import json
import re
from pathlib import Path

import pytest

from bench.emulated import train
from megatron_2bw.base.local_ranks import own_output, run_world
from megatron_2bw.schedules import SCHEDULES, Shape
from tests.distributed.training import command
from tests.e2e.launcher import forked

NUMBER = r"([-+.\dE]+)"
FIELDS = {
    "lm loss": f"lm loss: {NUMBER}",
    "grad-norm": f"grad norm: {NUMBER}",
    "tokens per second": f"tokens/s: {NUMBER}",
    "bubble/mean": f"bubble: {NUMBER}%",
    "bubble/max": f"bubble: [^/]*/{NUMBER}%",
    "peak memory (GiB)/stage 0": rf"by stage \(GiB\): {NUMBER}",
    "peak memory (GiB)/stage 1": rf"by stage \(GiB\): \S+ {NUMBER}",
}
ROUNDED = {
    "lm loss": 1e-6,
    "grad-norm": 6e-4,
    "tokens per second": 0.6,
    "bubble/mean": 6e-4,
    "bubble/max": 6e-4,
}
RUN = dict(train_iters=5, split="100,0,0")
Values = dict[int, dict[str, float]]  # by iteration and name


def logged(output: str) -> Values:
    """What the log lines show."""
    found = {}
    for iteration, text in re.findall(
        r"iteration +(\d+)/ +\d+ \| (consumed.*)", output
    ):
        values = found[int(iteration)] = {}
        for name, pattern in FIELDS.items():
            value = float(re.search(pattern, text)[1])
            values[name] = value / 100 if "bubble" in name else value
    return found


def tensorboard(folder: Path) -> Values:
    """What TensorBoard shows. No value may be there twice."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    events = EventAccumulator(str(folder))
    events.Reload()
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            values = found.setdefault(event.step, {})
            assert name not in values, f"{name} of step {event.step} is there twice"
            values[name] = event.value
    return found


def check(board: Values, lines: Values) -> None:
    assert list(lines) == [1, 2, 3, 4, 5]
    for iteration, line in lines.items():
        shown = board[iteration]
        for name, value in line.items():
            # Megatron's second line shows the mean with the first
            if (name, iteration) != ("lm loss", 2):
                near = pytest.approx(value, abs=ROUNDED.get(name, 6e-3), rel=1e-6)
                assert shown[name] == near, (iteration, name)
        for stage in (0, 1):
            assert 0 <= shown[f"bubble/stage {stage}"] <= shown["bubble/max"]
        assert shown["tokens per second"] > 0
        assert shown["peak memory (GiB)/stage 0"] > 0.1


def test_the_dashboard_shows_what_the_log_shows_and_the_trace_every_action(tmp_path):
    folder = tmp_path / "trace"
    argv = command(2, 4, "2bw", **RUN, tensorboard_dir=tmp_path, pipeline_trace=folder)
    lines = logged(forked(2, argv))
    check(tensorboard(tmp_path), lines)
    assert (folder / "timeline.png").stat().st_size > 1000
    assert '"title":"batches ' in (folder / "timeline.html").read_text()
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    for stage in (0, 1):
        actions = []
        for event in events:
            if event.get("tid") == stage and event.get("cat") in ("F", "B", "R", "S"):
                actions.append(event["name"])
        expected = []
        for iteration in range(5):
            expected += SCHEDULES["2bw"].actions(Shape(2, 4, 0, 5), stage, iteration)
        assert actions == list(map(str, expected))


def watched(rank: int, argv: list[str], forward: float, backward: float) -> str:
    """Train on stages that also sleep; what the rank printed."""
    train(rank, argv, forward, backward)
    return own_output()


def test_the_bubble_of_a_flush(tmp_path):
    """The stages sleep, and wait 0.15 s an iteration for each other, for a forward and
    a backward: the last one mostly at the end, which must count too."""
    flags = command(
        2, 2, "pipedream-flush", **RUN, num_layers=2, tensorboard_dir=tmp_path
    )
    output = run_world(2, watched, flags, 0.05, 0.1)[1]
    board = tensorboard(tmp_path)
    lines = logged(output)
    check(board, lines)
    tokens = 2 * 2 * 16  # an iteration
    for stage in (0, 1):
        waited = []
        for iteration in lines:
            seconds = tokens / board[iteration]["tokens per second"]
            waited.append(seconds * board[iteration][f"bubble/stage {stage}"])
        assert max(waited) > 0.1  # no load makes all of them shorter
