"""Every name of Megatron that this project rebinds, with the reason: for the schedules,
for the CPU, and repairs.

Rows only: `guard.py` checks and rebinds, `runtime.py`, `repairs.py` and `checkpoints/`
hold the replacements. docs/upstream.md has each repair's fault, and how Megatron could
mend it.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

import torch

from megatron_2bw.mcore import repairs as repair
from megatron_2bw.mcore import torch_norm
from megatron_2bw.mcore.checkpoints import folder
from megatron_2bw.mcore.rebinding import Patch, row

if TYPE_CHECKING:
    from megatron_2bw.mcore.runtime import MegatronRuntime

CORE, TORCH_FORMAT = "megatron.core", "torch.distributed.checkpoint"
STRATEGIES = f"{CORE}.dist_checkpointing.strategies"
in_loop = functools.partial(row, "megatron.training.training")
in_files = functools.partial(row, "megatron.training.checkpointing")
in_sharded = functools.partial(row, f"{CORE}.optimizer.distrib_optimizer")
in_wrapped = functools.partial(row, f"{CORE}.distributed.distributed_data_parallel")
GROUPS = "tp_group pp_group dp_cp_group dp_group"


def for_schedule(runtime: MegatronRuntime) -> list[Patch]:
    """The two hooks of a schedule, which a patched source checkout has in its
    source."""
    return [
        in_loop(
            "get_forward_backward_func(pp_size vp_size schedule_pg_collection)",
            "the training loop looks its schedule up here",
            lambda original: lambda *args, **kwargs: runtime.forward_backward,
        ),
        in_loop(
            "get_megatron_optimizer(config model_chunks config_overrides "
            "use_gloo_process_groups pg_collection "
            "dump_param_to_param_group_map)",
            "the optimizer's step writes the weight version that the schedule names",
            runtime.make_optimizer,
        ),
    ]


def for_log(runtime: MegatronRuntime | None) -> list[Patch]:
    """The progress in the log lines and, with a schedule of this project, the stages'
    stats."""
    if runtime is None:
        # it imports Megatron, on a CPU not before cpu.install()
        from megatron_2bw.mcore.log_lines import with_progress

        return [
            in_loop(
                "print_rank_last(message)",
                "tokens per second and the ETA join the line",
                with_progress,
            )
        ]
    return [
        in_loop(
            "training_log(loss_dict total_loss_dict learning_rate iteration "
            "loss_scale report_memory_flag "
            "skipped_iter grad_norm params_norm num_zeros_in_grad "
            "max_attention_logit pg_collection "
            "is_first_iteration seqlen_squared_sum_in_batch total_real_tokens_in_batch)",
            "the stages report there; with a late step a line is written when its step is complete",
            runtime.add_line,
        ),
        in_loop(
            "print_rank_last(message)",
            "waiting times and memory join the line",
            runtime.print_line,
        ),
    ]


def for_late_step(runtime: MegatronRuntime) -> list[Patch]:
    """With a late step nothing in the training loop may wait for another stage."""
    given = lambda value, group=None: value
    everywhere = "each stage has the value already; the reduction would make it wait for all others"
    reads, run = "it reads all weights", "model optimizer opt_param_scheduler"
    return [
        in_loop(
            "get_optimizer_param_scheduler(optimizer)",
            "learning rate and weight decay advance with the steps, which come later",
            runtime.make_scheduler,
        ),
        row(
            f"{CORE}.optimizer.clip_grads",
            "l2_norm_impl",
            "it waits for the GPU at each tensor",
            repair.wait_once,
        ),
        in_loop(
            "logical_and_across_model_parallel_group(input group)",
            everywhere,
            lambda original: given,
        ),
        in_loop(
            "reduce_max_stat_across_model_parallel_group(stat group)",
            everywhere,
            lambda original: given,
        ),
        in_loop(
            "calc_params_l2_norm(model force_create_fp32_copy)",
            reads,
            runtime.sync_first,
        ),
        in_loop(
            "check_param_hashes_across_dp_replicas(model cross_check)",
            reads,
            runtime.sync_first,
        ),
        in_loop(
            f"save_checkpoint_and_time(iteration {run} "
            "num_floating_point_operations_so_far checkpointing_context "
            "non_persistent_ckpt train_data_iterator)",
            "a checkpoint holds the newest weights",
            runtime.save,
        ),
        in_loop(
            f"checkpoint_and_decide_exit({run} iteration "
            "num_floating_point_operations_so_far checkpointing_context "
            "train_data_iterator)",
            (
                "a run that ends has logged all its iterations; signals and the time "
                "limit need no collective"
            ),
            runtime.decide_exit,
        ),
    ]


def for_host() -> list[Patch]:
    """With the optimizer in host memory: torch's in place of those of Transformer
    Engine and Apex."""
    from megatron_2bw.mcore.host_memory import make_on_host  # it imports Megatron

    local = functools.partial(getattr, importlib.import_module(f"{CORE}.utils"))
    scale, apply = (
        local("local_multi_tensor_scale"),
        local("local_multi_tensor_applier"),
    )
    norm, params = (
        local("local_multi_tensor_l2_norm"),
        "megatron.training.utils.common_utils",
    )
    clips, steps, makes = (
        f"{CORE}.optimizer{module}" for module in (".clip_grads", ".optimizer", "")
    )
    ours = {
        (clips, "multi_tensor_applier"): apply,
        (clips, "multi_tensor_scale_impl"): scale,
        (clips, "multi_tensor_scale_tensor_impl"): None,
        (clips, "l2_norm_impl"): norm,
        (steps, "multi_tensor_applier"): apply,
        (steps, "multi_tensor_scale_impl"): scale,
        (makes, "USING_PYTORCH_OPTIMIZER"): True,
        (makes, "SGD"): torch.optim.SGD,
        # whose Adam counts steps in another place
        (f"{CORE}.optimizer.distrib_optimizer", "HAVE_APEX_OR_TE"): False,
        (params, "multi_tensor_applier"): apply,
        (params, "multi_tensor_l2norm"): norm,
    }
    why = "its kernels take tensors of a GPU only"
    made = (
        "_get_megatron_optimizer_based_on_param_groups(config model_chunks "
        "param_groups per_model_buffers "
        "model_parallel_group data_parallel_group data_parallel_group_gloo data_parallel_group_idx "
        "intra_dist_opt_group distributed_optimizer_instance_id pg_collection "
        "skip_megatron_wrapping)"
    )
    return [
        row(
            makes,
            made,
            "it makes main parameters and state where the model is",
            make_on_host,
        ),
        save_forked(),
        *(
            row(part, name, why, lambda _, new=new: new)
            for (part, name), new in ours.items()
        ),
    ]


def for_checkpoints(runtime: Any = None) -> list[Patch]:
    """Saving and loading, with a schedule of this project or, without `runtime`, with
    Megatron's own."""
    from megatron_2bw.mcore.checkpoints.state import Checkpoints

    ours, more = Checkpoints(runtime), f"{GROUPS} expt_dp_group rng_state_key_prefix"
    return [
        in_files(
            "generate_state_dict(args model optimizer opt_param_scheduler "
            "rng_state iteration optim_sd_kwargs "
            "model_sd_kwargs rerun_state)",
            (
                "shadow weights and the schedule's name; without Apex the "
                "optimizer's state must be there first"
            ),
            ours.collect,
        ),
        in_files(
            f"get_rng_state(ckpt_format {GROUPS} key_prefix)",
            "the random state before the microbatches in flight",
            ours.random_state,
        ),
        in_files(
            "_load_base_checkpoint(load_dir args rank0 sharded_state_dict "
            "checkpointing_context dp_cp_group "
            "expt_dp_group gpt_compat_layer_maps)",
            "here is read what `generate_state_dict` has added",
            ours.read,
        ),
        in_files(
            "maybe_msc",
            "the file that names the latest checkpoint must never be empty",
            folder.TrackerFiles,
        ),
        in_loop(
            "save_checkpoint(iteration model optimizer opt_param_scheduler "
            "num_floating_point_operations_so_far "
            "checkpointing_context pipeline_rank expert_rank tensor_rank "
            "pipeline_parallel expert_parallel "
            "non_persistent_ckpt train_data_iterator "
            f"preprocess_common_state_dict_fn release {more})",
            (
                "a checkpoint stays whole until its new version is; a full disk is "
                "reported in one line"
            ),
            ours.save,
        ),
        in_loop(
            "maybe_finalize_async_save(blocking terminate)",
            "it asks all ranks while it writes",
            ours.finalize,
        ),
        in_loop(
            "load_checkpoint(ddp_model optimizer opt_param_scheduler load_arg "
            "strict checkpointing_context "
            f"skip_load_to_model_and_opt {more})",
            (
                "the schedule resumes from what is loaded; without Apex each "
                "parameter needs a step counter of its own"
            ),
            ours.load,
        ),
    ]


