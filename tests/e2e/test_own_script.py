"""A user's own Megatron entry script trains 2BW with three more lines, from the wheel,
without `launch`."""

import shutil
import zipfile
from pathlib import Path

from tests.distributed.training import command
from tests.e2e.launcher import forked, output_of, torchrun
from tests.e2e.test_source_patches import CPU_FLAGS, losses
from tests.unit.test_wheel import build_wheel


def flags_of(schedule: str, *flags: str) -> list[str]:
    words = command(2, 2, schedule, *flags, *CPU_FLAGS, device=None)
    words.remove("--mock-data")
    return words


def test_without_delay_the_losses_are_megatrons(tmp_path):
    """The first four batches run without delay; the fifth is the first that runs on
    older weights."""
    site = tmp_path / "site"
    with zipfile.ZipFile(build_wheel(tmp_path)) as archive:
        archive.extractall(site)
    script = tmp_path / "train.py"
    shutil.copy(Path(__file__).with_name("own_script.py"), script)
    late = flags_of("2bw", "--two-bw-sync-iterations", "4")
    run = torchrun(2, "train.py", late, cwd=tmp_path, PYTHONPATH=str(site))
    ours = losses(output_of(run))
    plain = losses(forked(2, flags_of("megatron"), script=script))
    assert len(plain) == len(ours) == 6
    assert plain[:4] == ours[:4] and plain[4] != ours[4]
