"""Megatron's names that this project replaces, sets or reads, in the source of an
installed Megatron or of a checkout.

    python -m tests.megatron_names CHECKOUT

prints each name that is missing there or takes other parameters: what the next version
would need. By AST: nothing of the checkout is imported.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron_2bw.mcore import cpu

CORE, LOOP = "megatron.core", "megatron.training.training"
OPTIMIZER, BUFFERS = (
    f"{CORE}.optimizer.optimizer",
    f"{CORE}.distributed.param_and_grad_buffer",
)
ASYNC, SCHEDULES = (
    f"{CORE}.dist_checkpointing.strategies.async_utils",
    f"{CORE}.pipeline_parallel.schedules",
)

# module:class -> names that this project replaces in an object, sets or reads: a method
# with its parameters, without "self"; an attribute that the class's methods set, or a
# field. Without a class: names of the module.
NAMES = {
    f"{OPTIMIZER}:MegatronOptimizer": "step() zero_grad(set_to_none) scale_loss(loss) get_loss_scale() "
    "get_grad_stats_parallel_group() optimizer config grad_stats_parallel_group init_state_fn",
    f"{OPTIMIZER}:ChainedOptimizer": "step() chained_optimizers",
    f"{OPTIMIZER}:MixedPrecisionOptimizer": "get_loss_scale() grad_scaler",
    f"{OPTIMIZER}:Float16OptimizerWithFloat16Params": "_copy_main_params_to_model_params() float16_groups "
    "fp32_from_float16_groups fp32_from_fp32_groups",
    f"{CORE}.optimizer.grad_scaler:MegatronGradScaler": "update(found_inf) scale",
    f"{CORE}.optimizer.distrib_optimizer:DistributedOptimizer": "load_state_dict(state_dict) "
    "_copy_main_params_to_model_params() shard_float16_groups "
    "_get_model_param_range_map(param) "
    "start_param_sync_for_bucket_group_subset() model_param_gbuf_map "
    "model_float16_groups model_fp32_groups shard_fp32_from_float16_groups shard_fp32_groups",
    f"{CORE}.num_microbatches_calculator:": "_GLOBAL_NUM_MICROBATCHES_CALCULATOR",
    f"{CORE}.num_microbatches_calculator:StepBatchsizeNumMicroBatchesCalculator": (
        "schedule current_global_batch_size get() _get_batch_size_for_samples(consumed_samples)"
    ),
    f"{CORE}.optimizer_param_scheduler:OptimizerParamScheduler": "step(increment)",
    f"{CORE}.optimizer.optimizer_config:OptimizerConfig": "timers",
    f"{CORE}.optimizer.emerging_optimizers:TensorParallelMuon": "pg_collection",
    f"{CORE}.process_groups_config:ProcessGroupCollection": "tp pp cp dp_cp dp_cp_gtp_remat tp_dp_cp embd pos_embd",
    f"{CORE}.distributed.distributed_data_parallel:DistributedDataParallel": "zero_grad_buffer() "
    "scale_gradients(scaling_factor) _start_bucket_group_param_sync(bucket_group "
    "force_sync) buffers bucket_groups "
    "param_to_bucket_group ddp_config params_with_grad grad_added_to_main_grad "
    "expert_parallel_buffers "
    "expert_parallel_bucket_groups expt_dp_group",
    f"{CORE}.transformer.moe.router:TopKRouter": "_maintain_float32_expert_bias() expert_bias local_tokens_per_expert "
    "global_tokens_per_expert ga_steps",
    f"{CORE}.transformer.moe.moe_logging:MoEMetricsTracker": "_sync_metrics(metric_names pg_collection) "
    "ensure_initialized(name num_layers device) metrics()",
    f"{CORE}.transformer.moe.moe_logging:MetricEntry": "reduce_group avg_group",
    f"{CORE}.transformer.multi_token_prediction:MTPLossLoggingHelper": "tracker",
    f"{CORE}.transformer.multi_token_prediction:": "MTPLossAutoScaler.set_loss_scale(scale) "
    "MTPLossLoggingHelper.reduce_metrics_in_tracker()",
    f"{CORE}.transformer.moe.moe_logging:": "get_moe_metrics_tracker() set_moe_metrics_tracker(tracker)",
    f"{BUFFERS}:_ParamAndGradBucket": "params params_list param_data grad_data offset numel_unpadded param_to_index",
    f"{BUFFERS}:_ParamAndGradBucketGroup": "finish_grad_sync(force_all_reduce) reset() ddp_config buckets "
    "params param_to_bucket "
    "previous_grad_reduce_bucket_group golden_per_param_grad_ready_counts "
    "per_param_grad_ready_counts "
    "cached_grad_buffer_shard_list cached_param_buffer_shard_list data_parallel_group "
    "intra_distributed_optimizer_instance_group intra_distributed_optimizer_instance_size "
    "intra_distributed_optimizer_instance_rank",
    f"{BUFFERS}:_ParamAndGradBuffer": "scale_gradients(scaling_factor) buckets param_data grad_data "
    "param_index_map "
    "main_grad",
    f"{CORE}.timers:Timer": "start(barrier) stop(barrier) elapsed(reset barrier) _start_time _started "
    "_elapsed "
    "_active_time",
    f"{SCHEDULES}:": "forward_step(forward_step_func data_iterator model num_microbatches "
    "input_tensor "
    "forward_data_store config cp_group_size collect_non_loss_data "
    "checkpoint_activations_microbatch "
    "is_first_microbatch current_microbatch vp_stage is_last_stage) "
    "backward_step(input_tensor output_tensor "
    "output_tensor_grad config) deallocate_output_tensor(out "
    "deallocate_pipeline_outputs) get_tensor_shapes(seq_length "
    "micro_batch_size decoder_seq_length config tp_group cp_group) _build_default_pg_collection() "
    "_get_moe_loss_scale(config device) _get_mtp_loss_scale(config device) "
    "forward_backward_pipelining_without_interleaving(forward_step_func "
    "data_iterator model num_microbatches "
    "seq_length micro_batch_size decoder_seq_length forward_only "
    "collect_non_loss_data first_val_step "
    "adjust_tensor_shapes_fn p2p_communicator pg_collection force_all_reduce)",
    f"{CORE}.distributed.finalize_model_grads:": "finalize_model_grads(model num_tokens pg_collection "
    "force_all_reduce)",
    f"{CORE}.transformer.transformer_config:TransformerConfig": "timers no_sync_func grad_sync_func "
    "finalize_model_grads_func deallocate_pipeline_outputs pipeline_dtype calculate_per_token_loss "
    "variable_seq_lengths num_microbatches_with_partial_activation_checkpoints",
    f"{ASYNC}:AsyncCaller": "is_current_async_call_done(blocking no_dist)",
    f"{ASYNC}:_ActiveAsyncRequest": "idx async_caller",
    f"{ASYNC}:PersistentAsyncCaller": "cur_item",
    f"{ASYNC}:AsyncCallsQueue": "async_calls",
    "megatron.training.async_utils:": "_async_calls_queue",
    f"{CORE}.dist_checkpointing.mapping:ShardedTensor": "key data",
    "megatron.training.dist_signal_handler:DistributedSignalHandler": "_signal_received",
    "megatron.training.arguments:": (
        "parse_args(extra_args_provider ignore_unknown_args) validate_args(args "
        "defaults)"
    ),
    "megatron.training.global_vars:": "set_global_variables(args build_tokenizer)",
    f"{LOOP}:": "_TRAIN_START_TIME num_floating_point_operations(args batch_size "
    "seqlen_squared_sum_in_batch "
    "total_real_tokens_in_batch)",
}


def parsed(names: str) -> list[tuple[str, str | None]]:
    """Each name with its parameters; None if it has no parentheses."""
    return [
        (match[1], match[2]) for match in re.finditer(r"(\w+)(?:\(([^)]*)\))?", names)
    ]


def replaced() -> list:
    """All rows of patches.py."""
    cpu.install()
    from megatron_2bw.mcore import patches
    from megatron_2bw.mcore.runtime import MegatronRuntime

    runtime = MegatronRuntime(None, None)
    made = (
        patches.for_schedule(runtime),
        patches.for_log(runtime),
        patches.for_late_step(runtime),
        patches.for_checkpoints(),
    )
    return [
        row for rows in (*made, patches.repairs(), patches.for_cpu()) for row in rows
    ]


@functools.cache
def _tree(module: Path) -> ast.Module | None:
    files = [
        file
        for file in (module.with_suffix(".py"), module / "__init__.py")
        if file.is_file()
    ]
    return ast.parse(files[0].read_text()) if files else None


class Source:
    """The modules under a folder."""

    def __init__(self, root: Path):
        self._root = root

    def find(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """The definition of a name with or without dots, and the module that has it,
        through imports and bases."""
        tree, (first, _, rest) = (
            _tree(self._root / module.replace(".", "/")),
            name.partition("."),
        )
        for node in ast.walk(tree) if tree else ():
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == first:
                return self._member(module, node, rest) if rest else (module, node)
            if isinstance(node, ast.ImportFrom) and (
                alias := next((a for a in node.names if a.name == first), None)
            ):
                parts = (
                    module.split(".")
                    if (self._root / module.replace(".", "/")).is_dir()
                    else module.split(".")[:-1]
                )
                above = parts[: len(parts) + 1 - node.level] if node.level else []
                found = self.find(
                    ".".join([*above, node.module or ""]),
                    name.replace(first, alias.name, 1),
                )
                if found:
                    return found
            if (
                isinstance(node, ast.Name)
                and node.id == name
                and isinstance(node.ctx, ast.Store)
            ):
                return module, node
        return None

    def classes(self, module: str, node: ast.AST) -> Iterator[tuple[str, ast.ClassDef]]:
        """A class and its bases; nothing if it is none."""
        if isinstance(node, ast.ClassDef):
            yield module, node
        for base in getattr(node, "bases", ()):
            if found := self.find(module, ast.unparse(base).split(".")[-1]):
                yield from self.classes(*found)

    def _member(
        self, module: str, node: ast.AST, name: str
    ) -> tuple[str, ast.AST] | None:
        for where, each in self.classes(module, node):
            for child in each.body:
                if getattr(child, "name", None) == name:
                    return where, child
        return None

    def fault(self, module: str, name: str, parameters: str | None) -> str | None:
        """What is different about a name: "is missing" or its parameters; None if
        nothing is."""
        found = self.find(module, name)
        if found is None and parameters is None and "." in name:
            owner = self.find(module, name.rpartition(".")[0])
            classes = list(self.classes(*owner)) if owner else ()
            fields = (field for _, each in classes for field in ast.walk(each))
            if any(
                getattr(f, "attr", getattr(f, "id", "")) == name.rpartition(".")[2]
                for f in fields
            ):
                return None
        if found is None:
            return "is missing"
        if parameters is None or not isinstance(found[1], ast.FunctionDef):
            return None
        a = found[1].args
        every = [*a.posonlyargs, *a.args, a.vararg, *a.kwonlyargs, a.kwarg]
        taken = [each.arg for each in every if each is not None]
        return (
            None
            if taken == parameters.split()
            else f"takes ({', '.join(taken)}), not ({parameters})"
        )


def faults(root: Path) -> list[str]:
    """A line for each of Megatron's names that is not in the source under `root` as
    this project needs it."""
    rows = [(row.module, row.name, row.parameters) for row in replaced()]
    for place, names in NAMES.items():
        module, owner = place.split(":")
        for name, parameters in parsed(names):
            method = owner and parameters is not None
            rows.append(
                (
                    module,
                    f"{owner}.{name}".strip("."),
                    f"self {parameters}".strip() if method else parameters,
                )
            )
    source = Source(root)
    found = [
        (f"{m}.{name}", source.fault(m, name, taken))
        for m, name, taken in rows
        if m.startswith("megatron.")
    ]
    return [f"{name} {fault}" for name, fault in found if fault]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print("\n".join(faults(Path(sys.argv[1]))))