def for_cpu() -> list[Patch]:
    """What Megatron itself, in addition to torch, needs on a host without CUDA."""
    return [
        row(
            f"{CORE}.transformer.torch_norm",
            (
                "WrappedTorchNorm.__new__(cls config hidden_size eps "
                "persist_layer_norm zero_centered_gamma normalization)"
            ),
            "without Apex it has neither sequence parallelism nor --apply-layernorm-1p",
            torch_norm.torch_norm,
        ),
        in_loop(
            "initialize_megatron(allow_no_cuda skip_mpu_initialization get_embedding_ranks "
            "get_position_embedding_ranks store skip_model_parallel_init "
            "seed_pp_group seed_dp_group seed_tp_group "
            "seed_ep_group seed_etp_group skip_random_seed)",
            "pretrain does not pass allow_no_cuda on",
            lambda original: functools.partial(original, allow_no_cuda=True),
        ),
        row(
            f"{CORE}.tensor_parallel.random",
            "_set_cuda_rng_state(new_state device graph_safe)",
            "it writes a CUDA generator that does not exist",
            lambda original: (
                lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(
                    new_state
                )
            ),
        ),
        row(
            f"{CORE}.transformer.moe.token_dispatcher",
            "maybe_move_tensor_to_cpu(tensor as_numpy record_stream)",
            (
                "it makes lists of sizes of tensors on the GPU only, and torch takes "
                "no tensor for them"
            ),
            lambda original: (
                lambda tensor, as_numpy=False, record_stream=False: (
                    tensor.numpy()
                    if as_numpy and isinstance(tensor, torch.Tensor)
                    else tensor
                )
            ),
        ),
        row(
            "megatron.training.initialize",
            "init_persistent_async_worker(rank mp_mode)",
            "the worker of --async-save needs a GPU",
            lambda original: lambda rank, mp_mode="spawn": None,
        ),
        save_forked(),
    ]


