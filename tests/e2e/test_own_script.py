"""A user's own Megatron entry script trains 2BW with three more lines, from the wheel, without `launch`."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

from megatron_2bw import run_log
from tests.distributed.training import command
from tests.e2e.launcher import torchrun
from tests.e2e.test_source_patches import CPU_FLAGS
from tests.unit.test_wheel import build_wheel


def losses(site: Path, schedule: str, *flags: str) -> list[str]:
    argv = [word for word in command(2, 2, schedule, *flags, device=None) if word != "--mock-data"]
    result = torchrun(2, "train.py", [*argv, *CPU_FLAGS], cwd=site, PYTHONPATH=str(site / "site"))
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return [line.fields["lm loss"] for line in run_log.training(result.stdout)]


def test_without_delay_the_losses_are_megatrons(tmp_path):
    """The first four batches run without delay; the fifth is the first that runs on older weights."""
    with zipfile.ZipFile(build_wheel(tmp_path)) as archive:
        archive.extractall(tmp_path / "site")
    shutil.copy(Path(__file__).with_name("own_script.py"), tmp_path / "train.py")
    plain, ours = losses(tmp_path, "megatron"), losses(tmp_path, "2bw", "--two-bw-sync-iterations", "4")
    assert len(plain) == len(ours) == 6 and plain[:4] == ours[:4] and plain[4] != ours[4]
