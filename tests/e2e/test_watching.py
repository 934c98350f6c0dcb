"""The dashboards carry loss, gradient norm, bubble, memory by stage and tokens per second, as the log."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.emulated import train
from megatron_2bw.local_ranks import own_output, run_world
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
ROUNDED = {"lm loss": 1e-6, "grad-norm": 6e-4, "tokens per second": 0.6, "bubble/mean": 6e-4, "bubble/max": 6e-4}
RUN = dict(train_iters=5, split="100,0,0")
Values = dict[int, dict[str, float]]  # by iteration and name


def logged(output: str) -> Values:
    """What the log lines show."""
    found = {}
    for iteration, text in re.findall(r"iteration +(\d+)/ +\d+ \| (consumed.*)", output):
        values = {name: float(re.search(pattern, text)[1]) for name, pattern in FIELDS.items()}
        found[int(iteration)] = {name: v / 100 if "bubble" in name else v for name, v in values.items()}
    return found


def tensorboard(folder: Path) -> Values:
    """What TensorBoard shows. No value may be there twice."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events, found = EventAccumulator(str(folder)), {}
    events.Reload()
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            values = found.setdefault(event.step, {})
            assert name not in values, f"{name} of step {event.step} is there twice"
            values[name] = event.value
    return found


def records(path: Path) -> Iterator[bytes]:
    """The records of a .wandb file: LevelDB's log format, in blocks of 32 KiB, after seven bytes of its own."""
    data, place, record = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:  # padding
            place += left
            continue
        length, kind = struct.unpack_from("<xxxxHB", data, place)
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def wandb(folder: Path) -> Values:
    """What a run of WANDB_MODE=offline has left for `wandb sync`."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    found = {}
    for data in records(path):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            values = {item.key or "/".join(item.nested_key): float(item.value_json) for item in record.history.item}
            assert record.history.step.num not in found
            found[record.history.step.num] = values
    return found


def check(board: Values, lines: Values) -> None:
    assert list(lines) == [1, 2, 3, 4, 5] and set(lines) <= set(board)
    for iteration, line in lines.items():
        shown = board[iteration]
        assert all(0 <= shown[f"bubble/stage {stage}"] <= shown["bubble/max"] for stage in (0, 1))
        for name, value in line.items():
            if name == "lm loss" and iteration == 2:
                continue  # Megatron's second line shows the mean with the first
            assert shown[name] == pytest.approx(value, abs=ROUNDED.get(name, 6e-3), rel=1e-6), (iteration, name)
        assert shown["tokens per second"] > 0 and shown["peak memory (GiB)/stage 0"] > 0.1


@pytest.mark.proof
def test_both_dashboards_show_what_the_log_shows(tmp_path):
    offline = dict(wandb_project="project", wandb_exp_name="name", wandb_save_dir=tmp_path)
    flags = command(2, 4, "2bw", **RUN, tensorboard_dir=tmp_path / "board", **offline)
    lines = logged(forked(2, flags, WANDB_MODE="offline"))
    check(tensorboard(tmp_path / "board"), lines)
    check(wandb(tmp_path), lines)


def watched(rank: int, argv: list[str], forward: float, backward: float) -> str:
    """Train on stages that also sleep; what the rank printed."""
    train(rank, argv, forward, backward)
    return own_output()


def test_the_bubble_of_a_flush(tmp_path):
    """The stages sleep, and wait 0.15 s an iteration for each other, for a forward and a backward: the last one mostly
    at the end, which must count too."""
    flags = command(2, 2, "pipedream-flush", **RUN, num_layers=2, tensorboard_dir=tmp_path)
    output = run_world(2, watched, flags, 0.05, 0.1)[1]
    board, lines = tensorboard(tmp_path), logged(output)
    check(board, lines)
    tokens = 2 * 2 * 16  # an iteration
    for stage in (0, 1):
        shown = [board[iteration] for iteration in lines]
        waited = [tokens / values["tokens per second"] * values[f"bubble/stage {stage}"] for values in shown]
        assert max(waited) > 0.1  # no load makes all of them shorter


def test_tensorboard_alone_and_stages_that_step_by_themselves(tmp_path):
    flags = command(2, 4, "pipedream", "--untie-embeddings-and-output-weights", **RUN, tensorboard_dir=tmp_path)
    output = run_world(2, watched, flags, 0.0, 0.0)[1]
    check(tensorboard(tmp_path), logged(output))
