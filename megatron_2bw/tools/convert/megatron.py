"""Megatron's side of a conversion: the arguments of a checkpoint or of a model's flags,
and the model on one rank of the CPU.

Invariant: two runs' arguments are of the same model exactly if Megatron's configuration
has the same values in all fields on which an output depends.
"""

import contextlib
import io
import logging
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp

from megatron_2bw.base.errors import UserError
from megatron_2bw.mcore import cpu, rebinding
from megatron_2bw.mcore.checkpoints.folder import TRACKER, latest_iteration, problem
from megatron_2bw.mcore.checkpoints.unpickle import causes
from megatron_2bw.run.flags.rehearsal import OFF, ON_CPU, QUANTISED

RELEASE = "release"  # Megatron's name for a checkpoint of weights alone
_ONE_RANK = ON_CPU | dict(
    perform_initialization=False, use_distributed_optimizer=False, config_logger_dir=""
)
# Of the fields moe_*, those on which outputs depend.
_ROUTING = """
moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate moe_router_topk
moe_latent_size moe_router_num_groups moe_router_group_topk moe_router_pre_softmax moe_router_topk_scaling_factor
moe_router_score_function moe_router_enable_expert_bias moe_apply_probs_on_input moe_expert_capacity_factor
""".split()
# Fields of Megatron's configuration on which no output depends: kernels, memory,
# precision, initial weights, training.
_FREE = """
*fus* *recompute* *offload* *cuda_graph* fp[48]* *bf16* *fp16* *fp32* attention_backend flash_* *init* cp_comm_type
batch_invariant_mode symmetric_ar_type nccl_* distribute_* high_* clone_* use_te_* mlp_chunks_* log_* calculate_*
*dropout qk_clip* apply_query_* make_* inference_* use_grouped_* transformer test_mode moe_* mtp_loss*
""".split()
_RUN = (
    "--micro-batch-size 1 --train-iters 1 --lr 1e-5 --eval-iters 0 --mock-data "
    "--device cpu"
).split()


def arguments(flags: list[str], task: str) -> Namespace:
    """Megatron's checked arguments for a model's flags. UserError with the line that a
    run would end with."""
    from megatron_2bw.run.flags import parse, quick_check

    argv = [sys.argv[0], *flags, *_RUN]
    with rebinding.replaced(sys, argv=argv), silence():
        from megatron.training.global_vars import unset_global_variables

        unset_global_variables()
        refuse = quick_check.refuse
        return parse.parse(parse.parse_early(argv[1:], refuse, task), refuse)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Hide Megatron's list of arguments and its warnings about a host without a GPU."""
    logging.disable(logging.ERROR)
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            yield
    finally:
        logging.disable(logging.NOTSET)


def of_one_rank(args: Namespace) -> Namespace:
    """The arguments of the same model on one rank of the CPU, in fp32: each argument of
    the pipeline, each field of Megatron's ModelParallelConfig (sizes, overlap,
    precision), and what needs a GPU, has its default."""
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.transformer import TransformerConfig

    names = {"lora_rank", *OFF, *QUANTISED}
    names.update(ModelParallelConfig.__dataclass_fields__)
    names.update(name for name in vars(args) if "pipeline" in name)
    one = dict(vars(args))
    for name in names:
        one[name] = getattr(TransformerConfig, name, None)
    # Megatron's fused GeLU has the tanh form
    tanh = args.openai_gelu or args.bias_gelu_fusion
    plain = args.swiglu or args.squared_relu or args.quick_geglu
    one["openai_gelu"] = tanh and not plain
    return Namespace(**one | _ONE_RANK)


def _function(args: Namespace) -> dict[str, Any]:
    """The fields of Megatron's configuration that decide what the model computes, or
    why there is none."""
    from megatron_2bw.run.tasks import gpt

    try:
        config = gpt.model_config(of_one_rank(args))
    except (AssertionError, ValueError) as error:
        return {"error": str(error)}
    fields = {"task": args.task, "bert_binary_head": args.bert_binary_head}
    known = vars(config) | vars(config.transformer)
    for name, value in known.items():
        free = any(fnmatchcase(name, pattern) for pattern in _FREE)
        if name in _ROUTING or not free:
            fields[name] = value
    return fields


