"""Pipelines whose stages also sleep, so that many processes on few cores behave like
many devices.

The Megatron rows train a tiny real GPT through the real entry path (parser, training
loop, optimizer, data); each stage's forward and backward also sleeps. The peers of
torch.distributed.pipelining run layers that sleep as long.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from megatron_2bw.engine.p2p import Channel
from megatron_2bw.tools.gpu_check import entry


@dataclass
class Observed:
    """Measurements of a rank. ends: time.monotonic() at the end of each iteration (one
    clock for all processes)."""

    ends: list[float] = field(default_factory=list)
    # microbatches (chunks of them, if interleaved) between their forward and backward
    peak_activations: int = 0
    versions: int = 0  # weight storages that forwards ran on
    activations: int = 0  # now

    def note(self, change: int) -> None:
        self.activations += change
        self.peak_activations = max(self.peak_activations, self.activations)


def iteration_seconds(runs: list[Observed]) -> float:
    """Median time from one end of an iteration to the next on the first stage, in the
    steady state.

    The first three iterations fill the pipeline and load code, the last two empty it.
    """
    return float(np.median(np.diff(runs[0].ends[2:-2])))


class Sleep(torch.autograd.Function):
    """The identity, which sleeps."""

    @staticmethod
    def forward(ctx, tensor, forward, backward, note):
        ctx.backward_seconds = backward
        ctx.note = note
        note(1)
        time.sleep(forward)
        # not a view: Megatron frees the memory of outputs that it has sent
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.backward_seconds)
        ctx.note(-1)
        return gradient, None, None, None


class Complete:
    """The handle of a message that takes no time."""

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True


def send_nothing(channel: Channel, tensor: torch.Tensor) -> Complete:
    return Complete()


def receive_noise(channel: Channel, tensor: torch.Tensor) -> Complete:
    tensor.normal_(std=0.01)
    return Complete()


def train(
    rank: int,
    argv: list[str],
    forward: float,
    backward: float,
    limited: bool = False,
    after_step: Callable = entry.nothing,
    step: float = 0.0,
) -> Observed:
    """Run pretrain_gpt_2bw.py with `argv`; each stage sleeps `forward` and `backward`
    seconds a microbatch.

    step        seconds that the optimizer's step sleeps too
    limited     a stage makes its inputs and output gradients itself, and sends no
                messages
    after_step  called after each iteration, with its losses by name
    """
    from megatron.core.utils import get_attr_wrapped_model

    if limited:
        Channel.receive = receive_noise
        Channel.send = send_nothing
    observed = Observed()
    storages = set()

    def sleep_in(model, optimizer):
        adam = getattr(optimizer, "chained_optimizers", [optimizer])[0].optimizer

        def before_step(*_):
            time.sleep(step)

        adam.register_step_pre_hook(before_step)
        for chunk in model:
            decoder = get_attr_wrapped_model(chunk, "decoder")
            weight = next(decoder.parameters())

            def sleep(module, inputs, output, weight=weight):
                if not torch.is_grad_enabled():
                    return output
                storages.add(weight.data_ptr())
                return Sleep.apply(
                    output, forward / len(model), backward / len(model), observed.note
                )

            decoder.register_forward_hook(sleep)

    def end(losses):
        observed.ends.append(time.monotonic())
        after_step(losses)

    entry.train(argv, sleep_in, end)
    observed.versions = len(storages)
    return observed


class SleepingLayer(torch.nn.Module):
    """A linear layer; half of the backward belongs to the input's gradient, half to the
    weight's."""

    def __init__(self, size: int, forward: float, backward: float, note: Callable):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(size))
        self.forward_seconds = forward
        self.half = backward / 2
        self.note = note

    def forward(self, x):
        if not x.requires_grad:  # a first stage has an embedding before its layers
            x = x.detach().requires_grad_()
        x = Sleep.apply(x, self.forward_seconds, self.half, self.note)
        weight = Sleep.apply(self.weight, 0.0, self.half, entry.nothing)
        return torch.nn.functional.linear(x, weight)


# Classes of torch.distributed.pipelining, and chunks per rank.
PEERS = {
    "torch-gpipe": ("ScheduleGPipe", 1),
    "torch-1f1b": ("Schedule1F1B", 1),
    "torch-interleaved-1f1b": ("ScheduleInterleaved1F1B", 2),
    "torch-zbv": ("ScheduleZBVZeroBubble", 2),
}


def train_with_torch(
    rank: int,
    schedule: str,
    stages: int,
    microbatches: int,
    forward: float,
    backward: float,
    iterations: int,
) -> Observed:
    """Run a schedule of torch.distributed.pipelining on sleeping layers, with SGD and
    without clipping."""
    from torch.distributed import pipelining

    dist.init_process_group("gloo")
    observed = Observed(versions=1)
    size = 16
    kind, chunks = PEERS[schedule]
    numbers = list(range(rank, chunks * stages, stages))
    if schedule == "torch-zbv":  # the second chunks go back up the ranks
        numbers[1] = 2 * stages - 1 - rank
    parts = []
    layers = torch.nn.ModuleList()
    for number in numbers:
        layer = SleepingLayer(size, forward / chunks, backward / chunks, observed.note)
        layers.append(layer)
        parts.append(
            pipelining.PipelineStage(
                layer, number, chunks * stages, torch.device("cpu")
            )
        )
    optimizer = torch.optim.SGD(layers.parameters(), lr=1e-3)
    loss = torch.nn.functional.mse_loss
    runner = getattr(pipelining, kind)(
        parts if chunks > 1 else parts[0], microbatches, loss_fn=loss
    )
    batch = torch.ones(microbatches, size)
    inputs = []
    targets = {}
    for part in parts:
        if part.is_first:
            inputs = [batch]
        if part.is_last:
            targets = {"target": batch * 2}
    for _ in range(iterations):
        optimizer.zero_grad()
        runner.step(*inputs, **targets)
        optimizer.step()
        observed.ends.append(time.monotonic())
    dist.barrier()
    return observed
