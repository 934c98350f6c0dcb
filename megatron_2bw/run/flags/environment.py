"""Environment variables of CUDA, NCCL and torch: those that a run refuses, and those
that it sets.

Invariant: a variable that the user has set keeps its value.
"""

import os

from megatron_2bw.run.flags.rule import Args
from megatron_2bw.schedules import SCHEDULES

# With these a run over NCCL hangs, and why.
REFUSED = {
    "CUDA_LAUNCH_BLOCKING": (
        "each launch would wait for messages that depend on later launches of this rank"
    ),
    "NCCL_LAUNCH_ORDER_IMPLICIT": "NCCL would have to see one order of launches, but two threads launch",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "each tensor that is freed would wait for posted receives",
}

_OFF = ("", "0", "n", "no", "f", "false")

# What a run sets if the user has not; docs/flags.md says why. Neither value has been
# measured on a GPU.
SET = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "NCCL_MAX_P2P_NCHANNELS": "4"}


def exchange(args: Args) -> str:
    """The transport between stages: nccl or gloo."""
    if args.pipeline_exchange == "auto":
        return args.distributed_backend
    return args.pipeline_exchange


def _messages_over_nccl(args: Args) -> bool:
    return (
        args.pipeline_schedule in SCHEDULES
        and args.pipeline_model_parallel_size > 1
        and exchange(args) == "nccl"
    )


def refusal(args: Args) -> str | None:
    """The line of the first variable with which the run would hang, or None."""
    schedule = SCHEDULES.get(args.pipeline_schedule)
    late = (
        schedule is not None
        and schedule.late_step
        and args.world_size > 1
        and args.distributed_backend == "nccl"
    )
    if not late and not _messages_over_nccl(args):
        return None
    for name, why in REFUSED.items():
        if os.environ.get(name, "").strip().lower() not in _OFF:
            return (
                f"{name}=1 does not work with --pipeline-schedule "
                f"{args.pipeline_schedule}: {why}; unset it"
            )
    return None


def prepare_cuda(early: Args) -> None:
    """Set the number of hardware queues. Call it before anything asks CUDA, which reads
    the variable when it starts."""
    divided = early.tensor_model_parallel_size > 1 or early.context_parallel_size > 1
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    if divided and not early.sharded:  # as Megatron asserts before Blackwell
        os.environ.setdefault(name, "1")
    elif early.pipeline_schedule in SCHEDULES:
        os.environ.setdefault(name, SET[name])


def prepare_nccl(args: Args) -> None:
    """Bound the channels of a message. Call it before the first process group is made:
    NCCL reads the variable then."""
    if _messages_over_nccl(args) and args.context_parallel_size == 1:
        name = "NCCL_MAX_P2P_NCHANNELS"
        os.environ.setdefault(name, SET[name])
