"""The CPU layer: what it answers, and that it changes nothing where CUDA is."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from megatron_2bw import cpu


@pytest.fixture
def layer():
    cpu.install()
    yield
    cpu.uninstall()


def state() -> dict:
    """Everything that `install` may touch."""
    names = {name: getattr(torch.cuda, name) for name in (*cpu._TORCH_CUDA, "is_available")}
    return names | {"Module.cuda": torch.nn.Module.cuda, "rng": torch.cuda.random.get_rng_state}


def test_tensors_asked_for_on_cuda_are_on_the_cpu(layer):
    for tensor in (
        torch.zeros(2, device="cuda"),
        torch.tensor([1.0], device=torch.cuda.current_device()),
        torch.empty(2, device=torch.device("cuda", 0)),
        torch.ones(2).cuda(),
        torch.ones(2).to("cuda:0"),
        torch.ones(2).to(device="cuda"),
        torch.zeros_like(torch.ones(2), device="cuda"),
        torch.arange(3, device="cuda"),
    ):
        assert tensor.device.type == "cpu"
    assert torch.ones(2).to(torch.float16).dtype == torch.float16
    assert torch.nn.Linear(2, 2).cuda(0).weight.device.type == "cpu"


def test_a_seed_where_a_gpu_is(monkeypatch):
    """torch.cuda.random counts the GPUs itself; none of them has a generator yet."""
    monkeypatch.setattr(torch.cuda.random, "device_count", lambda: 1)
    cpu.install()
    try:
        assert torch.manual_seed(7).initial_seed() == 7
    finally:
        cpu.uninstall()


def test_tensors_that_a_backward_asks_for(layer):
    """Also one that starts inside another, as a full recompute does."""

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            return tensor.clone()

        @staticmethod
        def backward(ctx, gradient):
            assert gradient.type() == "torch.cuda.FloatTensor"
            return torch.ones(2, device=torch.cuda.current_device()) * gradient

    class Outer(Inner):
        @staticmethod
        def backward(ctx, gradient):
            with torch.enable_grad():
                inner = Inner.apply(leaf)
            torch.autograd.backward(inner, gradient)
            return Inner.backward(ctx, gradient)

    leaf, other = (torch.ones(2, requires_grad=True) for _ in range(2))
    Outer.apply(other).sum().backward()
    assert leaf.grad.tolist() == other.grad.tolist() == [1, 1]


def test_type_names(layer):
    assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(1).bfloat16().type() == "torch.cuda.BFloat16Tensor"
    assert torch.zeros(1).type(torch.int64).dtype == torch.int64


def test_streams_events_and_memory(layer):
    stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream):
        event.record()
    torch.cuda.current_stream().wait_stream(stream)
    event.synchronize()
    assert event.query() and stream.query()
    assert torch.cuda.memory_allocated() > 1 << 20 <= torch.cuda.memory_stats()["allocated_bytes.all.peak"]
    assert not torch.cuda.is_available() and torch.cuda.device_count() == 1


def test_the_generator_is_the_cpus(layer):
    torch.cuda.manual_seed(3)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3, device="cuda")
    cpu.set_tracker_rng_state(state)
    assert torch.equal(first, torch.rand(3))


def test_uninstall_puts_everything_back():
    before = state()
    cpu.install()
    cpu.install()
    assert state() != before and cpu.installed()
    cpu.uninstall()
    assert state() == before and not cpu.installed()
    assert torch.zeros(1).type() == "torch.FloatTensor"


@pytest.mark.parametrize(
    "device, cuda, expected",
    [("auto", True, False), ("cuda", True, False), ("cpu", True, True), ("auto", False, True), ("cpu", False, True)],
)
def test_wanted(monkeypatch, device, cuda, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    assert cpu.wanted(device) is expected


def test_nothing_changes_on_a_cuda_host(monkeypatch):
    """With a GPU and --device auto, `launch` neither installs the layer nor moves a default of Megatron's flags."""
    from megatron_2bw.flags import early, parse
    from megatron_2bw.start import launch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(early, "mistake", lambda *given: None)
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt_2bw.py", "--pipeline-schedule", "2bw", "--verbose"])
    before, seen = state(), {}

    def stop_here(early, stop):
        seen.update(early=early, defaults=parse._defaults(early), state=state())
        raise KeyboardInterrupt

    monkeypatch.setattr(parse, "parse", stop_here)
    with pytest.raises(KeyboardInterrupt):
        launch.launch("megatron_2bw.tasks.gpt")
    assert not cpu.installed() and seen["state"] == before
    # rerun_mode: 2bw needs it on every host
    assert seen["defaults"] == {"task": "gpt", "rerun_mode": "disabled", "eval_interval": 1000}


def test_cuda_asked_for_and_not_there():
    """--device cuda on a host without a GPU: one line, before anything is imported that takes long."""
    run = subprocess.run(
        [sys.executable, "pretrain_gpt_2bw.py", "--device", "cuda"],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr.splitlines()[-1] == (
        "pretrain_gpt_2bw.py: error: --device cuda: no GPU is visible to torch; use --device cpu"
    )


def test_nothing_is_compiled_in_a_new_thread_either():
    """torch keeps the compiler's settings by thread: the late step would compile what the training thread does not."""
    import threading

    import torch._dynamo as dynamo

    original = torch.compile
    wrapped = torch.compile(lambda x: x + 1)  # before
    cpu.install()
    try:
        assert dynamo.config.disable and torch.compile(wrapped) is wrapped
        assert torch.compile(dynamic=True)(wrapped) is wrapped
        seen: list[bool] = []

        def work() -> None:
            with cpu.answering():
                seen.append(dynamo.config.disable)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert seen == [True]
    finally:
        cpu.uninstall()
    assert not dynamo.config.disable and torch.compile is original
