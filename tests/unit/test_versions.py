"""The oldest torch: one bound in pyproject.toml and at start."""

from __future__ import annotations

import tomllib
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from megatron_2bw.flags.checks import OLDEST_TORCH
from megatron_2bw.flags.parse import check, parse_early


class Stopped(Exception):
    pass


def stop(message: str):
    raise Stopped(message)


def test_pip_and_the_start_have_the_same_bound():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert f"torch>={OLDEST_TORCH}" in project["dependencies"]


@pytest.mark.parametrize("version", ["2.7.1+cu126", "2.7.0a0+7c8ec84dab.nv25.03", "1.13.1"])
def test_an_older_torch_is_refused_before_megatron_is_imported(version, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(Stopped) as refused:
        parse_early(["--pipeline-schedule", "2bw", "--device", "cpu"], stop)
    assert str(refused.value) == f"torch {version} is too old: install torch {OLDEST_TORCH} or newer"
    with pytest.raises(Stopped, match="too old"):  # of an entry script of the user's own
        check(Namespace(), stop)


@pytest.mark.parametrize("version", ["2.8.0", "2.11.0a0+eb65b36914.nv26.02", "2.15.0+cpu", "3.0.0"])
def test_others_are_accepted(version, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    parse_early(["--pipeline-schedule", "2bw", "--device", "cpu"], stop)
