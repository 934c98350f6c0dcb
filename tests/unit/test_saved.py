"""The folder of checkpoints: what is there is never lost, and what is damaged is
named."""

from __future__ import annotations

import json
import os
import pickle
import types
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron_2bw.mcore import patches, rebinding
from megatron_2bw.mcore.checkpoints.folder import (
    TRACKER,
    TrackerFiles,
    checkpoint_name,
    latest_iteration,
    problem,
    restore_old,
    same_folder,
    saved_iterations,
    set_aside_old,
)
from megatron_2bw.mcore.checkpoints.unpickle import Refused

builtin = types.SimpleNamespace(open=open)


def distributed(folder: Path, iteration: int, value: float = 1.0) -> Path:
    """A whole checkpoint as Megatron writes it, and the tracker."""
    folder.mkdir(exist_ok=True)
    checkpoint = folder / checkpoint_name(iteration)
    dcp.save(
        {"weight": torch.full((100,), value)}, checkpoint_id=checkpoint, no_dist=True
    )
    (checkpoint / "metadata.json").write_text(
        json.dumps({"sharded_backend": "torch_dist"})
    )
    (folder / TRACKER).write_text(str(iteration))
    return checkpoint


def older(folder: Path, iteration: int) -> Path:
    file = folder / checkpoint_name(iteration) / "mp_rank_00" / "model_optim_rng.pt"
    file.parent.mkdir(parents=True)
    torch.save({"weight": torch.ones(100)}, file)
    (folder / TRACKER).write_text(str(iteration))
    return file


# --- the tracker
# --------------------------------------------------------------------------------------


def test_the_tracker_is_replaced_in_one_step(tmp_path, monkeypatch):
    tracker = tmp_path / TRACKER
    tracker.write_text("2")
    seen = []
    replace = os.replace
    monkeypatch.setattr(
        os,
        "replace",
        lambda *names: (seen.append(tracker.read_text()), replace(*names)),
    )
    with TrackerFiles(builtin).open(str(tracker), "w") as file:
        file.write("4")
        assert tracker.read_text() == "2"
    assert seen == ["2"] and tracker.read_text() == "4"
    assert [path.name for path in tmp_path.iterdir()] == [TRACKER]


# --- a checkpoint that is saved again
# --------------------------------------------------------------------------------------


def value(folder: Path, iteration: int) -> float:
    found = {"weight": torch.zeros(100)}
    dcp.load(found, checkpoint_id=folder / checkpoint_name(iteration), no_dist=True)
    return float(found["weight"][0])


@pytest.mark.parametrize("moment", ["rename", "replace"])
def test_a_kill_while_the_new_one_is_named(moment, tmp_path, monkeypatch):
    """Before: the old one counts. After the first of two steps: the new one, which is
    whole."""
    distributed(tmp_path, 4)
    set_aside_old(tmp_path, 4)
    distributed(tmp_path, 4, value=2.0)
    monkeypatch.setattr(
        Path if moment == "rename" else os, moment, lambda *names: 1 / 0
    )
    with (
        pytest.raises(ZeroDivisionError),
        TrackerFiles(builtin).open(tmp_path / TRACKER, "w") as file,
    ):
        file.write("4")
    monkeypatch.undo()
    restore_old(tmp_path)
    assert (
        value(tmp_path, 4) == (1.0 if moment == "rename" else 2.0)
        and latest_iteration(tmp_path) == 4
    )


def test_one_folder():
    assert same_folder("a", "./a/") and same_folder("/proc/self/cwd", ".")
    assert not any(
        same_folder(*two)
        for two in (("a", "b"), ("a", None), (None, None), ("msc://a", "msc://a"))
    )


# --- damage
# --------------------------------------------------------------------------------------


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


class Code:
    """What a stranger could put into a checkpoint."""

    def __reduce__(self):
        return exec, ("raise SystemExit('a stranger has run code')",)


DAMAGES = {
    "cut short": (
        lambda c: cut(next(c.glob("*.distcp")), 100),
        "iter_0000004 is damaged (__0_0.distcp has 100 of ",
    ),
    "a file is gone": (
        lambda c: next(c.glob("*.distcp")).unlink(),
        "is damaged (__0_0.distcp has 0 of",
    ),
    "not finished": (
        lambda c: (c / "metadata.json").unlink(),
        "was not written to its end, or not by Megatron",
    ),
    "index cut short": (
        lambda c: cut(c / ".metadata", 20),
        "is damaged (metadata.json or .metadata: ",
    ),
    "with code": (
        lambda c: (c / ".metadata").write_bytes(pickle.dumps(Code())),
        (
            "is refused (.metadata names builtins.exec, which is no record of "
            "torch's and could run code)"
        ),
    ),
    "with code in a record's module": (
        lambda c: (c / ".metadata").write_bytes(
            b"ctorch.distributed.checkpoint.filesystem\nos\n."
        ),
        "is refused (.metadata names torch.distributed.checkpoint.filesystem.os, ",
    ),
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
    undo = rebinding.apply(patches.for_reading())
    again = rebinding.apply(patches.for_reading())
    yield
    again()
    undo()


def test_a_load_reads_no_index_with_code(guarded, tmp_path):
    checkpoint = distributed(tmp_path, 4)
    assert value(tmp_path, 4) == 1.0
    DAMAGES["with code"][0](checkpoint)
    with pytest.raises(Refused, match="builtins.exec"):
        dcp.FileSystemReader(checkpoint).read_metadata()


def test_a_file_of_torch_that_is_cut_short(tmp_path):
    file = older(tmp_path, 2)
    assert problem(tmp_path) is None and saved_iterations(tmp_path) == [2]
    cut(file, 300)
    assert (
        "iter_0000002 is damaged (mp_rank_00/model_optim_rng.pt is cut short"
        in problem(tmp_path)
    )
    assert problem(tmp_path).endswith("there is no other")


@pytest.mark.parametrize("text", ["", "12a", "8"])
def test_a_tracker_that_names_no_checkpoint(text, tmp_path):
    distributed(tmp_path, 2)
    (tmp_path / TRACKER).write_text(text)
    assert problem(tmp_path).endswith(
        ": load another with --ckpt-step N, whole ones are 2"
    )
    assert latest_iteration(tmp_path) == (8 if text == "8" else None)
    assert problem(tmp_path, step=7).startswith("there is no iter_0000007")
