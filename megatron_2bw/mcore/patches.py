"""The only file that rebinds Megatron's names.

Invariant: every rebinding states module, name, the signature it was written against and why; if Megatron has
drifted from any of them, nothing is rebound and the program stops with one line.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron_2bw import cpu
from megatron_2bw.checkpoints import save_workers as helpers
from megatron_2bw.checkpoints.folder import TrackerFiles

SUPPORTED = "0.19"


class DriftError(RuntimeError):
    """The installed Megatron is not the one that the patches were written for."""


@dataclass(frozen=True)
class Patch:
    """One rebinding: `module.name`, whose parameters must be `signature`, becomes `replace(original)`.

    `name` may be that of a method, Class.method. `signature` is None for what is not called.
    """

    module: str
    name: str
    signature: tuple[str, ...] | None
    reason: str
    replace: Callable[[Any], Any]

    def owner(self) -> Any:
        """The module or class that holds the name."""
        *classes, _ = self.name.split(".")
        return functools.reduce(getattr, classes, importlib.import_module(self.module))

    def put(self, value: Any) -> None:
        setattr(self.owner(), self.name.split(".")[-1], value)

    def original(self) -> Any:
        """What Megatron holds now. Raises DriftError if it is missing or has other parameters."""
        where = f"{self.module}.{self.name}"
        try:
            found = getattr(self.owner(), self.name.split(".")[-1])
        except (ImportError, AttributeError) as error:
            raise DriftError(f"{where} is missing: megatron_2bw needs megatron-core {SUPPORTED} ({error})") from error
        if self.signature is None:
            return found
        parameters = tuple(inspect.signature(found).parameters)
        if parameters != self.signature:
            raise DriftError(
                f"{where} takes ({', '.join(parameters)}), expected ({', '.join(self.signature)}): "
                f"megatron_2bw needs megatron-core {SUPPORTED}"
            )
        return found


def apply(patches: list[Patch]) -> Callable[[], None]:
    """Check all patches, then make all of them. Returns a function that takes them back."""
    _check_version()
    originals = [patch.original() for patch in patches]
    for patch, original in zip(patches, originals):
        patch.put(patch.replace(original))

    def undo() -> None:
        for patch, original in reversed(list(zip(patches, originals))):
            patch.put(original)

    return undo


def _check_version() -> None:
    # `__version__` carries the git revision of whatever checkout holds the environment; VERSION does not.
    from megatron.core.package_info import VERSION

    if ".".join(map(str, VERSION[:2])) != SUPPORTED:
        installed = ".".join(map(str, VERSION[:3]))
        raise DriftError(f"megatron-core {installed} is installed, megatron_2bw needs {SUPPORTED}")


def repairs() -> list[Patch]:
    """Faults of Megatron that hit every user."""
    writer = "megatron.core.dist_checkpointing.strategies.filesystem_async"
    return [
        Patch(
            "megatron.core.datasets.utils",
            "compile_helpers",
            (),
            "the wheel ships the compiled helper without the Makefile that this function runs, and exits",
            _skip_when_compiled,
        ),
        Patch(
            "megatron.core.optimizer.distrib_optimizer",
            "DistributedOptimizer._set_main_param_and_optimizer_states",
            ("self", "model_param", "tensors"),
            "without Apex the state has a step counter, which no checkpoint holds by parameter; the shard of an fp32 "
            "parameter is a view of it, which autograd lets nobody write",
            _set_without_step,
        ),
        Patch(
            writer,
            "get_write_results_queue",
            ("mp_mode",),
            "it starts a process for every rank, seconds long, which outlives a rank that is killed",
            _results,
        ),
        Patch(
            writer,
            "FileSystemWriterAsync.write_preloaded_data",
            ("transform_list", "local_proc_idx", "write_bucket", "results_queue", "count_queue", "use_fsync", "kwargs"),
            "its caller tells the class of what went wrong, and not what: a full disk, say",
            _tell_why,
        ),
        Patch(
            "megatron.core.dist_checkpointing.strategies.async_utils",
            "PersistentAsyncCaller.async_loop",
            ("rank", "queue", "preload_q", "comp_q", "log_level", "cpu_priority", "io_priority"),
            "the process would outlive a rank that is killed, with its memory on the GPU",
            _worker,
        ),
    ]


def _worker(original: Callable) -> staticmethod:
    return staticmethod(helpers.async_loop)


def _tell_why(original: Callable) -> staticmethod:
    @functools.wraps(original)
    def write_preloaded_data(*args, **kwargs):
        if multiprocessing.parent_process() is not None:  # of an asynchronous save
            helpers.end_with_parent()
        output = original(*args, **kwargs)
        if kwargs["results_queue"] is None and output is not None and isinstance(output[1], Exception):
            raise helpers.root(output[1])  # caught by the caller, which passes its text on
        return output

    return staticmethod(write_preloaded_data)


def _results(original: Callable) -> Callable:
    return helpers.results_queue


def _set_without_step(original: Callable) -> Callable:
    @functools.wraps(original)
    def set_states(self, model_param, tensors):
        import torch

        with torch.no_grad():
            return original(self, model_param, {**tensors, "step": None})

    return set_states


def _skip_when_compiled(original: Callable) -> Callable:
    @functools.wraps(original)
    def compile_helpers() -> None:
        try:
            import megatron.core.datasets.helpers_cpp  # noqa: F401
        except ImportError:
            original()

    return compile_helpers


def for_cpu() -> list[Patch]:
    """What Megatron itself, beside torch, needs on a host without CUDA."""
    initialize = (
        "allow_no_cuda",
        "skip_mpu_initialization",
        "get_embedding_ranks",
        "get_position_embedding_ranks",
        "store",
        "skip_model_parallel_init",
        "seed_pp_group",
        "seed_dp_group",
        "seed_tp_group",
        "seed_ep_group",
        "seed_etp_group",
        "skip_random_seed",
    )
    return [
        Patch(
            "megatron.training.training",
            "initialize_megatron",
            initialize,
            "pretrain does not pass allow_no_cuda on",
            lambda original: functools.partial(original, allow_no_cuda=True),
        ),
        Patch(
            "megatron.core.tensor_parallel.random",
            "_set_cuda_rng_state",
            ("new_state", "device", "graph_safe"),
            "it writes a CUDA generator that does not exist",
            lambda original: cpu.set_tracker_rng_state,
        ),
        Patch(
            "megatron.training.initialize",
            "init_persistent_async_worker",
            ("rank", "mp_mode"),
            "the worker of --async-save asks for a GPU",
            lambda original: lambda rank, mp_mode="spawn": None,
        ),
        Patch(
            "megatron.core.dist_checkpointing.strategies.async_utils",
            "AsyncCallsQueue.__init__",
            ("self", "persistent"),
            "that worker would share the host's memory, which training goes on to write; a forked one has a copy of it",
            lambda original: lambda self, persistent=False: original(self, False),
        ),
    ]


def for_schedule(runtime: Any) -> list[Patch]:
    """Hand the schedule and the optimizer's step to `runtime` (a runtime.MegatronRuntime)."""

    def attach(original: Callable) -> Callable:
        @functools.wraps(original)
        def get_megatron_optimizer(config, model_chunks, *args, **kwargs):
            optimizer = original(config, model_chunks, *args, **kwargs)
            runtime.attach(model_chunks, optimizer)
            return optimizer

        return get_megatron_optimizer

    return [
        Patch(
            "megatron.training.training",
            "get_forward_backward_func",
            ("pp_size", "vp_size", "schedule_pg_collection"),
            "the training loop looks its schedule up here",
            lambda original: lambda *args, **kwargs: runtime.forward_backward,
        ),
        Patch(
            "megatron.training.training",
            "get_megatron_optimizer",
            (
                "config",
                "model_chunks",
                "config_overrides",
                "use_gloo_process_groups",
                "pg_collection",
                "dump_param_to_param_group_map",
            ),
            "the optimizer's step writes the weight version that the schedule names",
            attach,
        ),
        *for_log(runtime),
    ]


