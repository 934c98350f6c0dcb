"""The files for contributors, GitHub and those who cite: what they run exists, and
their versions are those of the package."""

import re
from pathlib import Path

import yaml

from megatron_2bw import __version__, cli
from megatron_2bw.run.start.doctor import OLDEST_TORCH

ROOT = Path(__file__).parents[2]
PAPER = "Memory-Efficient Pipeline-Parallel DNN Training"
FILES = {}
for pattern in (
    ".github/*/*.yml",
    ".pre-commit-config.yaml",
    "CITATION.cff",
):
    for path in ROOT.glob(pattern):
        FILES[path.stem] = yaml.safe_load(path.read_text())


def test_what_they_run_exists():
    text = (ROOT / "CONTRIBUTING.md").read_text() + str(FILES)
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake ([\w-]+)", text):
        assert f"\n{target}:" in makefile
    for name in re.findall(r"megatron-2bw ([\w-]+)", text):
        assert name in cli.COMMANDS
    (job,) = FILES["ci"]["jobs"].values()
    assert (ROOT / job["steps"][-1]["run"]).is_file()
    fields = [field["id"] for field in FILES["bug"]["body"]]
    assert fields == ["what", "command", "doctor", "gpu-check"]


def test_versions():
    project = (ROOT / "pyproject.toml").read_text()
    (ruff,) = FILES[".pre-commit-config"]["repos"]
    assert f'"ruff=={ruff["rev"][1:]}"' in project
    assert f'"torch>={OLDEST_TORCH}"' in project
    citation = FILES["CITATION"]
    assert citation["authors"]
    assert citation["version"] == __version__
    (paper,) = citation["references"]
    assert paper["title"] == PAPER
