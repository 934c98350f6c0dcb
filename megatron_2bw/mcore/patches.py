"""Every name of Megatron that this project rebinds, with the reason: for the schedules,
for the CPU, and repairs.

Rows only: `rebinding.py` checks and rebinds, `runtime.py`, `repairs.py` and
`checkpoints/` hold the replacements, but the shortest, which stand at the end.
docs/upstream.md has each repair's fault, and how Megatron could mend it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from megatron_2bw.mcore import cpu, torch_norm
from megatron_2bw.mcore import repairs as repair
from megatron_2bw.mcore.checkpoints import folder
from megatron_2bw.mcore.rebinding import Patch, around, constant, rows, unchanged

if TYPE_CHECKING:
    from megatron_2bw.mcore.runtime import MegatronRuntime

LOOP = "megatron.training.training"
FILES = "megatron.training.checkpointing"
OPTIMIZER = "megatron.core.optimizer"
CLIPPING = "megatron.core.optimizer.clip_grads"
SHARDED = "megatron.core.optimizer.distrib_optimizer"


@around
def do_nothing(original: Callable, *args: Any, **kwargs: Any) -> None:
    """In the place of a function of Megatron's that needs a GPU."""


def for_schedule(runtime: MegatronRuntime) -> list[Patch]:
    """The two hooks of a schedule, which a patched source checkout has in its
    source."""
    find_schedule = constant(constant(runtime.forward_backward))
    hooks = {
        # the training loop looks its schedule up here
        "get_forward_backward_func(pp_size vp_size schedule_pg_collection)": find_schedule,
        # the optimizer's step writes the weight version that the schedule names
        "get_megatron_optimizer(config model_chunks config_overrides use_gloo_process_groups "
        "pg_collection dump_param_to_param_group_map)": runtime.make_optimizer,
    }
    return rows({LOOP: hooks})


def for_log(runtime: MegatronRuntime | None) -> list[Patch]:
    """The progress in the log lines and, with a schedule of this project, the stages'
    stats."""
    if runtime is None:
        # it imports Megatron, on a CPU not before cpu.install()
        from megatron_2bw.mcore.log_lines import Progress

        # tokens per second and the ETA join the line
        return rows({LOOP: {"print_rank_last(message)": Progress().print_line}})
    lines = {
        # the stages report there; with a late step a line is written when its step is
        # complete
        "training_log(loss_dict total_loss_dict learning_rate iteration loss_scale "
        "report_memory_flag skipped_iter grad_norm params_norm num_zeros_in_grad "
        "max_attention_logit pg_collection is_first_iteration "
        "seqlen_squared_sum_in_batch total_real_tokens_in_batch)": runtime.add_line,
        # waiting times and memory join the line
        "print_rank_last(message)": runtime.print_line,
    }
    return rows({LOOP: lines})


def for_late_step(runtime: MegatronRuntime) -> list[Patch]:
    """With a late step nothing in the training loop may wait for another stage."""
    unreduced = constant(unchanged)
    loop = {
        # learning rate and weight decay advance with the steps, which come later
        "get_optimizer_param_scheduler(optimizer)": runtime.make_scheduler,
        # each stage has the value already; the reductions would make it wait for all
        # others
        "logical_and_across_model_parallel_group(input group)": unreduced,
        "reduce_max_stat_across_model_parallel_group(stat group)": unreduced,
        # these read all weights
        "calc_params_l2_norm(model force_create_fp32_copy)": runtime.sync_first,
        "check_param_hashes_across_dp_replicas(model cross_check)": runtime.sync_first,
        # a checkpoint holds the newest weights
        "save_checkpoint_and_time(iteration model optimizer opt_param_scheduler "
        "num_floating_point_operations_so_far checkpointing_context "
        "non_persistent_ckpt train_data_iterator)": runtime.save,
        # a run that ends has logged all its iterations; signals and the time limit need
        # no collective
        "checkpoint_and_decide_exit(model optimizer opt_param_scheduler iteration "
        "num_floating_point_operations_so_far checkpointing_context "
        "train_data_iterator)": runtime.decide_exit,
    }
    # it waits for the GPU at each tensor
    norm = {"l2_norm_impl": repair.wait_once}
    return rows({LOOP: loop, CLIPPING: norm})


