"""The marker `proof`, and the folder through which xdist's workers share results.

`--device cuda` runs the trainings of tests/distributed on the GPUs of this machine,
with messages over NCCL. `--device stand-in` does so on tests/device: torch's CUDA build
without a GPU.
"""

import importlib
import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest

from megatron_2bw.base import local_ranks
from tests.device import build
from tests.session import FOLDER


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=("cpu", "cuda", "stand-in"),
        default="cpu",
        help="of the trainings in tests/distributed",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "cpu: it trains nothing, or stands in for a GPU: skipped with --device cuda",
    )
    config.addinivalue_line("markers", "device: only with --device stand-in")
    config.addinivalue_line(
        "markers", "nightly: dear; .ci/run leaves it out unless it is a proof"
    )
    config.addinivalue_line(
        "markers",
        "proof(*cases): one proof of a claim; of these cases, if any are named",
    )
    device = config.getoption("--device")
    if device == "stand-in":  # of the ranks; this process has none
        if why := build.missing():
            raise pytest.UsageError(f"--device stand-in: {why}")
        os.environ |= build.environment()
        local_ranks.run_world.__kwdefaults__["preload"] = "tests.device.preload"
    os.environ["MEGATRON_2BW_WORLD_DEVICE"] = "cpu" if device == "cpu" else "cuda"
    if device == "cuda" and not importlib.import_module("torch").cuda.device_count():
        raise pytest.UsageError("--device cuda: torch finds no GPU here")
    if not hasattr(config, "workerinput"):  # the workers inherit the environment
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="session_")
        config.add_cleanup(
            lambda: shutil.rmtree(os.environ.pop(FOLDER), ignore_errors=True)
        )


@pytest.fixture
def cpu_layer() -> Iterator[None]:
    """The CPU answers for CUDA."""
    from megatron_2bw.mcore import cpu

    was_installed = cpu.installed()
    cpu.install()
    yield
    if not was_installed:
        cpu.uninstall()


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Take the marker from the cases that it does not name. A name without a case is an
    error."""
    device = config.getoption("--device")
    for item in items:
        if device != "cpu" and item.get_closest_marker("cpu"):
            item.add_marker(pytest.mark.skip(reason="of the CPU"))
        if device != "stand-in" and item.get_closest_marker("device"):
            item.add_marker(pytest.mark.skip(reason="of the stand-in for CUDA"))
    unknown = {}
    for item in items:
        for mark in list(item.own_markers):
            if mark.name == "proof" and mark.args:
                function, case = item.nodeid.removesuffix("]").split("[", 1)
                unknown.setdefault(function, set(mark.args)).discard(case)
                if case not in mark.args:
                    item.own_markers.remove(mark)
    # else a case may have been left out on the command line
    if config.option.markexpr:
        for function, cases in unknown.items():
            if cases:
                raise pytest.UsageError(f"proof: {function} has no cases {cases}")
