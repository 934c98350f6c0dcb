"""Unit tests share one process: what a test or the code under test sets in the
environment ends with the test."""

import os
from collections.abc import Iterator
from unittest import mock

import pytest

# a test may import Megatron without the CPU's stand-in
os.environ["TORCHDYNAMO_DISABLE"] = "1"


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Several threads of torch wait for each other on a busy machine."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def on_the_cpu() -> Iterator[None]:
    """Megatron's modules look for CUDA when they are imported and while they check
    arguments."""
    from megatron_2bw.mcore import cpu
    from megatron_2bw.schedules import SCHEDULE_NAMES
    from tests.unit.command_lines import parser_of

    was_installed = cpu.installed()
    cpu.install()
    for schedule in SCHEDULE_NAMES:
        for task in ("gpt", "bert"):
            parser_of(schedule, task)
    yield
    if not was_installed:
        cpu.uninstall()
