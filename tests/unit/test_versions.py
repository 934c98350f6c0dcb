"""The oldest torch: one bound in pyproject.toml and in what `doctor` says."""

from __future__ import annotations

import tomllib
from pathlib import Path

from megatron_2bw.start.doctor import OLDEST_TORCH


def test_pip_and_the_doctor_have_the_same_bound():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert f"torch>={OLDEST_TORCH}" in project["dependencies"]
