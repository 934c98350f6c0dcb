"""The script with its processes: killed in its middle and continued, the files are those of one undisturbed process."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from megatron_2bw.data import preprocess, preprocess_cli
from megatron_2bw.processes import stop_tree
from tests.e2e.launcher import ROOT, end
from tests.unit.test_preprocess import OneProcess, bert_samples, check_bert_samples, prose, written
from tests.unit.test_sft import CHATML, tokenizer

TEXTS = prose(300)


def start(*flags) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "scripts/preprocess_data.py", *map(str, flags)],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def kill_in_the_middle(process: subprocess.Popen, folder, shards: int) -> None:
    """SIGKILL the script alone when `shards` are done; its workers must follow it."""
    try:
        give_up = time.monotonic() + 120
        while len(list(folder.glob("*.npz"))) < shards:
            assert process.poll() is None and time.monotonic() < give_up, "it ended before it was killed"
            time.sleep(0.005)
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        assert end(process, 60).returncode == -signal.SIGKILL
        assert len(children) >= 3 and not psutil.wait_procs(children, timeout=20)[1]
    finally:
        stop_tree(process)


@pytest.mark.timeout(280)
def test_killed_and_continued(tmp_path, monkeypatch, capsys):
    """BERT from plain and compressed JSON lines, with a tokenizer trained on the spot."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    (tmp_path / "a.jsonl").write_bytes(lines * 12)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines * 4))
    flags = ["--task", "bert", "--input", tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"]
    flags += ["--train-tokenizer", "wordpiece", "--vocab-size", 80, "--shard-mb", 0.01]
    prefix, folder = tmp_path / "out", tmp_path / "out.unfinished"
    kill_in_the_middle(start(*flags, "--output-prefix", prefix, "--workers", 2), folder, 2)
    kept = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.npz")}
    assert not (tmp_path / "out.bin").exists() and not (tmp_path / "out.idx").exists()

    second = end(start(*flags, "--output-prefix", prefix, "--workers", 3), 150)
    assert second.returncode == 0, second.stderr
    model = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {prefix}-tokenizer"
    assert second.stdout == f"--data-path {prefix} {model}\n" and not folder.exists()
    last = second.stderr.splitlines()[-1]
    assert f"{16 * len(TEXTS):,} documents" in last and "MB/s" in last
    assert kept and "an earlier call has done the rest" in last

    monkeypatch.setattr(preprocess, "Pool", OneProcess)
    flags[-1] = 16
    whole = [*map(str, flags), "--output-prefix", str(tmp_path / "whole")]
    assert preprocess_cli.main(whole) == 0, capsys.readouterr()
    for suffix in (".bin", ".idx", "-tokenizer/tokenizer.json"):
        assert (tmp_path / f"out{suffix}").read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()
    documents, _ = written(prefix)
    assert len(documents) == 16 * len(TEXTS)
    check_bert_samples(bert_samples(prefix, tmp_path / "out-tokenizer", binary_head=True))


@pytest.mark.timeout(280)
def test_conversations_killed_and_continued(tmp_path, monkeypatch, capsys):
    turns = [{"messages": [{"role": role, "content": text} for role in ("user", "assistant")]} for text in TEXTS]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in turns * 3))
    flags = ["--task", "sft", "--input", tmp_path / "a.jsonl", "--shard-mb", 0.03]
    flags += ["--tokenizer-model", tokenizer(tmp_path / "tokenizer", CHATML)]
    prefix, folder = tmp_path / "out", tmp_path / "out.unfinished"
    kill_in_the_middle(start(*flags, "--output-prefix", prefix, "--workers", 2), folder, 2)
    second = end(start(*flags, "--output-prefix", prefix, "--workers", 3), 150)
    assert second.returncode == 0 and second.stdout.endswith(" --sft-data\n"), second.stderr
    assert "an earlier call has done the rest" in second.stderr and not folder.exists()
    monkeypatch.setattr(preprocess, "Pool", OneProcess)
    whole = [*map(str, flags), "--output-prefix", str(tmp_path / "whole")]
    assert preprocess_cli.main(whole) == 0, capsys.readouterr()
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"out{suffix}").read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()
