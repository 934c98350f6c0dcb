"""One rank of bench/gpu_overheads.py: a training run, with the clock and the memory read around it."""

from __future__ import annotations

import os
import statistics
import sys
import time
from dataclasses import dataclass, field

import torch


@dataclass
class Probe:
    ends: list[float] = field(default_factory=list)  # time.monotonic() at the end of each iteration
    flip_seconds: float = 0.0  # median time to point all parameters to the other weight version
    step_seconds: float = 0.0  # median time an iteration that the training thread spent on REDUCE and STEP
    parameters: int = 0
    static_bytes: int = 0  # allocated between iterations, with no microbatch in flight
    peak_bytes: int = 0


def probe(rank: int, argv: list[str]) -> Probe:
    os.environ["LOCAL_RANK"] = "0"  # all ranks on the one GPU
    from megatron.training import training

    from megatron_2bw.core.pipeline import Pipeline
    from megatron_2bw.start.launch import launch

    found, pipelines, steps = Probe(), [], []
    setup, step, execute = training.setup_model_and_optimizer, training.train_step, Pipeline.execute
    spent = [0.0]

    def counting_setup(*args, **kwargs):
        model, *rest = setup(*args, **kwargs)
        found.parameters = sum(param.numel() for chunk in model for param in chunk.parameters())
        return model, *rest

    def timed_execute(self, action):
        pipelines[:] = [self]
        begun = time.perf_counter()
        execute(self, action)
        if action.kind in "RS":
            spent[0] += time.perf_counter() - begun

    def timed_step(*args, **kwargs):
        spent[0] = 0.0
        result = step(*args, **kwargs)
        torch.cuda.synchronize()
        found.ends.append(time.monotonic())
        steps.append(spent[0])
        return result

    def at_the_end(text, *args, **kwargs):
        if text.startswith("after training"):
            found.static_bytes = torch.cuda.memory_allocated()
        return show(text, *args, **kwargs)

    show = training.print_datetime
    training.setup_model_and_optimizer = counting_setup
    Pipeline.execute, training.train_step, training.print_datetime = timed_execute, timed_step, at_the_end
    sys.argv = ["pretrain_gpt_2bw.py", *argv]
    launch("megatron_2bw.tasks.gpt")
    found.peak_bytes = torch.cuda.max_memory_allocated()
    found.step_seconds = statistics.median(steps[2:])
    stores = getattr(pipelines[0].update, "stores", None) if pipelines else None
    if stores is not None and len(stores.versions) > 1:
        found.flip_seconds = _time_flips(stores)
    return found


def _time_flips(stores, times: int = 20) -> float:
    seconds = []
    for turn in range(times):
        begun = time.perf_counter()
        stores.bind(stores.versions[turn % 2])
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)
