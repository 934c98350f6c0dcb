"""A user's own Megatron entry script trains 2BW with three more lines, from the wheel, without `launch`."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest

from megatron_2bw import run_log
from tests.distributed.training import command
from tests.e2e.launcher import torchrun
from tests.e2e.test_source_patches import CPU_FLAGS
from tests.unit.test_wheel import build_wheel


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder with the unpacked wheel, and the script."""
    folder = tmp_path_factory.mktemp("own")
    with zipfile.ZipFile(build_wheel(folder)) as archive:
        archive.extractall(folder / "site")
    shutil.copy(Path(__file__).with_name("own_script.py"), folder / "train.py")
    return folder


def losses(site: Path, schedule: str, *flags: str) -> list[str]:
    argv = [word for word in command(2, 2, schedule, *flags, device=None) if word != "--mock-data"]
    result = torchrun(2, "train.py", [*argv, *CPU_FLAGS], cwd=site, PYTHONPATH=str(site / "site"))
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return [line.fields["lm loss"] for line in run_log.training(result.stdout)]


def test_without_delay_the_losses_are_megatrons(site):
    """The first four batches run without delay; the fifth is the first that runs on older weights."""
    plain, ours = losses(site, "megatron"), losses(site, "2bw", "--two-bw-sync-iterations", "4")
    assert len(plain) == len(ours) == 6 and plain[:4] == ours[:4] and plain[4] != ours[4]


def test_what_cannot_run_is_one_line(site):
    argv = [word for word in command(1, 2, "2bw", device=None) if word != "--mock-data"]
    result = torchrun(1, "train.py", [*argv, *CPU_FLAGS[:-2]], cwd=site, PYTHONPATH=str(site / "site"))
    errors = [line.partition("train.py: error: ")[2] for line in result.stderr.splitlines() if "error:" in line]
    assert result.returncode != 0 and len(set(errors)) == 1  # torchrun's report quotes the line
    assert errors[0].startswith("--rerun-mode ")
