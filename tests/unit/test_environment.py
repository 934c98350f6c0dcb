"""Environment variables of CUDA, NCCL and torch that a run refuses, or sets."""

import os

import pytest

from megatron_2bw.mcore import cpu
from megatron_2bw.run.flags import checks, environment
from megatron_2bw.run.flags.parse import parse_early
from tests.distributed.training import command
from tests.unit.command_lines import complaint, stop

pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.fixture(autouse=True)
def none_set(monkeypatch):
    for name in (*environment.REFUSED, *environment.SET):
        monkeypatch.setenv(name, "")  # restored at the end even where a check sets it
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    "stages, world, schedule, flags, hangs",
    [
        (2, 2, "2bw", {}, True),
        (2, 2, "gpipe", {}, True),
        (2, 2, "megatron", {}, False),
        (1, 2, "2bw", {}, True),  # the late step's collectives
        (1, 1, "2bw", {}, False),
        (1, 2, "pipedream-flush", {}, False),
        (2, 2, "2bw", {"pipeline_exchange": "gloo"}, True),
        (2, 2, "gpipe", {"pipeline_exchange": "gloo"}, False),
        (2, 2, "2bw", {"distributed_backend": "gloo"}, False),
    ],
)
def test_variables_with_which_a_run_over_nccl_would_hang(
    stages, world, schedule, flags, hangs, monkeypatch
):
    argv = command(stages, 2, schedule, **{"distributed_backend": "nccl"} | flags)
    for name in environment.REFUSED:
        monkeypatch.setenv(name, "0")
        assert complaint(argv, world) is None
        monkeypatch.setenv(name, "1")
        message = complaint(argv, world)
        if hangs:
            assert message.startswith(f"{name}=1 does not work with ")
        else:
            assert message is None
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    "flags, expected",
    [
        ("--pipeline-schedule 2bw --device cuda", "32"),
        ("--pipeline-schedule gpipe --tensor-model-parallel-size 1", "32"),
        ("--pipeline-schedule 2bw --tensor-model-parallel-size 2", "1"),
        ("--pipeline-schedule 2bw --context-parallel-size=2", "1"),
        ("--device cuda", None),
        ("--device cuda --tensor-model-parallel-size 2", "1"),
        ("--device cuda --tensor-model-parallel-size 2 --use-megatron-fsdp", None),
    ],
)
def test_a_hardware_queue_for_each_stream(flags, expected, monkeypatch):
    """Set before anything asks CUDA."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"

    def wanted(device: str) -> None:
        assert os.environ.get(name) == expected

    monkeypatch.setattr(cpu, "wanted", wanted)
    parse_early(flags.split(), stop)
    assert os.environ.get(name) == expected
    os.environ[name] = expected = "8"
    parse_early(flags.split(), stop)
    assert os.environ[name] == "8"


@pytest.mark.parametrize(
    "schedule, stages, contexts, flags, expected",
    [
        ("2bw", 2, 1, {}, "4"),
        ("2bw", 1, 1, {}, None),
        ("2bw", 2, 1, {"pipeline_exchange": "gloo"}, None),
        ("2bw", 2, 1, {"distributed_backend": "gloo"}, None),
        ("2bw", 2, 2, {"transformer_impl": "transformer_engine"}, None),
        ("megatron", 2, 1, {}, None),
    ],
)
def test_a_bound_on_the_channels_of_a_message(
    schedule, stages, contexts, flags, expected, monkeypatch
):
    name = "NCCL_MAX_P2P_NCHANNELS"
    monkeypatch.setattr(checks, "installed", lambda package: True)
    flags = dict(distributed_backend="nccl", context_parallel_size=contexts) | flags
    argv = command(stages, 2, schedule, **flags)
    assert complaint(argv, stages * contexts) is None
    assert os.environ.get(name) == expected
    os.environ[name] = "16"
    assert complaint(argv, stages * contexts) is None
    assert os.environ[name] == "16"
