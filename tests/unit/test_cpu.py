"""The CPU layer: what it answers, and that it changes nothing where CUDA is."""

from __future__ import annotations

import sys

import pytest
import torch

from megatron_2bw.mcore import cpu
from megatron_2bw.run.flags import parse, quick_check
from megatron_2bw.run.start import launch


def state() -> dict:
    """Everything that `install` may touch."""
    names = {name: getattr(torch.cuda, name) for name in cpu._TORCH_CUDA}
    return names | {
        "cuda": torch.nn.Module.cuda,
        "rng": torch.cuda.random.get_rng_state,
        "compile": torch.compile,
    }


def test_tensors_asked_for_on_cuda_are_on_the_cpu(cpu_layer):
    for tensor in (
        torch.zeros(2, device="cuda"),
        torch.tensor([1.0], device=torch.cuda.current_device()),
        torch.empty(2, device=torch.device("cuda", 0)),
        torch.ones(2).cuda(),
        torch.ones(2).to("cuda:0"),
        torch.ones(2).to(device="cuda"),
        torch.nn.Linear(2, 2).cuda(0).weight,
    ):
        assert tensor.device.type == "cpu"
        assert tensor.type() == "torch.cuda.FloatTensor"
    assert torch.ones(2).to(torch.float16).dtype == torch.float16


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
    monkeypatch.setattr(
        sys, "argv", ["pretrain_gpt_2bw.py", "--pipeline-schedule", "2bw", "--verbose"]
    )
    before, seen = state(), {}

    def stop_here(*given):
        seen.update(state())
        raise KeyboardInterrupt

    monkeypatch.setattr(parse, "parse", stop_here)
    with pytest.raises(KeyboardInterrupt):
        launch.launch("megatron_2bw.run.tasks.gpt")
    assert not cpu.installed() and seen == before
