"""Sources: wherever a source is cut, its shards hold each document once and in order; bad input is one line."""

import bz2
import gzip
import json
import lzma
from collections import Counter

import pytest

from megatron_2bw.data.sources import FileSource, Shard
from megatron_2bw.errors import UserError

TEXTS = ["One. Two.", "é 日本 🙂", "", "x" * 50, "line\nbreak", "tab\tand \u2028 separator", "last"]
OPEN = {"": open, ".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


def read(source, limit):
    counts = Counter()
    shards = list(source.shards(limit))
    assert [shard.number for shard in shards] == list(range(len(shards)))
    assert sum(shard.size for shard in shards) == source.size()
    return [text for shard in shards for text in source.texts(shard, counts)], counts


def write(path, data: bytes):
    with OPEN[path.suffix if path.suffix in OPEN else ""](path, "wb") as file:
        file.write(data)
    return str(path)


@pytest.mark.parametrize("suffix", OPEN)
def test_json_lines_cut_at_every_size(tmp_path, suffix):
    lines = "".join(json.dumps({"n": 1, "body": text}, ensure_ascii=False) + "\n" for text in TEXTS).encode()
    files = (
        write(tmp_path / f"a.jsonl{suffix}", b"\xef\xbb\xbf" + lines + b"\n \r\n" + lines),
        write(tmp_path / f"b.ndjson{suffix}", lines.rstrip().replace(b"\n", b"\r\n")),
    )
    for limit in (1, 2, 3, 7, 40, 100, 10**6) if suffix == "" else (1, 100, 10**6):
        texts, counts = read(FileSource(files, key="body"), limit)
        assert texts == TEXTS * 3
        assert counts == {"bytes": 3 * len("".join(TEXTS).encode())}


@pytest.mark.parametrize("suffix", OPEN)
@pytest.mark.parametrize(
    ("documents", "expected"),
    [("file", None), ("lines", ["a b", "c", "d", "  e"]), ("blank-lines", ["a b\nc", "d\n  e"])],
)
def test_text_cut_at_every_size(tmp_path, suffix, documents, expected):
    data = b"\n \na b\nc\n\n\t\n\nd\n  e\n\n"
    files = tuple(write(tmp_path / f"{name}.txt{suffix}", data) for name in "xyz")
    for limit in range(1, 3 * len(data) + 2):
        texts, _ = read(FileSource(files, documents=documents), limit)
        assert texts == (expected or [data.decode()]) * 3


def test_a_shard_is_of_bounded_size(tmp_path):
    lines = (json.dumps({"text": f"document {i}"}) + "\n" for i in range(1000))
    files = [write(tmp_path / "a.jsonl.gz", "".join(lines).encode())]
    files += [write(tmp_path / f"{i}.jsonl", b'{"text": "t"}\n' * 9) for i in range(50)]
    shards = list(FileSource(tuple(files)).shards(500))
    assert max(len(shard.data) for shard in shards if shard.data) < 500 + 30
    assert max(shard.size for shard in shards if not shard.data) <= 500
    assert len(shards) < 1000 * 28 / 500 + 50 / 3 + 2  # small files share a shard


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "Expecting"),
        (b"[1]", "not a JSON object"),
        (b'{"txt": "a"}', "no key 'text', only txt: give --json-keys"),
        (b'{"text": null}', "the text is null"),
        (b'{"text": 3}', "the text is int"),
        (b'{"text": "\xff"}', "UTF-8"),
        (b'{"text": "\\ud800"}', "UTF-8"),
    ],
)
def test_bad_lines_stop_the_work_or_are_counted(tmp_path, line, reason):
    for suffix in ("", ".gz"):
        file = write(tmp_path / f"a.jsonl{suffix}", b'{"text": "good"}\n' + line + b'\n{"text": "too"}\n')
        with pytest.raises(UserError) as error:
            read(FileSource((file,)), 100)
        assert reason in str(error.value) and file in str(error.value) and len(str(error.value).splitlines()) == 1
        assert suffix or "line 2:" in str(error.value)
        texts, counts = read(FileSource((file,), skip_bad=True), 100)
        assert texts == ["good", "too"] and counts["bad"] == 1


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])
@pytest.mark.parametrize("documents", ["file", "lines"])
def test_damaged_file_is_named(tmp_path, suffix, documents):
    whole = write(tmp_path / f"a.txt{suffix}", b"".join(b"%d text\n" % (i * i) for i in range(3000)))
    data = open(whole, "rb").read()
    for damaged in (data[: len(data) // 2], b"no such format"):
        open(whole, "wb").write(damaged)
        with pytest.raises(UserError, match=f"a.txt{suffix}: cannot be read, "):
            read(FileSource((whole,), documents=documents), 10**6)


def test_text_that_is_not_utf_8_is_named(tmp_path):
    file = write(tmp_path / "a.txt", b"caf\xe9")
    with pytest.raises(UserError, match="a.txt: not valid UTF-8"):
        read(FileSource((file,)), 100)


def test_format_can_be_said(tmp_path):
    file = write(tmp_path / "a.log", b'{"text": "t"}\n')
    assert read(FileSource((file,)), 100)[0] == ['{"text": "t"}\n']
    assert read(FileSource((file,), format="jsonl"), 100)[0] == ["t"]
    assert list(FileSource((file,), format="jsonl").shards(100)) == [Shard(0, 14, ((file, 0, 14),))]
