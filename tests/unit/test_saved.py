"""The folder of checkpoints: what is there is never lost, and what is damaged is
named."""

import builtins
import os
import pickle
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


def distributed(folder: Path, iteration: int, value: float = 1.0) -> Path:
    """A whole checkpoint as Megatron writes it, and the tracker."""
    folder.mkdir(exist_ok=True)
    checkpoint = folder / checkpoint_name(iteration)
    state = {"weight": torch.full((100,), value)}
    dcp.save(state, checkpoint_id=checkpoint, no_dist=True)
    (checkpoint / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (folder / TRACKER).write_text(str(iteration))
    return checkpoint


def value(folder: Path, iteration: int) -> float:
    state = {"weight": torch.zeros(100)}
    dcp.load(state, checkpoint_id=folder / checkpoint_name(iteration), no_dist=True)
    return float(state["weight"][0])


def test_the_tracker_is_replaced_when_it_is_complete(tmp_path):
    tracker = tmp_path / TRACKER
    tracker.write_text("2")
    with TrackerFiles(builtins).open(str(tracker), "w") as file:
        file.write("4")
        assert tracker.read_text() == "2"
    assert tracker.read_text() == "4"
    assert list(tmp_path.iterdir()) == [tracker]


@pytest.mark.parametrize("moment", ["rename", "replace"])
def test_a_kill_while_the_new_one_is_named(moment, tmp_path, monkeypatch):
    """Before: the old one counts. After the first of two steps: the new one, which is
    whole."""
    distributed(tmp_path, 4)
    set_aside_old(tmp_path, 4)
    distributed(tmp_path, 4, value=2.0)
    owner = Path if moment == "rename" else os
    monkeypatch.setattr(owner, moment, lambda *names: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        with TrackerFiles(builtins).open(tmp_path / TRACKER, "w") as file:
            file.write("4")
    monkeypatch.undo()
    restore_old(tmp_path)
    assert value(tmp_path, 4) == (1.0 if moment == "rename" else 2.0)
    assert latest_iteration(tmp_path) == 4


def test_one_folder():
    assert same_folder("a", "./a/")
    assert same_folder("/proc/self/cwd", ".")
    for one, other in (("a", "b"), ("a", None), ("msc://a", "msc://a")):
        assert not same_folder(one, other)


class Code:
    """What a stranger could put into a checkpoint."""

    def __reduce__(self):
        return exec, ("raise SystemExit('a stranger has run code')",)


def change(checkpoint: Path, name: str, content: bytes | int | None) -> None:
    """Replace a file's content, cut it to a size, or delete the file."""
    (file,) = checkpoint.glob(name)
    if isinstance(content, int):
        content = file.read_bytes()[:content]
    file.unlink()
    if content is not None:
        file.write_bytes(content)


WITH_CODE = pickle.dumps(Code())
IN_A_RECORDS_MODULE = b"ctorch.distributed.checkpoint.filesystem\nos\n."


@pytest.mark.parametrize(
    "name, content, expected",
    [
        ("*.distcp", 100, "iter_0000004 is damaged (__0_0.distcp has 100 of "),
        ("*.distcp", None, "is damaged (__0_0.distcp has 0 of"),
        ("metadata.json", None, "was not written to its end, or not by Megatron"),
        (".metadata", 20, "is damaged (metadata.json or .metadata: "),
        (".metadata", WITH_CODE, "is refused (.metadata names builtins.exec, "),
        (
            ".metadata",
            IN_A_RECORDS_MODULE,
            "is refused (.metadata names torch.distributed.c",
        ),
    ],
)
def test_damage_is_named_with_what_else_could_be_loaded(
    name, content, expected, tmp_path
):
    distributed(tmp_path, 2)
    change(distributed(tmp_path, 4), name, content)
    message = problem(tmp_path)
    assert expected in message and "\n" not in message
    assert message.endswith(": load another with --ckpt-step N, whole ones are 2")
    assert problem(tmp_path, step=2) is None


def test_a_load_reads_no_index_with_code(request, tmp_path):
    for _ in range(2):  # a run may apply it twice
        request.addfinalizer(rebinding.apply(patches.for_reading()))
    checkpoint = distributed(tmp_path, 4)
    assert value(tmp_path, 4) == 1.0
    change(checkpoint, ".metadata", WITH_CODE)
    with pytest.raises(Refused, match="builtins.exec"):
        dcp.FileSystemReader(checkpoint).read_metadata()


def test_a_file_of_torch_that_is_cut_short(tmp_path):
    checkpoint = tmp_path / checkpoint_name(2) / "mp_rank_00"
    checkpoint.mkdir(parents=True)
    torch.save({"weight": torch.ones(100)}, checkpoint / "model_optim_rng.pt")
    (tmp_path / TRACKER).write_text("2")
    assert problem(tmp_path) is None
    assert saved_iterations(tmp_path) == [2]
    change(checkpoint, "*.pt", 300)
    message = problem(tmp_path)
    assert "damaged (mp_rank_00/model_optim_rng.pt is cut short" in message
    assert message.endswith("there is no other")


@pytest.mark.parametrize("text, iteration", [("", None), ("12a", None), ("8", 8)])
def test_a_tracker_that_names_no_checkpoint(text, iteration, tmp_path):
    distributed(tmp_path, 2)
    (tmp_path / TRACKER).write_text(text)
    assert problem(tmp_path).endswith("--ckpt-step N, whole ones are 2")
    assert latest_iteration(tmp_path) == iteration
    assert problem(tmp_path, step=7).startswith("there is no iter_0000007")
