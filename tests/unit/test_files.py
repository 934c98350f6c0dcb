"""The one atomic writer: old content or new content, and nothing left over."""

import math
import os

import pytest

from megatron_2bw.base.files import set_aside, write_json, write_whole


@pytest.mark.parametrize("content", ["grüße\n", "grüße\n".encode()])
def test_a_file_is_replaced(content, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def before() -> None:
        assert path.read_text() == "old"

    write_whole(path, content, before=before)
    assert path.read_text() == "grüße\n"
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("fails", ["replace", "fsync"])
def test_a_write_that_fails_leaves_the_old_content_and_nothing_else(
    fails, tmp_path, monkeypatch
):
    def full(*args):
        raise OSError(28, "No space left on device")

    path = tmp_path / "a.txt"
    path.write_text("old")
    monkeypatch.setattr(os, fails, full)
    with pytest.raises(OSError, match="No space") as error:
        write_whole(path, "new", sync=True)
    assert error.value.filename == str(path)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a.txt"]


def test_json_has_null_for_what_is_not_finite(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"a": [1.5, math.nan, (math.inf, 1)]}, indent=None)
    assert path.read_text() == '{"a": [1.5, null, [null, 1]]}\n'


def test_what_is_set_aside_keeps_its_name_with_a_number(tmp_path):
    for text in ("first", "second"):
        (tmp_path / "runs").mkdir()
        (tmp_path / "runs" / text).touch()
        set_aside(tmp_path / "runs")
    set_aside(tmp_path / "runs")
    for name in ("runs.1/first", "runs.2/second"):
        assert (tmp_path / name).is_file()