def for_host() -> list[Patch]:
    """With the optimizer in host memory: torch's in place of those of Transformer
    Engine and Apex, whose kernels take tensors of a GPU only."""
    from megatron.core import utils

    from megatron_2bw.mcore.host_memory import make_on_host  # it imports Megatron

    apply = constant(utils.local_multi_tensor_applier)
    norm = constant(utils.local_multi_tensor_l2_norm)
    scaling = {
        "multi_tensor_applier": apply,
        "multi_tensor_scale_impl": constant(utils.local_multi_tensor_scale),
    }
    tensors = {"multi_tensor_scale_tensor_impl": constant(None), "l2_norm_impl": norm}
    making = {
        # it makes main parameters and state where the model is
        "_get_megatron_optimizer_based_on_param_groups(config model_chunks param_groups "
        "per_model_buffers model_parallel_group data_parallel_group "
        "data_parallel_group_gloo data_parallel_group_idx intra_dist_opt_group "
        "distributed_optimizer_instance_id pg_collection skip_megatron_wrapping)": make_on_host,
        "USING_PYTORCH_OPTIMIZER": constant(True),
        "SGD": constant(torch.optim.SGD),
    }
    modules = {
        OPTIMIZER: making,
        CLIPPING: scaling | tensors,
        "megatron.core.optimizer.optimizer": scaling,
        # their Adam counts steps in another place
        SHARDED: {"HAVE_APEX_OR_TE": constant(False)},
        "megatron.training.utils.common_utils": {
            "multi_tensor_applier": apply,
            "multi_tensor_l2norm": norm,
        },
    }
    return rows(modules | FORKED)


def for_checkpoints(runtime: Any = None) -> list[Patch]:
    """Saving and loading, with a schedule of this project or, without `runtime`, with
    Megatron's own."""
    from megatron_2bw.mcore.checkpoints.state import Checkpoints

    ours = Checkpoints(runtime)
    files = {
        # shadow weights and the schedule's name; without Apex the optimizer's state
        # must be there first
        "generate_state_dict(args model optimizer opt_param_scheduler rng_state iteration "
        "optim_sd_kwargs model_sd_kwargs rerun_state)": ours.collect,
        # the random state before the microbatches in flight
        "get_rng_state(ckpt_format tp_group pp_group dp_cp_group dp_group "
        "key_prefix)": ours.random_state,
        # here is read what `generate_state_dict` has added
        "_load_base_checkpoint(load_dir args rank0 sharded_state_dict "
        "checkpointing_context dp_cp_group expt_dp_group gpt_compat_layer_maps)": ours.read,
        # the file that names the latest checkpoint must never be empty
        "maybe_msc": folder.TrackerFiles,
    }
    loop = {
        # a checkpoint stays whole until its new version is; a full disk is reported in
        # one line
        "save_checkpoint(iteration model optimizer opt_param_scheduler "
        "num_floating_point_operations_so_far checkpointing_context pipeline_rank "
        "expert_rank tensor_rank pipeline_parallel expert_parallel non_persistent_ckpt "
        "train_data_iterator preprocess_common_state_dict_fn release tp_group pp_group "
        "dp_cp_group dp_group expt_dp_group rng_state_key_prefix)": ours.save,
        # it asks all ranks while it writes
        "maybe_finalize_async_save(blocking terminate)": ours.finalize,
        # the schedule resumes from what is loaded; without Apex each parameter needs a
        # step counter of its own
        "load_checkpoint(ddp_model optimizer opt_param_scheduler load_arg strict "
        "checkpointing_context skip_load_to_model_and_opt tp_group pp_group "
        "dp_cp_group dp_group expt_dp_group rng_state_key_prefix)": ours.load,
    }
    return rows({FILES: files, LOOP: loop})


