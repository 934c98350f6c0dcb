"""make clean removes what is made again by itself, and nothing that was trained."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_clean_keeps_trained_models_and_the_environment(tmp_path):
    for name in ("Makefile", ".python-version"):
        shutil.copy(ROOT / name, tmp_path)
    kept = ("out/mine/gpt-model/iter_0000020/weights", "checkpoints/gpt/x", ".venv/lib/__pycache__/x", "my.py")
    removed = ("build/x", "megatron_2bw.egg-info/x", ".pytest_cache/x", ".ruff_cache/x", "tests/unit/__pycache__/x")
    for name in (*kept, *removed):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    subprocess.run(["make", "clean"], cwd=tmp_path, check=True, capture_output=True)
    assert all((tmp_path / name).exists() for name in kept)
    assert not any((tmp_path / name).exists() for name in removed)
