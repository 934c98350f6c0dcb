"""Environment variables of CUDA, NCCL and torch that a run refuses, or sets."""

from __future__ import annotations

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
        (2, 2, "2bw", {"two_bw_exchange": "gloo"}, True),
        (2, 2, "gpipe", {"two_bw_exchange": "gloo"}, False),
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
        assert (
            message.startswith(f"{name}=1 does not work with ")
            if hangs
            else message is None
        )
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
    seen: list[str | None] = []
    monkeypatch.setattr(
        cpu,
        "wanted",
        lambda device: seen.append(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")),
    )
    parse_early(flags.split(), stop)
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == expected and set(seen) <= {
        expected
    }
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"
    parse_early(flags.split(), stop)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"


@pytest.mark.parametrize(
    "schedule, stages, flags, expected",
    [
        ("2bw", 2, {}, "4"),
        ("2bw", 1, {}, None),
        ("2bw", 2, {"two_bw_exchange": "gloo"}, None),
        ("2bw", 2, {"distributed_backend": "gloo"}, None),
        (
            "2bw",
            2,
            {"context_parallel_size": 2, "transformer_impl": "transformer_engine"},
            None,
        ),
        ("megatron", 2, {}, None),
    ],
)
def test_a_bound_on_the_channels_of_a_message(
    schedule, stages, flags, expected, monkeypatch
):
    monkeypatch.setattr(checks, "installed", lambda package: True)
    argv = command(stages, 2, schedule, **{"distributed_backend": "nccl"} | flags)
    world = 4 if "context_parallel_size" in flags else stages
    assert (
        complaint(argv, world) is None
        and os.environ.get("NCCL_MAX_P2P_NCHANNELS") == expected
    )
    os.environ["NCCL_MAX_P2P_NCHANNELS"] = "16"
    assert (
        complaint(argv, world) is None and os.environ["NCCL_MAX_P2P_NCHANNELS"] == "16"
    )
