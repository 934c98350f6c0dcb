"""The one atomic writer: old content or new content, and nothing left over."""

from __future__ import annotations

import os

import pytest

from megatron_2bw.files import write_whole


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("content", ["grüße\n", b"\x00\xff"])
def test_a_file_is_replaced(content, sync, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    write_whole(path, content, sync)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("fails", ["replace", "fsync"])
def test_a_write_that_fails_leaves_the_old_content_and_nothing_else(fails, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    path = tmp_path / "a.txt"
    path.write_text("old")
    monkeypatch.setattr(os, fails, full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, "new", sync=True)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a.txt"]
