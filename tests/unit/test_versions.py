"""The oldest torch: one bound in pyproject.toml and at start."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import torch

from megatron_2bw.flags.checks import OLDEST_TORCH, torch_version


def test_pip_and_the_start_have_the_same_bound():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert f"torch>={OLDEST_TORCH}" in project["dependencies"]


@pytest.mark.parametrize(
    ("version", "old"), [("2.7.1+cu126", True), ("1.13.1", True), ("2.11.0a0+eb65b36914.nv26.02", False)]
)
def test_an_older_torch_is_refused(version, old, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    assert bool(torch_version()) == old
