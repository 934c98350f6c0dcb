"""What a wheel of this repository holds."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPTS = {"pretrain_bert_2bw.py", "pretrain_gpt_2bw.py"}
SOURCE = {"pyproject.toml", "setup.py", "README.md", "LICENSE", *SCRIPTS}


def build_wheel(folder: Path) -> Path:
    """The wheel of a copy of the sources."""
    source = folder / "source"
    package = source / "megatron_2bw"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "megatron_2bw", package, ignore=ignored)
    for name in SOURCE:
        shutil.copy(ROOT / name, source)
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    command = [sys.executable, "-c", build, str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    return next(folder.glob("megatron_2bw-*.whl"))


def test_the_wheel_holds_all_files_of_the_package_and_the_entry_scripts(tmp_path):
    wheel = zipfile.ZipFile(build_wheel(tmp_path))
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    copied = set(SCRIPTS)
    for path in (tmp_path / "source" / "megatron_2bw").rglob("*"):
        if path.is_file():
            copied.add(str(path.relative_to(tmp_path / "source")))
    assert names == copied


def test_the_recipes_of_images_copy_what_the_wheel_is_built_from():
    copied = set()
    for line in (ROOT / "docker/Dockerfile").read_text().splitlines():
        if line.startswith("COPY "):
            copied.update(line.split()[1:-1])
    assert copied == {*SOURCE, "megatron_2bw"}
    recipe = (ROOT / "docker/apptainer.def").read_text()
    files = recipe.split("%files\n")[1].split("\n\n")[0]
    pairs = dict(line.split() for line in files.splitlines())
    assert pairs == {name: f"/opt/megatron-2bw/{name}" for name in copied}
