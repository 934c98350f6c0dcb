"""On the CPU a cluster's command line rehearses its job: what needs a GPU is replaced
by what the CPU has.

Invariant: a replacement changes kernels, transports, or where something lies in memory;
what else it changes is in its words. The rules of `flags/` come first, so what a
schedule refuses on the cluster is refused here too.
"""

import argparse
import math
from collections.abc import Sequence
from typing import Any

from megatron_2bw.base.argv import flag_of
from megatron_2bw.base.command_line import table_of
from megatron_2bw.base.errors import UserError
from megatron_2bw.run.flags.rule import Args, installed

_TABLES = table_of(__file__)
ON_CPU = _TABLES["on the CPU"]
OFF = _TABLES["switched off"]
QUANTISED = _TABLES["quantised"]


def rehearse(
    args: Args, parser: argparse.ArgumentParser, argv: Sequence[str]
) -> str | None:
    """Replace what the CPU lacks in arguments that Megatron has parsed and not yet
    validated.

    Returns a line that lists the replacements of what was typed in `argv`, or is not
    Megatron's default; or None. UserError if nothing computes the model there.
    """
    actions = {action.dest: action for action in parser._actions}
    typed = {flag_of(word) for word in argv}
    replaced = []

    def put(name: str, setting: Any, remark: str = "") -> None:
        action = actions[name]
        before = getattr(args, name, None)
        setattr(args, name, setting)
        is_typed = typed.intersection(action.option_strings)
        if before == setting or (before == action.default and not is_typed):
            return
        flag = action.option_strings[0]
        words = f"{flag} {getattr(setting, 'name', setting)}"
        if setting == action.default:
            words = f"without {flag}"
        replaced.append(words + remark)

    for name in _TABLES["no layers"]:
        if getattr(args, name):
            flag = actions[name].option_strings[0]
            raise UserError(f"{flag} needs Transformer Engine on a GPU")
    for name, setting in ON_CPU.items():
        if name in actions:
            put(name, setting)
        else:
            setattr(args, name, setting)
    for name in OFF:
        put(name, actions[name].default)
    precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
    for name in QUANTISED:  # some are flags of a package
        if name in actions:
            put(name, actions[name].default, f" (computed in {precision})")
    if args.profile and not args.use_pytorch_profiler:
        put("profile", False)
    if args.pipeline_exchange == "nccl":
        put("pipeline_exchange", "gloo")
    if args.ckpt_format == "fsdp_dtensor":
        put("ckpt_format", "torch_dist")
    asynchronous = args.async_save and args.async_strategy == "nvrx"
    if asynchronous and not installed("nvidia_resiliency_ext"):
        put("async_strategy", "mcore")
    # as many tokens on each rank, and as many microbatches, if they divide
    if args.context_parallel_size > 1:
        parts = math.gcd(args.micro_batch_size, args.context_parallel_size)
        put("context_parallel_size", 1, " (its ranks are data-parallel)")
        put("micro_batch_size", args.micro_batch_size // parts)
        args.cp_comm_type = ["p2p"]
        args.hierarchical_context_parallel_sizes = None
        if not args.num_experts:
            args.expert_tensor_parallel_size = args.num_experts
    if args.recompute_modules:
        modules = args.recompute_modules
        args.recompute_modules = [name for name in modules if name != "moe_act"]
    return f"> on the CPU: {', '.join(replaced)}" if replaced else None