def for_log(runtime: Any) -> list[Patch]:
    """What the stages report, in the log lines and on the dashboards. `apply` takes originals first: twice is once."""
    loop = "megatron.training.training"

    def into_the_log(original: Callable) -> Callable:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def training_log(*args, **kwargs):
            values = signature.bind(*args, **kwargs)
            values.apply_defaults()
            return runtime.log.add(original, values.arguments)

        return training_log

    def with_the_stages(original: Callable) -> Callable:
        return lambda message: original(runtime.log.line(message) if runtime.log else message)

    def for_wandb(original: Callable) -> Callable:
        from megatron_2bw.mcore.log_lines import writer_for_wandb

        return writer_for_wandb(original)

    return [
        Patch(
            loop,
            "training_log",
            (
                "loss_dict",
                "total_loss_dict",
                "learning_rate",
                "iteration",
                "loss_scale",
                "report_memory_flag",
                "skipped_iter",
                "grad_norm",
                "params_norm",
                "num_zeros_in_grad",
                "max_attention_logit",
                "pg_collection",
                "is_first_iteration",
                "seqlen_squared_sum_in_batch",
                "total_real_tokens_in_batch",
            ),
            "the stages report there; with a late step a line is written when the step that it describes is made",
            into_the_log,
        ),
        Patch(
            loop,
            "print_rank_last",
            ("message",),
            "waiting times and memory of the stages join the line",
            with_the_stages,
        ),
        Patch(
            loop,
            "get_tensorboard_writer",
            (),
            "without a writer of TensorBoard it logs neither loss nor norm to Weights & Biases",
            for_wandb,
        ),
    ]


