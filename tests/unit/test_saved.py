"""The folder of checkpoints: what is there is never lost, and what is damaged is named."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import pickle
import signal
import time
import types
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron_2bw import guard
from megatron_2bw.checkpoints.folder import (
    ASIDE,
    DELETED,
    TRACKER,
    TrackerFiles,
    await_restored,
    checkpoint_name,
    latest_iteration,
    problem,
    restore_old,
    same_folder,
    saved_iterations,
    set_aside_old,
)
from megatron_2bw.checkpoints.unpickle import Refused, writable_by_all
from megatron_2bw.mcore import patches

builtin = types.SimpleNamespace(open=open)


def distributed(folder: Path, iteration: int, value: float = 1.0) -> Path:
    """A whole checkpoint as Megatron writes it, and the tracker."""
    folder.mkdir(exist_ok=True)
    checkpoint = folder / checkpoint_name(iteration)
    dcp.save({"weight": torch.full((100,), value)}, checkpoint_id=checkpoint, no_dist=True)
    (checkpoint / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    (folder / TRACKER).write_text(str(iteration))
    return checkpoint


def older(folder: Path, iteration: int) -> Path:
    file = folder / checkpoint_name(iteration) / "mp_rank_00" / "model_optim_rng.pt"
    file.parent.mkdir(parents=True)
    torch.save({"weight": torch.ones(100)}, file)
    (folder / TRACKER).write_text(str(iteration))
    return file


# --- the tracker ---------------------------------------------------------------------------------------------------


def test_the_tracker_is_replaced_in_one_step(tmp_path, monkeypatch):
    tracker = tmp_path / TRACKER
    tracker.write_text("2")
    seen = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *names: (seen.append(tracker.read_text()), replace(*names)))
    with TrackerFiles(builtin).open(str(tracker), "w") as file:
        file.write("4")
        assert tracker.read_text() == "2"
    assert seen == ["2"] and tracker.read_text() == "4"
    assert [path.name for path in tmp_path.iterdir()] == [TRACKER]


def test_a_tracker_that_cannot_be_written_leaves_the_old_checkpoint_in_precedence(tmp_path, monkeypatch):
    """The new content is on the disk before anything is renamed: a full disk changes nothing."""
    distributed(tmp_path, 4)
    set_aside_old(tmp_path, 4)
    distributed(tmp_path, 4, value=2.0)

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"), TrackerFiles(builtin).open(str(tmp_path / TRACKER), "w") as file:
        file.write("4")
    assert (tmp_path / (ASIDE + checkpoint_name(4))).is_dir() and (tmp_path / TRACKER).read_text() == "4"


def test_a_tracker_that_is_not_finished_changes_nothing(tmp_path):
    tracker = tmp_path / TRACKER
    tracker.write_text("2")
    with pytest.raises(ZeroDivisionError), TrackerFiles(builtin).open(tracker, "w") as file:
        file.write("4" + str(1 / 0))
    assert tracker.read_text() == "2"


def test_other_files_are_opened_as_before(tmp_path):
    files = TrackerFiles(builtin)
    (tmp_path / "other").write_text("text")
    (tmp_path / TRACKER).write_text("6")
    assert isinstance(files.open(tmp_path / "other", "w"), io.TextIOWrapper)
    with files.open(tmp_path / TRACKER, "r") as file:
        assert file.read() == "6"


# --- a checkpoint that is saved again -------------------------------------------------------------------------------


def value(folder: Path, iteration: int) -> float:
    found = {"weight": torch.zeros(100)}
    dcp.load(found, checkpoint_id=folder / checkpoint_name(iteration), no_dist=True)
    return float(found["weight"][0])


def test_a_checkpoint_stays_until_the_new_one_is_whole(tmp_path):
    distributed(tmp_path, 4)
    set_aside_old(tmp_path, 4)
    assert saved_iterations(tmp_path) == [] and problem(tmp_path) is None, "the one aside is what would be loaded"
    assert problem(tmp_path, ours=False).startswith(
        "iter_0000004 is being saved again, or a run was killed during that"
    )
    half = tmp_path / checkpoint_name(4)  # the run is killed here
    half.mkdir()
    (half / "__0_0.distcp").write_bytes(b"half")
    assert problem(tmp_path) is None
    restore_old(tmp_path)
    assert saved_iterations(tmp_path) == [4] and value(tmp_path, 4) == 1.0


def test_the_old_one_goes_when_the_new_one_is_named(tmp_path):
    distributed(tmp_path, 4)
    set_aside_old(tmp_path, 4)
    distributed(tmp_path, 4, value=2.0)
    with TrackerFiles(builtin).open(tmp_path / TRACKER, "w") as file:
        file.write("4")
    assert sorted(path.name for path in tmp_path.iterdir()) == [checkpoint_name(4), TRACKER]
    assert value(tmp_path, 4) == 2.0


@pytest.mark.parametrize("write", [distributed, older])
def test_a_kill_before_the_new_one_is_named_brings_the_old_one_back(write, tmp_path):
    """The older format has no file that is written last, so only the tracker tells that it is whole."""
    write(tmp_path, 4)
    (tmp_path / checkpoint_name(4) / "mark").touch()
    set_aside_old(tmp_path, 4)
    write(tmp_path, 4)
    for _ in range(2):  # the second time a run has saved again without a load
        restore_old(tmp_path)
        assert (tmp_path / checkpoint_name(4) / "mark").exists() and not list(tmp_path.glob(ASIDE + "*"))
        set_aside_old(tmp_path, 4)
        (tmp_path / checkpoint_name(4)).mkdir()
        set_aside_old(tmp_path, 4)


def test_what_could_not_be_deleted_does_no_harm(tmp_path):
    for number in (2.0, 3.0):
        distributed(tmp_path, 4, value=number - 1)
        left = tmp_path / f"{DELETED}{number}"  # a run was killed while it deleted
        left.mkdir()
        (left / "file").touch()
        set_aside_old(tmp_path, 4)
        distributed(tmp_path, 4, value=number)
        with TrackerFiles(builtin).open(tmp_path / TRACKER, "w") as file:
            file.write("4")
        restore_old(tmp_path)
        assert value(tmp_path, 4) == number
        assert sorted(path.name for path in tmp_path.iterdir()) == [checkpoint_name(4), TRACKER]


@pytest.mark.parametrize("moment", ["rename", "replace"])
def test_a_kill_while_the_new_one_is_named(moment, tmp_path, monkeypatch):
    """Before: the old one counts. After the first of two steps: the new one, which is whole."""
    distributed(tmp_path, 4)
    set_aside_old(tmp_path, 4)
    distributed(tmp_path, 4, value=2.0)
    owner = Path if moment == "rename" else os
    monkeypatch.setattr(owner, moment, lambda *names: 1 / 0)
    with pytest.raises(ZeroDivisionError), TrackerFiles(builtin).open(tmp_path / TRACKER, "w") as file:
        file.write("4")
    monkeypatch.undo()
    restore_old(tmp_path)
    assert value(tmp_path, 4) == (1.0 if moment == "rename" else 2.0) and latest_iteration(tmp_path) == 4


def test_other_ranks_wait_for_the_first(tmp_path):
    distributed(tmp_path, 4)
    await_restored(tmp_path)
    set_aside_old(tmp_path, 4)
    start = time.monotonic()
    await_restored(tmp_path, seconds=0.3)
    assert time.monotonic() - start >= 0.3  # no load makes it shorter


def test_a_link_is_left_alone(tmp_path):
    distributed(tmp_path / "elsewhere", 4)
    (tmp_path / checkpoint_name(4)).symlink_to(tmp_path / "elsewhere" / checkpoint_name(4))
    set_aside_old(tmp_path, 4)
    assert (tmp_path / checkpoint_name(4)).is_symlink()


@pytest.mark.parametrize(
    "one, other, expected",
    [
        ("a", "./a/", True),
        ("/proc/self/cwd", ".", True),
        ("a", "b", False),
        ("a", None, False),
        (None, None, False),
        ("msc://a", "msc://a", False),
    ],
)
def test_one_folder(one, other, expected):
    assert same_folder(one, other) == expected


def test_saves_in_flight_are_left_alone(tmp_path):
    """Another checkpoint may still be written, asynchronously, when the next save begins."""
    distributed(tmp_path, 4)
    set_aside_old(tmp_path, 4)
    (tmp_path / checkpoint_name(4)).mkdir()
    (tmp_path / checkpoint_name(4) / "__0_0.distcp").write_bytes(b"on its way")
    set_aside_old(tmp_path, 6)
    assert (tmp_path / checkpoint_name(4) / "__0_0.distcp").exists()
    assert (tmp_path / (ASIDE + checkpoint_name(4))).is_dir()


def test_what_is_not_whole_is_not_kept(tmp_path):
    half = distributed(tmp_path, 4)
    (half / "metadata.json").unlink()
    (half / ".metadata").unlink()
    set_aside_old(tmp_path, 4)
    assert half.is_dir() and not list(tmp_path.glob(ASIDE + "*"))


def overwrite_for_ever(folder: Path, go) -> None:
    go.set()
    while True:
        for number in ("2", "4"):
            with TrackerFiles(builtin).open(folder / TRACKER, "w") as file:
                file.write(number)


def test_a_kill_at_any_moment_leaves_a_tracker(tmp_path):
    (tmp_path / TRACKER).write_text("2")
    context = multiprocessing.get_context("fork")
    for delay in range(20):
        go = context.Event()
        process = context.Process(target=overwrite_for_ever, args=(tmp_path, go))
        process.start()
        go.wait()
        process.join(delay / 5000)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert latest_iteration(tmp_path) in (2, 4)


# --- damage ----------------------------------------------------------------------------------------------------------


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


class Code:
    """What a stranger could put into a checkpoint."""

    def __reduce__(self):
        return exec, ("raise SystemExit('a stranger has run code')",)


DAMAGES = {
    "cut short": (lambda c: cut(next(c.glob("*.distcp")), 100), "iter_0000004 is damaged (__0_0.distcp has 100 of "),
    "a file is gone": (lambda c: next(c.glob("*.distcp")).unlink(), "is damaged (__0_0.distcp is missing)"),
    "not finished": (lambda c: (c / "metadata.json").unlink(), "was not written to its end, or not by Megatron"),
    "index gone": (lambda c: (c / ".metadata").unlink(), "is damaged (.metadata: FileNotFoundError)"),
    "index cut short": (lambda c: cut(c / ".metadata", 20), "is damaged (.metadata: "),
    "with code": (
        lambda c: (c / ".metadata").write_bytes(pickle.dumps(Code())),
        "is refused (.metadata names builtins.exec, which is no record of torch's and could run code)",
    ),
    "with code in a record's module": (
        lambda c: (c / ".metadata").write_bytes(b"ctorch.distributed.checkpoint.filesystem\nos\n."),
        "is refused (.metadata names torch.distributed.checkpoint.filesystem.os, ",
    ),
    "garbage": (lambda c: (c / "metadata.json").write_text("{"), "is damaged (metadata.json)"),
    "of another kind": (
        lambda c: (c / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
        "is of another kind (sharded_backend 'zarr')",
    ),
    "a list": (lambda c: (c / "metadata.json").write_text("[]"), "is of another kind (sharded_backend None)"),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_damage_is_named_with_what_else_could_be_loaded(how, tmp_path):
    distributed(tmp_path, 2)
    harm, expected = DAMAGES[how]
    harm(distributed(tmp_path, 4))
    message = problem(tmp_path)
    assert expected in message and "\n" not in message
    assert message.endswith(": load another with --ckpt-step N, whole ones are 2")
    assert problem(tmp_path, step=2) is None


@pytest.fixture
def guarded():
    undo = guard.apply(patches.for_reading())
    again = guard.apply(patches.for_reading())
    yield
    again()
    undo()


def test_a_load_reads_no_index_with_code(guarded, tmp_path):
    checkpoint = distributed(tmp_path, 4)
    assert value(tmp_path, 4) == 1.0
    DAMAGES["with code"][0](checkpoint)
    with pytest.raises(Refused, match="builtins.exec"):
        dcp.FileSystemReader(checkpoint).read_metadata()


def test_a_load_runs_no_code_in_an_entry(guarded, tmp_path, monkeypatch):
    """torch reads what is no tensor without weights_only, and collects the errors of all ranks."""
    dcp.save({"entry": [Namespace(kept=1)]}, checkpoint_id=tmp_path / "whole", no_dist=True)
    found = {"entry": [None]}
    dcp.load(found, checkpoint_id=tmp_path / "whole", no_dist=True)
    assert found == {"entry": [Namespace(kept=1)]}
    dcp.save({"entry": Code()}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(dcp.CheckpointException, match="entry names exec, which could run code: if you trust"):
        dcp.load({"entry": None}, checkpoint_id=tmp_path, no_dist=True)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    with pytest.raises(dcp.CheckpointException, match="a stranger has run code"):
        dcp.load({"entry": None}, checkpoint_id=tmp_path, no_dist=True)


@pytest.mark.parametrize("mode, expected", [(0o777, True), (0o1777, False), (0o775, False)])
def test_a_folder_that_all_may_write_to(mode, expected, tmp_path):
    tmp_path.chmod(mode)
    assert writable_by_all(tmp_path) is expected and not writable_by_all(tmp_path / "gone")


def test_formats_without_a_last_file(tmp_path):
    (distributed(tmp_path, 2) / "metadata.json").unlink()
    assert problem(tmp_path, kind="fsdp_dtensor") is None and problem(tmp_path) is not None


def test_a_file_of_torch_that_is_cut_short(tmp_path):
    file = older(tmp_path, 2)
    assert problem(tmp_path) is None and saved_iterations(tmp_path) == [2]
    cut(file, 300)
    assert "iter_0000002 is damaged (mp_rank_00/model_optim_rng.pt is cut short" in problem(tmp_path)
    assert problem(tmp_path).endswith("there is no other to load")


@pytest.mark.parametrize("text", ["", "12a", "-3", "release now"])
def test_a_tracker_that_names_nothing(text, tmp_path):
    distributed(tmp_path, 2)
    (tmp_path / TRACKER).write_text(text)
    assert f"{TRACKER} says {text!r}, which is no iteration" in problem(tmp_path)
    assert latest_iteration(tmp_path) is None


def test_a_checkpoint_that_is_not_there(tmp_path):
    distributed(tmp_path, 2)
    (tmp_path / TRACKER).write_text("8")
    assert problem(tmp_path) == "there is no iter_0000008: load another with --ckpt-step N, whole ones are 2"
    assert problem(tmp_path, step=7).startswith("there is no iter_0000007")
