"""The command with its processes: killed and continued, the files are those of one undisturbed process."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from megatron_2bw.processes import stop_tree
from tests.e2e.launcher import ROOT, end
from tests.unit.test_preprocess import bert_samples, check_bert_samples, files_of, main, prose, written
from tests.unit.test_sft import CHATML, tokenizer

TEXTS = prose(300)
SMALL = "import sys; from megatron_2bw.data import preprocess, preprocess_cli; preprocess.PART_BYTES = 100_000"


def start(*flags) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", f"{SMALL}; sys.exit(preprocess_cli.main())", *map(str, flags)],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def kill_in_the_middle(process: subprocess.Popen, folder, number: int) -> None:
    """Send a signal to the command alone when parts are done; its workers must follow it."""
    try:
        give_up = time.monotonic() + 120
        while len(list(folder.glob("tokens-*.arrow"))) < 3:
            assert process.poll() is None and time.monotonic() < give_up, "it ended before it was killed"
            time.sleep(0.005)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        stopped = end(process, 60)
        assert stopped.returncode == (-number if number == signal.SIGKILL else 128 + number), stopped.stderr
        assert not psutil.wait_procs(children, timeout=20)[1]
    finally:
        stop_tree(process)


@pytest.mark.timeout(280)
@pytest.mark.parametrize("task", ["bert", "sft"])
def test_killed_and_continued(tmp_path, task):
    """BERT from plain and compressed JSON lines, with a tokenizer trained on the spot; conversations."""
    if task == "bert":
        lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
        (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines * 4))
        flags = ["--input", tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"]
        flags += ["--train-tokenizer", "wordpiece", "--vocab-size", 80]
    else:
        turns = [{"messages": [{"role": role, "content": text} for role in ("user", "assistant")]} for text in TEXTS]
        lines = "".join(json.dumps(each) + "\n" for each in turns).encode()
        flags = ["--input", tmp_path / "a.jsonl", "--tokenizer-model", tokenizer(tmp_path / "tokenizer", CHATML)]
    (tmp_path / "a.jsonl").write_bytes(lines * 12)
    flags = ["--task", task, *flags, "--output-prefix"]
    prefix, folder = tmp_path / "out", tmp_path / "out.unfinished"
    number = signal.SIGKILL if task == "bert" else signal.SIGTERM
    kill_in_the_middle(start(*flags, prefix, "--workers", 2), folder, number)
    assert not (tmp_path / "out.bin").exists() and not (tmp_path / "out.idx").exists()
    second = end(start(*flags, prefix, "--workers", 3), 150)
    assert second.returncode == 0 and "continuing the work" in second.stderr, second.stderr
    made = tmp_path / ("out-tokenizer" if task == "bert" else "tokenizer")
    model = f"--data-path {prefix} --tokenizer-type HuggingFaceTokenizer --tokenizer-model {made}"
    assert second.stdout == model + " --sft-data" * (task == "sft") + "\n" and not folder.exists()
    assert main(*flags, tmp_path / "whole") == 0
    more = ["-tokenizer/tokenizer.json"] * (task == "bert")
    assert files_of(prefix, *more) == files_of(tmp_path / "whole", *more)
    if task == "bert":
        assert len(written(prefix)[0]) == 16 * len(TEXTS)
        check_bert_samples(bert_samples(prefix, made, binary_head=True))
