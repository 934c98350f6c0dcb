"""The laptop's quick start, as it stands in docs/quick_start.md: own text, GPT and
BERT, evaluation."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_2bw.base.processes import free_port, stop_tree
from tests.e2e.launcher import ROOT

PAGE = (ROOT / "docs" / "quick_start.md").read_text()
LAPTOP = PAGE[PAGE.index("## On a laptop") : PAGE.index("## On one server")]


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
    except subprocess.TimeoutExpired:
        stop_tree(process)
        raise
    assert process.returncode == 0, output[-4000:]
    return output


def losses(output: str, where: str) -> list[str]:
    return re.findall(
        rf"{where} \| (lm loss value: \S+ .*?sop loss value: \S+|lm loss value: \S+)",
        output,
    )


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """A folder with what a copy of the repository has, and the text of the first
    step."""
    folder = tmp_path_factory.mktemp("copy")
    for name in (
        "README.md",
        "docs",
        "scripts",
        "megatron_2bw",
        "pretrain_gpt_2bw.py",
        "pretrain_bert_2bw.py",
    ):
        (folder / name).symlink_to(ROOT / name)
    run(BLOCKS[0], folder)
    return folder


BLOCKS = re.findall(r"```bash\n(.*?)```", LAPTOP, re.S)


def test_gpt(copy):
    trained = run(BLOCKS[1], copy)
    assert trained.count("lm loss:") == 5 and "bubble:" in trained
    evaluated = run(BLOCKS[2], copy)
    assert losses(evaluated, "test set") == losses(trained, "test set") != []
    # the sample may have several lines
    assert re.search(r"^The pipeline.", evaluated, re.M | re.S)


def test_bert(copy):
    output = run(BLOCKS[3], copy)
    assert output.count("sop loss:") == 5
    trained, evaluated = losses(output, "test set")
    assert trained == evaluated and "sop loss" in trained
