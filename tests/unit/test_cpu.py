"""The CPU layer: what it answers, and that it changes nothing where CUDA is."""

import sys

import pytest
import torch

from megatron_2bw.mcore import cpu
from megatron_2bw.run.flags import parse, quick_check
from megatron_2bw.run.start import launch


def state() -> list:
    """Everything that `install` may touch."""
    names = cpu._CONSTANTS | cpu._FUNCTIONS
    others = [torch.nn.Module.cuda, torch.cuda.random.get_rng_state, torch.compile]
    return [getattr(torch.cuda, name) for name in names] + others


def test_tensors_asked_for_on_cuda_are_on_the_cpu(cpu_layer):
    ones = torch.ones(2)
    for tensor in (
        torch.zeros(2, device="cuda"),
        torch.zeros(2, device=torch.cuda.current_device()),
        torch.empty(2, device=torch.device("cuda", 0)),
        ones.cuda(),
        ones.to("cuda:0"),
        ones.to(device="cuda"),
        torch.nn.Linear(2, 2).cuda(0).weight,
    ):
        assert tensor.device.type == "cpu"
        assert tensor.type() == "torch.cuda.FloatTensor"
    assert ones.to(torch.float16).dtype == torch.float16


def test_uninstall_puts_everything_back():
    before = state()
    cpu.install()
    cpu.install()
    assert state() != before and cpu.installed()
    cpu.uninstall()
    assert state() == before and not cpu.installed()
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_nothing_changes_on_a_cuda_host(monkeypatch):
    """With a GPU and --device auto, `launch` neither installs the layer nor replaces a
    flag."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(quick_check, "mistake", lambda *given: None)
    argv = ["pretrain_gpt_2bw.py", "--pipeline-schedule", "2bw", "--verbose"]
    monkeypatch.setattr(sys, "argv", argv)
    before = state()

    def parsing(*args):
        assert not cpu.installed() and state() == before
        raise KeyboardInterrupt

    monkeypatch.setattr(parse, "parse", parsing)
    with pytest.raises(KeyboardInterrupt):
        launch.launch("megatron_2bw.run.tasks.gpt")
