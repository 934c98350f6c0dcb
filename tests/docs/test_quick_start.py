"""The laptop's quick start, as it stands in docs/quick_start.md: own text, GPT and
BERT, evaluation."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_2bw.base.processes import free_port, stop_tree
from tests.e2e.launcher import ROOT


def blocks(page: str) -> list[str]:
    """The blocks of commands of a page of docs/."""
    return re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / page).read_text(), re.S)


# the blocks for a laptop
PREPROCESS, TRAIN, EVALUATE, BERT, *_ = blocks("quick_start.md")


def run(block: str, folder: Path) -> str:
    """One block of commands in a shell, in `folder`; what it printed."""
    process = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ
        | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            "PET_MASTER_PORT": str(free_port()),
        },
    )
    try:
        output, _ = process.communicate(timeout=1200)
    finally:
        stop_tree(process)
    assert process.returncode == 0, output[-4000:]
    return output


def losses(output: str) -> list[str]:
    line = r"test set \| (lm loss value: \S+ .*?sop loss value: \S+|lm loss value: \S+)"
    return re.findall(line, output)


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """A folder with what a copy of the repository has, and the text of the first
    step."""
    folder = tmp_path_factory.mktemp("copy")
    names = (
        "README.md docs scripts megatron_2bw pretrain_gpt_2bw.py pretrain_bert_2bw.py"
    )
    for name in names.split():
        (folder / name).symlink_to(ROOT / name)
    run(PREPROCESS, folder)
    return folder


def test_gpt(copy):
    trained = run(TRAIN, copy)
    assert trained.count("lm loss:") == 5 and "bubble:" in trained
    evaluated = run(EVALUATE, copy)
    assert losses(evaluated) == losses(trained) != []
    # the sample may have several lines
    assert re.search(r"^The pipeline.", evaluated, re.M | re.S)


def test_bert(copy):
    output = run(BERT, copy)
    assert output.count("sop loss:") == 5
    trained, evaluated = losses(output)
    assert trained == evaluated and "sop loss" in trained
