"""One run owns a folder of checkpoints: a second one is refused, a dead one's claim is taken over."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import types
from pathlib import Path

import pytest

from megatron_2bw.checkpoints import owner
from megatron_2bw.checkpoints.folder import TRACKER, TrackerFiles
from megatron_2bw.errors import UserError

context = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """A process that holds nothing, and time that passes quickly."""
    monkeypatch.setattr(owner, "_held", set())
    monkeypatch.setattr(owner, "BEAT", 0.02)
    monkeypatch.setattr(owner, "SILENCE", 0.5)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    owner._claim.cache_clear()
    yield
    owner._claim.cache_clear()


def hold_for_ever(folder: Path, held) -> None:
    owner._claim.cache_clear()
    owner.hold(folder)
    held.set()
    signal.pause()


@pytest.fixture
def other(tmp_path):
    """Another process, which holds the folder."""
    held = context.Event()
    process = context.Process(target=hold_for_ever, args=(tmp_path, held), daemon=True)
    process.start()
    assert held.wait(30)
    yield process
    process.kill()
    process.join()


def claim(folder: Path, **changes) -> None:
    (folder / owner.OWNER).write_text(json.dumps(json.loads(owner._claim()) | changes))


def pid(folder: Path) -> int:
    return json.loads((folder / owner.OWNER).read_text())["pid"]


def test_a_second_run_is_refused(other, tmp_path):
    with pytest.raises(UserError) as error:
        owner.hold(tmp_path)
    line = str(error.value)
    assert line.startswith(f"--save {tmp_path}: the run of process {other.pid} on ") and "\n" not in line
    assert pid(tmp_path) == other.pid


def test_a_killed_run_leaves_the_folder_to_the_next(other, tmp_path):
    os.kill(other.pid, signal.SIGKILL)
    other.join()
    owner.hold(tmp_path)
    owner.hold(tmp_path)
    assert pid(tmp_path) == os.getpid()


def test_a_killed_run_that_nobody_waits_for_is_dead(other, tmp_path):
    os.kill(other.pid, signal.SIGKILL)
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # a zombie
    owner.hold(tmp_path)
    assert pid(tmp_path) == os.getpid()


def test_the_process_id_of_a_dead_run_may_be_used_again(tmp_path):
    claim(tmp_path, started=1)
    owner.hold(tmp_path)
    assert (tmp_path / owner.OWNER).read_text() == owner._claim()


@pytest.mark.parametrize("text", ["", '{"host": "a"', "[]", '{"host": "a"}'])
def test_a_claim_that_was_not_written_to_its_end(text, tmp_path):
    (tmp_path / owner.OWNER).write_text(text)
    owner.hold(tmp_path)
    assert pid(tmp_path) == os.getpid()


def beat_for_ever(file: Path, begun) -> None:
    owner._held.add(file)
    owner._claim = lambda: file.read_text()
    begun.set()
    owner._beat(file)


def test_a_run_on_another_host_lives_while_its_heart_beats(tmp_path):
    claim(tmp_path, kernel="another", host="far")
    begun = context.Event()
    heart = context.Process(target=beat_for_ever, args=(tmp_path / owner.OWNER, begun), daemon=True)
    heart.start()
    assert begun.wait(30)
    with pytest.raises(UserError, match="on far "):
        owner.hold(tmp_path)
    heart.kill()
    heart.join()
    owner.hold(tmp_path)
    assert pid(tmp_path) == os.getpid()


def test_slurm_has_ended_what_it_requeues(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(owner, "SILENCE", 1e9)
    claim(tmp_path, kernel="another", job="7")
    owner.hold(tmp_path)
    assert pid(tmp_path) == os.getpid()


def test_a_run_that_has_lost_the_folder_names_no_checkpoint_in_it(tmp_path):
    owner.hold(tmp_path)
    (tmp_path / TRACKER).write_text("2")
    claim(tmp_path, pid=1, host="far")
    files = TrackerFiles(types.SimpleNamespace(open=open))
    with pytest.raises(UserError, match="process 1 on far"), files.open(tmp_path / TRACKER, "w") as file:
        file.write("4")
    with pytest.raises(UserError, match="process 1 on far"):
        owner.hold(tmp_path)
    assert (tmp_path / TRACKER).read_text() == "2"


def test_a_folder_that_was_emptied_is_claimed_again(tmp_path):
    owner.hold(tmp_path)
    (tmp_path / owner.OWNER).unlink()
    owner.hold(tmp_path)
    assert pid(tmp_path) == os.getpid()


def test_a_run_that_ends_gives_the_folder_back(tmp_path):
    owner.hold(tmp_path / "new")
    owner._release(tmp_path / "new" / owner.OWNER, os.getpid())
    assert not list((tmp_path / "new").iterdir())


def test_a_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="--save .*file/x: Not a directory"):
        owner.hold(tmp_path / "file" / "x")