def for_checkpoints(runtime: Any = None) -> list[Patch]:
    """Saving and loading, with a schedule of this project or, without `runtime`, with Megatron's own."""
    from megatron_2bw.checkpoints.state import Checkpoints

    ours, files, loop = Checkpoints(runtime), "megatron.training.checkpointing", "megatron.training.training"
    save = (
        "iteration",
        "model",
        "optimizer",
        "opt_param_scheduler",
        "num_floating_point_operations_so_far",
        "checkpointing_context",
        "pipeline_rank",
        "expert_rank",
        "tensor_rank",
        "pipeline_parallel",
        "expert_parallel",
        "non_persistent_ckpt",
        "train_data_iterator",
        "preprocess_common_state_dict_fn",
        "release",
        "tp_group",
        "pp_group",
        "dp_cp_group",
        "dp_group",
        "expt_dp_group",
        "rng_state_key_prefix",
    )
    groups = ("tp_group", "pp_group", "dp_cp_group", "dp_group", "expt_dp_group", "rng_state_key_prefix")
    return [
        Patch(
            files,
            "generate_state_dict",
            (
                "args",
                "model",
                "optimizer",
                "opt_param_scheduler",
                "rng_state",
                "iteration",
                "optim_sd_kwargs",
                "model_sd_kwargs",
                "rerun_state",
            ),
            "shadow weights and the schedule's name; without Apex the optimizer's state must be there first",
            ours.collect,
        ),
        Patch(
            files,
            "get_rng_state",
            ("ckpt_format", *groups[:4], "key_prefix"),
            "the random state before the microbatches in flight",
            ours.random_state,
        ),
        Patch(
            files,
            "_load_base_checkpoint",
            (
                "load_dir",
                "args",
                "rank0",
                "sharded_state_dict",
                "checkpointing_context",
                "dp_cp_group",
                "expt_dp_group",
                "gpt_compat_layer_maps",
            ),
            "what `generate_state_dict` has added is found here",
            ours.read,
        ),
        Patch(
            files,
            "maybe_msc",
            None,
            "the file that names the latest checkpoint must never be empty, even for a moment",
            TrackerFiles,
        ),
        Patch(
            loop,
            "save_checkpoint",
            save,
            "a checkpoint that is written anew stays whole until it is replaced; a full disk is told in one line",
            ours.save,
        ),
        Patch(
            loop,
            "maybe_finalize_async_save",
            ("blocking", "terminate"),
            "it asks all ranks in every iteration while a checkpoint is being written",
            ours.finalize,
        ),
        Patch(
            loop,
            "load_checkpoint",
            (
                "ddp_model",
                "optimizer",
                "opt_param_scheduler",
                "load_arg",
                "strict",
                "checkpointing_context",
                "skip_load_to_model_and_opt",
                *groups,
            ),
            "the schedule goes on from what was loaded; without Apex the optimizer's steps must be told apart",
            ours.load,
        ),
    ]