def save_forked() -> Patch:
    return row(
        f"{STRATEGIES}.async_utils",
        "AsyncCallsQueue.__init__(self persistent)",
        (
            "the persistent worker would share the host's memory, to which training "
            "writes; a forked one has a copy"
        ),
        lambda original: functools.wraps(original)(
            lambda self, persistent=False: original(self, False)
        ),
    )


def repairs() -> list[Patch]:
    """Faults of Megatron that lose data, hang, or end a run that this project's docs
    recommend."""
    twice = (
        "an evaluation before the first step that is not skipped disables the hooks "
        "twice, with a KeyError"
    )
    return [
        *for_reading(),
        row(
            f"{CORE}.datasets.utils",
            "compile_helpers()",
            (
                "the wheel ships the compiled helper without the Makefile that this "
                "function runs, and exits"
            ),
            repair.skip_when_compiled,
        ),
        in_loop(
            "build_train_valid_test_data_loaders(build_train_valid_test_datasets_provider)",
            "without validation data the list of its loaders is [None], which counts as data",
            repair.skip_empty_validation,
        ),
        in_sharded(
            "DistributedOptimizer._set_main_param_and_optimizer_states(self model_param tensors)",
            "without Apex the state has a step counter, which no checkpoint "
            "holds by parameter; the shard of an "
            "fp32 parameter is a view of it, to which autograd allows no write",
            repair.set_without_step,
        ),
        in_sharded(
            "DistributedOptimizer.sharded_param_state_fully_reshardable(self "
            "model_sharded_state_dict is_loading "
            "metadata)",
            "with several buckets the state of one parameter is saved as that of "
            "another: the places that it "
            "reads count the padding between buckets, which the gathered state lacks",
            repair.places_without_padding,
        ),
        in_wrapped(
            "DistributedDataParallel.enable_forward_pre_hook(self)",
            twice,
            repair.switch_once,
        ),
        in_wrapped(
            "DistributedDataParallel.disable_forward_pre_hook(self param_sync)",
            twice,
            repair.switch_once,
        ),
        row(
            f"{STRATEGIES}.filesystem_async",
            "get_write_results_queue(mp_mode)",
            (
                "it starts a process for every rank, which outlives a rank that is "
                "killed and keeps its output open"
            ),
            repair.queue_in_process,
        ),
        row(
            f"{STRATEGIES}.filesystem_async",
            "FileSystemWriterAsync.write_preloaded_data(transform_list "
            "local_proc_idx write_bucket results_queue "
            "count_queue use_fsync kwargs)",
            "its caller reports the class of an error without its text: a full disk, for example",
            repair.raise_cause,
        ),
    ]


def for_reading() -> list[Patch]:
    """No code of whoever wrote a checkpoint runs. May be applied twice:
    --use-checkpoint-args reads one first."""
    return [
        row(
            f"{TORCH_FORMAT}.filesystem",
            "FileSystemReader.read_metadata(self args kwargs)",
            "it unpickles whatever the file names",
            repair.known_records,
        ),
        row(
            f"{TORCH_FORMAT}.default_planner",
            "DefaultLoadPlanner.load_bytes(self read_item value)",
            "it loads what is no tensor without weights_only",
            repair.weights_only,
        ),
        in_files(
            "load_args_from_checkpoint(args load_arg checkpointing_context)",
            (
                "--use-checkpoint-args leaves out flags of the model, and the losses "
                "are those of another one"
            ),
            repair.whole_model,
        ),
    ]
