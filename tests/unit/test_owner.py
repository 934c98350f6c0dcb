"""One run owns a folder of checkpoints: a second one is refused, a dead one's claim is
free."""

import errno
import subprocess
import sys
from unittest import mock

import pytest

from megatron_2bw.base.errors import UserError
from megatron_2bw.mcore.checkpoints import owner

# A process that holds the folder, with a child, which lives longer.
HOLD = """
import os, sys, time
from megatron_2bw.mcore.checkpoints import owner
owner.hold(sys.argv[1])
print(flush=True)
os.fork() or os.setsid()
time.sleep(20)
"""


@pytest.fixture
def other(tmp_path):
    command = [sys.executable, "-c", HOLD, tmp_path]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    process.stdout.readline()
    yield process
    process.kill()


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(owner, "_held", {})


def test_a_second_run_is_refused_while_the_first_lives(other, tmp_path):
    link = tmp_path.with_name("link")
    link.symlink_to(tmp_path)
    for folder in (tmp_path, link):
        line = rf"--save {folder}: the run of process {other.pid} on .* saves there"
        with pytest.raises(UserError, match=line):
            owner.hold(folder)
    other.kill()
    other.wait()
    owner.hold(tmp_path)
    owner.hold(tmp_path)  # a run may ask again
    assert str(other.pid) not in (tmp_path / owner.OWNER).read_text()


def test_the_claim_of_a_host_that_is_gone_is_waited_for(tmp_path, monkeypatch):
    """The server of the folder drops the lock after a while."""
    (tmp_path / owner.OWNER).write_text(
        "the run of process 1 on elsewhere (since 2026)"
    )
    acquire = mock.Mock()
    monkeypatch.setattr(owner.FileLock, "acquire", acquire)
    owner.hold(tmp_path)
    acquire.assert_called_once_with(timeout=owner.LEASE)


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch, capsys):
    refuse = mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available"))
    monkeypatch.setattr(owner.FileLock, "acquire", refuse)
    owner.hold(tmp_path)
    assert "> --save" in capsys.readouterr().out