def for_cpu() -> list[Patch]:
    """What Megatron itself, in addition to torch, needs on a host without CUDA."""
    modules = {
        "megatron.core.transformer.torch_norm": {
            # without Apex it has neither sequence parallelism nor --apply-layernorm-1p
            "WrappedTorchNorm.__new__(cls config hidden_size eps persist_layer_norm "
            "zero_centered_gamma normalization)": torch_norm.torch_norm,
        },
        LOOP: {
            # pretrain does not pass allow_no_cuda on
            "initialize_megatron(allow_no_cuda skip_mpu_initialization get_embedding_ranks "
            "get_position_embedding_ranks store skip_model_parallel_init seed_pp_group "
            "seed_dp_group seed_tp_group seed_ep_group seed_etp_group "
            "skip_random_seed)": _without_cuda,
        },
        "megatron.core.tensor_parallel.random": {
            # it writes a CUDA generator that does not exist
            "_set_cuda_rng_state(new_state device graph_safe)": constant(
                cpu.set_rng_state
            ),
        },
        "megatron.core.transformer.moe.token_dispatcher": {
            # it makes lists of sizes of tensors on the GPU only, and torch takes no
            # tensor for them
            "maybe_move_tensor_to_cpu(tensor as_numpy record_stream)": constant(
                _on_host
            ),
        },
        "megatron.training.initialize": {
            # the worker of --async-save needs a GPU
            "init_persistent_async_worker(rank mp_mode)": do_nothing,
        },
    }
    return rows(modules | FORKED)


def repairs() -> list[Patch]:
    """Faults of Megatron that lose data, hang, or end a run that this project's docs
    recommend."""
    modules = {
        "megatron.core.datasets.utils": {
            # the wheel ships the compiled helper without the Makefile that this
            # function runs, and exits
            "compile_helpers()": repair.skip_when_compiled,
        },
        LOOP: {
            # without validation data the list of its loaders is [None], which counts as
            # data
            "build_train_valid_test_data_loaders("
            "build_train_valid_test_datasets_provider)": repair.skip_empty_validation,
        },
        SHARDED: {
            # without Apex the state has a step counter, which no checkpoint holds by
            # parameter; the shard of an fp32 parameter is a view of it, to which
            # autograd allows no write
            "DistributedOptimizer._set_main_param_and_optimizer_states("
            "self model_param tensors)": repair.set_without_step,
            # with several buckets the state of one parameter is saved as that of
            # another: the places that it reads count the padding between buckets, which
            # the gathered state lacks
            "DistributedOptimizer.sharded_param_state_fully_reshardable(self "
            "model_sharded_state_dict is_loading metadata)": repair.places_without_padding,
        },
        "megatron.core.distributed.distributed_data_parallel": {
            # an evaluation before the first step that is not skipped disables the hooks
            # twice, with a KeyError
            "DistributedDataParallel.enable_forward_pre_hook(self)": repair.switch_once,
            "DistributedDataParallel.disable_forward_pre_hook("
            "self param_sync)": repair.switch_once,
        },
        "megatron.core.dist_checkpointing.strategies.filesystem_async": {
            # it starts a process for every rank, which outlives a rank that is killed
            # and keeps its output open
            "get_write_results_queue(mp_mode)": repair.queue_in_process,
            # its caller reports the class of an error without its text: a full disk,
            # for example
            "FileSystemWriterAsync.write_preloaded_data(transform_list local_proc_idx "
            "write_bucket results_queue count_queue use_fsync kwargs)": repair.raise_cause,
        },
    }
    return rows(modules) + for_reading()


def for_reading() -> list[Patch]:
    """No code of whoever wrote a checkpoint runs. May be applied twice:
    --use-checkpoint-args reads one first."""
    modules = {
        "torch.distributed.checkpoint.filesystem": {
            # it unpickles whatever the file names
            "FileSystemReader.read_metadata(self args kwargs)": repair.known_records,
        },
        "torch.distributed.checkpoint.default_planner": {
            # it loads what is no tensor without weights_only
            "DefaultLoadPlanner.load_bytes(self read_item value)": repair.weights_only,
        },
        FILES: {
            # --use-checkpoint-args leaves out flags of the model, and the losses are
            # those of another one
            "load_args_from_checkpoint("
            "args load_arg checkpointing_context)": repair.whole_model,
        },
    }
    return rows(modules)


def _without_cuda(initialize: Callable) -> Callable:
    return partial(initialize, allow_no_cuda=True)


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    if as_numpy and isinstance(tensor, torch.Tensor):
        return tensor.numpy()
    return tensor


@around
def _not_persistent(init: Callable, self: Any, persistent: bool = False) -> None:
    init(self, False)


FORKED = {
    "megatron.core.dist_checkpointing.strategies.async_utils": {
        # the persistent worker would share the host's memory, to which training writes;
        # a forked one has a copy
        "AsyncCallsQueue.__init__(self persistent)": _not_persistent,
    },
}
