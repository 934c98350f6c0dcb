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
from megatron_2bw.base.errors import UserError
from megatron_2bw.run.flags.rule import Args, installed

# Megatron's flags as a host without CUDA needs them. Most have no flag that switches
# them on: no word about these.
ON_CPU = {
    "distributed_backend": "gloo",
    "transformer_impl": "local",
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "no_persist_layer_norm": True,
    "persist_layer_norm": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "bias_dropout_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_gelu_fusion": False,
}

# Switched off: kernels, communicators, graphs, profilers and memory of GPUs, by the
# names of the arguments.
OFF = """
tp_comm_overlap nccl_ub use_sharp nccl_communicator_config_path pipeline_model_parallel_comm_backend
fake_process_group enable_cuda_graph external_cuda_graph optimizer_cuda_graph cuda_graph_modules cuda_graph_impl
cuda_graph_scope_deprecated use_megatron_fsdp use_torch_fsdp2 init_model_with_meta_device cpu_offloading_num_layers
optimizer_cpu_offload fine_grained_activation_offloading record_memory_history log_device_memory_used log_energy
empty_unused_memory_level gpu_sniff_test_interval attention_backend te_rng_tracker use_te_activation_func
use_transformer_engine_op_fuser fused_residual_rmsnorm use_kitchen_attention flash_attention_version symmetric_ar_type
use_grouped_gemm_for_dense_mlp moe_grouped_gemm moe_permute_fusion moe_router_fusion use_fused_weighted_squared_relu
save_activations_interval save_dgrads_interval use_precision_aware_optimizer fsdp_manual_registration
defer_embedding_wgrad_compute fp8_param_gather fp4_param_gather main_grads_dtype main_params_dtype exp_avg_dtype
exp_avg_sq_dtype
""".split()
# Megatron has some for GPUs alone
_NO_LAYERS = ("multi_latent_attention", "experimental_attention_variant")
QUANTISED = (
    "fp8 fp4 te_precision_config_file kitchen_config_file kitchen_recipe_number".split()
)


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

    for name in _NO_LAYERS:
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
