"""pretrain_gpt_2bw.py with a fault on one rank: FAULT names its kind, FAULT_RANK the rank; it comes in iteration 3 or,
where a late step was slow, soon after."""

from __future__ import annotations

import os
import signal
import sys

from megatron_2bw.start.launch import launch


def fault(kind: str) -> None:
    if kind == "exception":
        raise ValueError("a fault of this stage alone")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


def here() -> bool:
    from megatron.training import get_args

    return os.environ["RANK"] == os.environ["FAULT_RANK"] and get_args().curr_iteration >= 2


def forward_step(data_iterator, model):
    from megatron_2bw.tasks import gpt

    if here() and os.environ["FAULT"] != "step":
        fault(os.environ["FAULT"])
    return gpt.forward_step(data_iterator, model)


def model_config(args):
    from megatron.core.optimizer.optimizer import FP32Optimizer

    from megatron_2bw.tasks import gpt

    step = FP32Optimizer.step_with_ready_grads

    def faulty_step(self):  # in the thread of the late step
        if here():
            fault("exception")
        return step(self)

    if os.environ["FAULT"] == "step":
        FP32Optimizer.step_with_ready_grads = faulty_step
    return gpt.model_config(args)


def datasets_provider(*args, **kwargs):
    from megatron_2bw.tasks import gpt

    return gpt.datasets_provider(*args, **kwargs)


datasets_provider.is_distributed = True

if __name__ == "__main__":
    sys.modules["faulty"] = sys.modules["__main__"]
    launch("faulty")