def differing_flags(saved: Namespace, other: Namespace) -> str:
    """The flags by which the models of two runs' arguments compute something else; ""
    if there are none."""
    from megatron.training.arguments import add_megatron_arguments

    with silence():
        expected = _function(other)
        if _function(saved) == expected:
            return ""
        parser = add_megatron_arguments(ArgumentParser(allow_abbrev=False))
        flags = []
        for action in parser._actions:
            name = action.dest
            value = getattr(saved, name, None)
            if value == getattr(other, name, None):
                continue
            changed = Namespace(**vars(other) | {name: value})
            if _function(changed) != expected:
                flags.append(action.option_strings[0])
        return ", ".join(flags) or "the arguments"


@contextlib.contextmanager
def whole_model(
    args: Namespace, device: str
) -> Iterator[tuple[torch.nn.Module, dict[str, Any]]]:
    """The model of one stage on `device`, its weights not yet read, and the entries of
    its sharded state dict by name, those of adapters too; in a world of one process."""
    with silence():
        from megatron.core import parallel_state
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
        from megatron.training.checkpointing import _build_sharded_state_dict_metadata
        from megatron.training.global_vars import set_args, unset_global_variables
        from megatron.training.models.gpt import GPTModelBuilder

        from megatron_2bw.run.tasks import bert, gpt, lora

        one = of_one_rank(args)
        unset_global_variables()
        set_args(one)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel(1, 1)
        groups = ProcessGroupCollection.use_mpu_process_groups()
    try:
        with silence(), torch.device(device):
            if device != "meta":  # the layers ask for the generators of their dropout
                model_parallel_cuda_manual_seed(one.seed)
            if one.task == "bert":
                model = bert.model_provider(pg_collection=groups)
            else:
                builder = GPTModelBuilder(gpt.model_config(one))
                model = builder.build_model(groups, True, True)
            metadata = _build_sharded_state_dict_metadata(one)
            state = model.sharded_state_dict(metadata=metadata)
            if args.lora_rank:
                lora.adapt(model, args)
                state |= model.sharded_state_dict(metadata=metadata)
        yield model, state
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def find(folder: Path, iteration: int | None) -> Path:
    """The checkpoint of an iteration, or the latest; `folder` may be a checkpoint
    itself. Raises UserError."""
    if (folder / "metadata.json").is_file():
        _, _, number = folder.name.partition("iter_")
        iteration = int(number) if number else None
        folder = folder.parent
    elif not (folder / TRACKER).is_file():
        raise UserError(
            f"{folder}: it is no folder of Megatron's checkpoints (there is no {TRACKER})"
        )
    fault = problem(folder, iteration)
    if fault:
        raise UserError(f"{folder}: {fault}")
    iteration = iteration or latest_iteration(folder)
    checkpoint = folder / (RELEASE if iteration is None else f"iter_{iteration:07d}")
    if not (checkpoint / "metadata.json").is_file():
        raise UserError(
            f"{checkpoint}: only checkpoints of --ckpt-format torch_dist can be exported: save it as one"
        )
    return checkpoint


def saved_arguments(checkpoint: Path, trust: bool = False) -> Namespace:
    """The arguments of the checkpoint's run. No code of whoever wrote it runs.

    trust: whether the command line lets a tokenizer's code run
    """
    with silence():
        from megatron.core.dist_checkpointing.serialization import (
            load_common_state_dict,
        )

        from megatron_2bw.mcore import patches

        rebinding.apply(patches.for_reading())
        try:
            args = load_common_state_dict(checkpoint).get("args")
        except (dcp.CheckpointException, UnpicklingError) as error:
            raise UserError(f"{checkpoint}: {causes(error).splitlines()[0]}") from None
    if args is None:
        raise UserError(
            f"{checkpoint}: it holds no arguments, from which the model would be known"
        )
    other_layers = {
        # the local layers, which are built here, drop it
        "--qk-l2-norm": args.qk_l2_norm and args.transformer_impl != "local",
        "--hybrid-layer-pattern": getattr(args, "hybrid_layer_pattern", None),
        "--spec": args.spec not in (None, ["local"]),
    }
    for flag, used in other_layers.items():
        if used:
            raise UserError(f"{checkpoint}: {flag}: its layers are not built here")
    older = {"task": "gpt", "lora_rank": None}  # a checkpoint without them
    here = {"spec": None, "trust_remote_code": trust}
    return Namespace(**older | vars(args) | here)


def use_cpu() -> None:
    """Before Megatron is imported: on a host with or without a GPU this process uses
    none."""
    os.environ.setdefault("MASTER_ADDR", "localhost")
    cpu.install()
    with silence():
        from megatron_2bw.mcore import patches

        rebinding.apply(patches.for_cpu())
