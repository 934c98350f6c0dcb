"""What a wheel of this repository holds, and the oldest torch that it asks for."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

from megatron_2bw.run.start.doctor import OLDEST_TORCH

ROOT = Path(__file__).parents[2]
SCRIPTS = {"pretrain_bert_2bw.py", "pretrain_gpt_2bw.py"}
SOURCE = {"pyproject.toml", "setup.py", "README.md", "LICENSE", *SCRIPTS}


def build_wheel(folder: Path) -> Path:
    """The wheel of a copy of the sources."""
    source = folder / "source"
    shutil.copytree(
        ROOT / "megatron_2bw",
        source / "megatron_2bw",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for name in SOURCE:
        shutil.copy(ROOT / name, source)
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", build, str(folder)],
        cwd=source,
        check=True,
        capture_output=True,
    )
    return next(folder.glob("megatron_2bw-*.whl"))


def test_the_wheel_holds_all_files_of_the_package_and_the_entry_scripts(tmp_path):
    names = {
        name
        for name in zipfile.ZipFile(build_wheel(tmp_path)).namelist()
        if ".dist-info/" not in name
    }
    copied = [
        path
        for path in (tmp_path / "source" / "megatron_2bw").rglob("*")
        if path.is_file()
    ]
    assert (
        names
        == {str(path.relative_to(tmp_path / "source")) for path in copied} | SCRIPTS
    )


def test_the_recipes_of_images_copy_what_the_wheel_is_built_from():
    lines = (ROOT / "docker" / "Dockerfile").read_text().splitlines()
    copied = [
        word
        for line in lines
        if line.startswith("COPY ")
        for word in line.split()[1:-1]
    ]
    assert sorted(copied) == sorted({*SOURCE, "megatron_2bw"})
    files = (
        (ROOT / "docker" / "apptainer.def")
        .read_text()
        .split("%files\n")[1]
        .split("\n\n")[0]
    )
    pairs = [line.split() for line in files.splitlines()]
    assert {source: f"/opt/megatron-2bw/{source}" for source in copied} == dict(pairs)


def test_pip_and_the_doctor_have_the_same_bound():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch>={OLDEST_TORCH}" in project["dependencies"]
