"""The command with its processes: killed and continued, the files are those of one
undisturbed process."""

import gzip
import json
import os
import signal
import subprocess
import time

import psutil
import pytest

from megatron_2bw.base.processes import stop_tree
from tests.e2e.launcher import end, program
from tests.unit.test_preprocess import files_of, main, prose, written

TEXTS = prose(300)
SMALL = (
    "import sys; from megatron_2bw.tools.data import preprocess, preprocess_cli; "
    "preprocess.PART_BYTES = 100_000"
)


def start(*flags) -> subprocess.Popen:
    code = f"{SMALL}; sys.exit(preprocess_cli.main())"
    return program("-c", code, *flags, env=os.environ | {"OMP_NUM_THREADS": "1"})


def kill_in_the_middle(
    process: subprocess.Popen, folder, parts: int, number: int
) -> None:
    """Send a signal to the command alone when so many parts are done; its workers must
    follow it."""
    try:
        give_up = time.monotonic() + 120
        while len(list(folder.glob("tokens-*.arrow"))) < parts:
            assert process.poll() is None and time.monotonic() < give_up, (
                "it ended before it was killed"
            )
            time.sleep(0.005)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        stopped = end(process, 60)
        assert stopped.returncode == (
            -number if number == signal.SIGKILL else 128 + number
        ), stopped.stderr
        assert not psutil.wait_procs(children, timeout=20)[1]
    finally:
        stop_tree(process)


@pytest.mark.nightly
@pytest.mark.timeout(280)
def test_killed_and_continued(tmp_path):
    """BERT from plain and compressed JSON lines, with a tokenizer trained on the
    spot."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    (tmp_path / "a.jsonl").write_bytes(lines * 12)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines * 4))
    flags = ["--task", "bert", "--input", tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"]
    flags += ["--train-tokenizer", "wordpiece", "--vocab-size", 80, "--output-prefix"]
    prefix, folder = tmp_path / "out", tmp_path / "out.unfinished"
    kill_in_the_middle(start(*flags, prefix, "--workers", 2), folder, 2, signal.SIGTERM)
    kill_in_the_middle(start(*flags, prefix, "--workers", 2), folder, 5, signal.SIGKILL)
    assert not (tmp_path / "out.bin").exists() and not (tmp_path / "out.idx").exists()
    last = end(start(*flags, prefix, "--workers", 3), 150)
    assert last.returncode == 0 and "continuing the work" in last.stderr, last.stderr
    made = tmp_path / "out-tokenizer"
    model = f"--data-path {prefix} --tokenizer-type HuggingFaceTokenizer --tokenizer-model {made}"
    assert last.stdout == model + "\n" and not folder.exists()
    assert main(*flags, tmp_path / "whole") == 0
    more = "-tokenizer/tokenizer.json"
    assert files_of(prefix, more) == files_of(tmp_path / "whole", more) and len(
        written(prefix)[0]
    ) == 16 * len(TEXTS)