class _LateLoop:
    """Megatron's functions of the training loop, changed so that they go with the late step of `runtime`.

    Each method takes the original function and returns what replaces it.
    """

    def __init__(self, runtime: Any):
        self.runtime = runtime
        self._hidden: tuple | None = None  # exit flags as they were given, while `decide_exit` hides them

    def attach_scheduler(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def get_optimizer_param_scheduler(optimizer):
            scheduler = original(optimizer)
            self.runtime.attach_scheduler(scheduler)
            return scheduler

        return get_optimizer_param_scheduler

    def sync_first(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def with_the_newest_weights(*args, **kwargs):
            self.runtime.sync_weights()
            return original(*args, **kwargs)

        return with_the_newest_weights

    def save(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def save_checkpoint_and_time(*args, **kwargs):
            self.runtime.sync_weights()
            # A checkpoint holds the arguments.
            with contextlib.nullcontext() if self._hidden is None else _exit_flags(*self._hidden):
                return original(*args, **kwargs)

        return save_checkpoint_and_time

    def decide_exit(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def checkpoint_and_decide_exit(*args, **kwargs):
            # Megatron asks all ranks in every iteration; here the late step has asked them in the background.
            with contextlib.nullcontext() if self.runtime.exit_requested else _exit_flags(False, None) as self._hidden:
                try:
                    leave = original(*args, **kwargs)
                finally:
                    self._hidden = None
            if leave:
                self.runtime.sync_weights()
            return leave

        return checkpoint_and_decide_exit


def for_late_step(runtime: Any) -> list[Patch]:
    """What a schedule with a late step changes in the training loop: nothing there may wait for another stage."""
    late, loop = _LateLoop(runtime), "megatron.training.training"
    state = (
        "model",
        "optimizer",
        "opt_param_scheduler",
        "iteration",
        "num_floating_point_operations_so_far",
        "checkpointing_context",
        "train_data_iterator",
    )
    save = (state[3], *state[:3], *state[4:6], "non_persistent_ckpt", "train_data_iterator")
    everywhere = "each stage has the value by itself; the reduction would make it wait for all others"
    return [
        Patch(
            loop,
            "get_optimizer_param_scheduler",
            ("optimizer",),
            "learning rate and weight decay advance with the steps, which come later",
            late.attach_scheduler,
        ),
        Patch(
            loop,
            "logical_and_across_model_parallel_group",
            ("input", "group"),
            everywhere,
            lambda original: lambda input, group=None: input,
        ),
        Patch(
            loop,
            "reduce_max_stat_across_model_parallel_group",
            ("stat", "group"),
            everywhere,
            lambda original: lambda stat, group=None: stat,
        ),
        *for_log(runtime),
        Patch(
            loop,
            "calc_params_l2_norm",
            ("model", "force_create_fp32_copy"),
            "it reads the newest weights",
            late.sync_first,
        ),
        Patch(
            loop,
            "check_param_hashes_across_dp_replicas",
            ("model", "cross_check"),
            "it reads the newest weights",
            late.sync_first,
        ),
        Patch(loop, "save_checkpoint_and_time", save, "a checkpoint holds the newest weights", late.save),
        Patch(
            loop,
            "checkpoint_and_decide_exit",
            state,
            "a run that ends has logged all its iterations; signals and the time limit need no collective",
            late.decide_exit,
        ),
    ]


@contextlib.contextmanager
def _exit_flags(signal_handler: bool, minutes: int | None) -> Iterator[tuple]:
    """--exit-signal-handler and --exit-duration-in-mins with other values; yields what they were."""
    from megatron.training import get_args

    args = get_args()
    asked = args.exit_signal_handler, args.exit_duration_in_mins
    args.exit_signal_handler, args.exit_duration_in_mins = signal_handler, minutes
    try:
        yield asked
    finally:
        args.exit_signal_handler, args.exit_duration_in_mins = asked
