"""The command with its processes: killed and continued, the files are those of one
undisturbed process."""

import gzip
import os
import signal
import subprocess
import time

import psutil
import pytest

from megatron_2bw.base.processes import stop_tree
from tests.e2e.launcher import end, program
from tests.unit.test_preprocess import files_of, json_lines, main, prose, written

TEXTS = prose(300)
CODE = """
import sys
from megatron_2bw.tools.data import preprocess, preprocess_command
preprocess.PART_BYTES = 100_000
sys.exit(preprocess_command.main(sys.argv[1:]))
"""


def start(words: str) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return program("-c", CODE, *words.split(), env=environment)


def kill_in_the_middle(words: str, folder, parts: int, number: int) -> None:
    """Send a signal to the command alone when so many parts are done; its workers must
    follow it."""
    process = start(f"{words} --workers 2")
    try:
        give_up = time.monotonic() + 120
        while len(list(folder.glob("tokens-*.arrow"))) < parts:
            running = process.poll() is None and time.monotonic() < give_up
            assert running, "it ended before it was killed"
            time.sleep(0.005)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        status = -number if number == signal.SIGKILL else 128 + number
        stopped = end(process, 60)
        assert stopped.returncode == status, stopped.stderr
        assert not psutil.wait_procs(children, timeout=20)[1]
    finally:
        stop_tree(process)


@pytest.mark.nightly
@pytest.mark.timeout(280)
def test_killed_and_continued(tmp_path):
    """BERT from plain and compressed JSON lines, with a tokenizer trained on the
    spot."""
    plain = json_lines(tmp_path / "a.jsonl", TEXTS * 12)
    packed = tmp_path / "b.jsonl.gz"
    lines = json_lines(tmp_path / "b.jsonl", TEXTS * 4).read_bytes()
    packed.write_bytes(gzip.compress(lines))
    prefix = tmp_path / "out"
    folder = tmp_path / "out.unfinished"
    words = f"--task bert --input {plain} {packed} --train-tokenizer wordpiece"
    words += " --vocab-size 80 --output-prefix"
    kill_in_the_middle(f"{words} {prefix}", folder, 2, signal.SIGTERM)
    kill_in_the_middle(f"{words} {prefix}", folder, 5, signal.SIGKILL)
    assert not (tmp_path / "out.bin").exists() and not (tmp_path / "out.idx").exists()
    last = end(start(f"{words} {prefix} --workers 3"), 150)
    assert last.returncode == 0 and "continuing the work" in last.stderr, last.stderr
    flags = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model"
    assert last.stdout == f"--data-path {prefix} {flags} {prefix}-tokenizer\n"
    assert not folder.exists()
    assert main(f"{words} {tmp_path}/whole") == 0
    tokenizer = "-tokenizer/tokenizer.json"
    assert files_of(prefix, tokenizer) == files_of(tmp_path / "whole", tokenizer)
    assert len(written(prefix)[0]) == 16 * len(TEXTS)
