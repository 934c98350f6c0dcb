"""Every name of Megatron that this project replaces in an object, sets or reads, with the reason.

Rows only: `guard.py` checks them.
"""

from __future__ import annotations

from megatron_2bw.guard import Required
from megatron_2bw.mcore.patches import ASYNC, CORE, DATA, LOOP

OPTIMIZER, BUFFERS = f"{CORE}.optimizer.optimizer", f"{CORE}.distributed.param_and_grad_buffer"
_STEPS = "the late step calls them behind proxies, and replaces what belongs to a batch"
_SLOTS = "gradient slots and weight stores have the layout of Megatron's buffers"

# Objects' names that this project replaces, sets or reads; tests/unit/test_guard.py finds those that have no row.
REQUIRED = (
    Required(
        OPTIMIZER,
        "MegatronOptimizer",
        _STEPS,
        "step() zero_grad(set_to_none) scale_loss(loss) get_loss_scale() get_grad_stats_parallel_group() "
        "optimizer config grad_stats_parallel_group init_state_fn",
    ),
    Required(OPTIMIZER, "ChainedOptimizer", _STEPS, "step() chained_optimizers"),
    Required(OPTIMIZER, "MixedPrecisionOptimizer", _STEPS, "get_loss_scale() grad_scaler"),
    Required(f"{CORE}.optimizer.grad_scaler", "MegatronGradScaler", _STEPS, "update(found_inf) scale"),
    Required(
        OPTIMIZER,
        "Float16OptimizerWithFloat16Params",
        _STEPS,
        "_copy_main_params_to_model_params() float16_groups fp32_from_float16_groups fp32_from_fp32_groups",
    ),
    Required(
        f"{CORE}.optimizer.distrib_optimizer",
        "DistributedOptimizer",
        _STEPS,
        "_copy_main_params_to_model_params() _get_model_param_range_map(param) "
        "start_param_sync_for_bucket_group_subset() model_param_gbuf_map model_float16_groups model_fp32_groups "
        "shard_fp32_from_float16_groups shard_fp32_groups",
    ),
    Required(f"{CORE}.optimizer_param_scheduler", "OptimizerParamScheduler", _STEPS, "step(increment)"),
    Required(f"{CORE}.optimizer.optimizer_config", "OptimizerConfig", "timers wait for the GPU", "timers"),
    Required(
        f"{CORE}.optimizer.emerging_optimizers",
        "TensorParallelMuon",
        "its products over tensor-parallel ranks have a group of their own",
        "pg_collection",
    ),
    Required(
        f"{CORE}.process_groups_config",
        "ProcessGroupCollection",
        "the late step has groups of its own",
        "tp pp cp dp_cp dp_cp_gtp_remat embd pos_embd",
    ),
    Required(
        f"{CORE}.distributed.distributed_data_parallel",
        "DistributedDataParallel",
        _SLOTS,
        "zero_grad_buffer() scale_gradients(scaling_factor) _start_bucket_group_param_sync(bucket_group force_sync) "
        "buffers bucket_groups param_to_bucket_group ddp_config",
    ),
    Required(
        BUFFERS, "_ParamAndGradBucket", _SLOTS, "params param_data grad_data offset numel_unpadded param_to_index"
    ),
    Required(
        BUFFERS,
        "_ParamAndGradBucketGroup",
        _SLOTS,
        "finish_grad_sync(force_all_reduce) buckets params param_to_bucket previous_grad_reduce_bucket_group "
        "golden_per_param_grad_ready_counts per_param_grad_ready_counts cached_grad_buffer_shard_list "
        "cached_param_buffer_shard_list data_parallel_group intra_distributed_optimizer_instance_group",
    ),
    Required(
        BUFFERS,
        "_ParamAndGradBuffer",
        _SLOTS,
        "scale_gradients(scaling_factor) buckets param_data grad_data param_index_map main_grad",
    ),
    Required(
        f"{CORE}.timers",
        "Timer",
        "the interval timer must not follow a clock that is set back, nor wait for a rank",
        "start(barrier) stop(barrier) elapsed(reset barrier) _start_time _started _elapsed _active_time _barrier_group",
    ),
    Required(
        f"{CORE}.pipeline_parallel.schedules",
        "",
        "a stage runs Megatron's own forward and backward steps, and is called as its schedules",
        "forward_step(forward_step_func data_iterator model num_microbatches input_tensor forward_data_store config "
        "cp_group_size collect_non_loss_data checkpoint_activations_microbatch is_first_microbatch current_microbatch "
        "vp_stage is_last_stage) backward_step(input_tensor output_tensor output_tensor_grad config) "
        "deallocate_output_tensor(out deallocate_pipeline_outputs) get_tensor_shapes(seq_length micro_batch_size "
        "decoder_seq_length config tp_group cp_group) _build_default_pg_collection() "
        "forward_backward_pipelining_without_interleaving(forward_step_func data_iterator model num_microbatches "
        "seq_length micro_batch_size decoder_seq_length forward_only collect_non_loss_data first_val_step "
        "adjust_tensor_shapes_fn p2p_communicator pg_collection force_all_reduce)",
    ),
    Required(
        f"{CORE}.distributed.finalize_model_grads",
        "",
        "the late step calls it with proxies and with groups of its own",
        "finalize_model_grads(model num_tokens pg_collection force_all_reduce)",
    ),
    Required(
        f"{CORE}.transformer.transformer_config",
        "TransformerConfig",
        "a stage's forwards, backwards and reduction follow them",
        "timers no_sync_func grad_sync_func finalize_model_grads_func deallocate_pipeline_outputs pipeline_dtype "
        "calculate_per_token_loss variable_seq_lengths num_microbatches_with_partial_activation_checkpoints",
    ),
    Required(ASYNC, "AsyncCaller", "asked in the step's thread", "is_current_async_call_done(blocking no_dist)"),
    Required(ASYNC, "_ActiveAsyncRequest", "the oldest save that is being written", "idx async_caller"),
    Required(ASYNC, "PersistentAsyncCaller", "a persistent worker reports a save once; it is asked twice", "cur_item"),
    Required(ASYNC, "AsyncCallsQueue", "the oldest save that is being written", "async_calls"),
    Required(f"{DATA}.megatron_dataset", "MegatronDataset", "it names cached indices", "unique_description_hash"),
    Required(f"{DATA}.indexed_dataset", "_MMapBinReader", "its size is checked", "_bin_file_reader"),
    Required("megatron.training.async_utils", "", "the oldest save that is being written", "_async_calls_queue"),
    Required(f"{CORE}.dist_checkpointing.mapping", "ShardedTensor", "shadow weights are cut as weights", "key data"),
    Required(
        "megatron.training.dist_signal_handler",
        "DistributedSignalHandler",
        "asked without a collective",
        "_signal_received",
    ),
    Required(LOOP, "", "the time since the start, without a collective", "_TRAIN_START_TIME"),
    Required(
        LOOP,
        "",
        "the share of the GPUs' peak",
        "num_floating_point_operations(args batch_size seqlen_squared_sum_in_batch total_real_tokens_in_batch)",
    ),
)
