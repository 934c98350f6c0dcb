"""What a checkpoint holds in addition to Megatron's content, and how a run resumes from
it.

Under the key `two_bw`: the schedule's name, the number of updates, the loss scale of
the next batch, and with 2bw the length of the synchronous start and the shadow weights,
one update older than the model's, as sharded tensors that load at any parallel sizes.
With --two-bw-correction these are the older working copy, and the newer one is saved
too. Megatron's entry for the random state is the state before the microbatches in
flight, which run again after a resume.

Invariants:
- Megatron's content is where Megatron looks for it: plain Megatron reads the
  checkpoint;
- a line reports what cannot be resumed exactly; what cannot be resumed at all stops
  before training.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.utils import unwrap_model
from megatron.training import get_args
from torch.distributed.checkpoint import CheckpointException

from megatron_2bw.base.errors import UserError
from megatron_2bw.mcore.checkpoints.folder import (
    latest_iteration,
    restore_old,
    root,
    same_folder,
    set_aside_old,
    source,
)
from megatron_2bw.mcore.checkpoints.loadable import obstacle
from megatron_2bw.mcore.checkpoints.optimizer_state import (
    complete_optimizer,
    list_groups,
    name_step_zero,
    number_groups,
    unshare_steps,
)
from megatron_2bw.mcore.checkpoints.unpickle import Refused, causes
from megatron_2bw.mcore.correction import Correction, parse
from megatron_2bw.mcore.rebinding import arguments, around

KEY = "two_bw"
COPIES = ("shadow", "working")  # copies of the weights that it may hold under KEY


@dataclass(frozen=True)
class RunState:
    """What a run resumes from, in addition to what Megatron saves. Empty without a late
    step.

    shadow      the weights and experts' biases one update older than the newest, by
                these; empty: take the newest
    loss_scale  of the next batch, which belongs to those weights; None: the present one
    working     the working copy of the newest weights, with --two-bw-correction; empty:
                take the newest
    correction  of these working copies; None: they are the true weights
    sync_iterations  the length of the run's synchronous start; None: that of the
                     command line
    """

    shadow: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    loss_scale: float | None = None
    working: dict[torch.nn.Parameter, torch.Tensor] = field(default_factory=dict)
    correction: Correction | None = None
    sync_iterations: int | None = None


class Checkpoints:
    """Megatron's functions for saving and loading, extended. A method's first argument
    is the original function.

    runtime: the runtime of one of this project's schedules, or None with Megatron's
    own.
    """

    def __init__(self, runtime: Any = None):
        self._runtime = runtime
        # under KEY in the checkpoint that is being loaded, without its tensors
        self._saved: dict = {}
        # its "shadow" and "working", by the parameter's name
        self._tensors: dict[str, dict[str, torch.Tensor]] = {}
        self._checked = False  # whether a checkpoint of this run can be loaded

    @around
    def collect(self, generate: Callable, *args: Any, **kwargs: Any) -> dict:
        """generate_state_dict: for saving, and as the plan of what to load."""
        values = arguments(generate, args, kwargs)
        complete_optimizer(values["optimizer"])
        state = generate(*args, **kwargs)
        loading = bool((values["optim_sd_kwargs"] or {}).get("is_loading"))
        if not loading:
            name_step_zero(state.get("optimizer"), values["optimizer"])
        sharded = values["args"].ckpt_format == "torch_dist"
        if sharded:
            number_groups(state.get("optimizer"))
        if self._runtime is not None:
            (model,) = values["model"]
            self._add_own(state, model, loading, sharded, values)
        if sharded and not loading and not self._checked:
            _check_loadable(state)
            self._checked = True
        return state

    def _add_own(
        self,
        state: dict,
        model: Any,
        loading: bool,
        sharded: bool,
        values: dict[str, Any],
    ) -> None:
        """Add the entry KEY to the state. values: the arguments of
        generate_state_dict"""
        if loading:
            for name in filter(self._wants, COPIES):
                versioned = [
                    *self._runtime.trainable,
                    *(_biases(model).values() if name == "shadow" else ()),
                ]
                places = {tensor: torch.empty_like(tensor.data) for tensor in versioned}
                state.setdefault(KEY, {})[name] = _named(
                    name, model, state["model"], places, sharded
                )
            return
        schedule, run = self._runtime.schedule, self._runtime.state()
        copies = {"shadow": run.shadow, "working": run.working}
        state[KEY] = {
            "schedule": schedule.name,
            "version": values["iteration"],
            "loss_scale": None if values["args"].no_save_optim else run.loss_scale,
            "factor": str(run.correction) if run.correction else None,
            "sync_iterations": run.sync_iterations,
            **{f"has_{name}": bool(tensors) for name, tensors in copies.items()},
            **{
                name: _named(name, model, state["model"], each, sharded)
                for name, each in copies.items()
                if each
            },
        }

    @around
    def random_state(self, get_rng_state: Callable, *args: Any, **kwargs: Any) -> Any:
        """get_rng_state: as it was before the microbatches in flight."""
        with (
            contextlib.nullcontext()
            if self._runtime is None
            else self._runtime.random_state_before_flight()
        ):
            return get_rng_state(*args, **kwargs)

    @around
    def read(self, load: Callable, *args: Any, **kwargs: Any) -> tuple:
        """_load_base_checkpoint: first the head, then all that `collect` has
        planned."""
        result = load(*args, **kwargs)
        if (state := result[0]) is not None:
            list_groups(state.get("optimizer"))
            # of a stage without adapters nothing is saved
            state.setdefault("model", {})
            self._saved = dict(state.pop(KEY, None) or {})
            self._tensors = {name: self._saved.pop(name, None) or {} for name in COPIES}
        return result

    @around
    def save(self, save_checkpoint: Callable, *args: Any, **kwargs: Any) -> None:
        """save_checkpoint: keep the previous checkpoint intact; report write errors in
        one line."""
        values, folder = arguments(save_checkpoint, args, kwargs), get_args().save
        # the torch format reads it before generate_state_dict
        complete_optimizer(values["optimizer"])
        with _write_errors():
            if (
                dist.get_rank() == 0
                and not values["non_persistent_ckpt"]
                and "://" not in folder
            ):
                set_aside_old(folder, values["iteration"])
            dist.barrier()  # before any rank writes
            save_checkpoint(*args, **kwargs)

    @around
    def finalize(
        self, finalize: Callable, blocking: bool = False, terminate: bool = False
    ) -> None:
        """maybe_finalize_async_save: while a checkpoint is written, poll this rank's
        writer only.

        Megatron polls all ranks in every iteration, and the stages would wait for each
        other.
        """
        runtime = self._runtime
        late = runtime is not None and runtime.schedule.late_step
        if late and not (blocking or terminate or runtime.save_complete):
            return
        if runtime is not None:
            # its collectives involve all ranks, as do Megatron's that follow
            runtime.wait_step()
            runtime.save_complete = False
        with _write_errors():
            finalize(blocking=blocking, terminate=terminate)

    @around
    def load(
        self,
        load_checkpoint: Callable,
        ddp_model: list,
        optimizer: Any,
        *args: Any,
        **kwargs: Any,
    ) -> tuple:
        """load_checkpoint: also give the runtime its state."""
        flag, folder = source(get_args())
        if kwargs.get("load_arg") == "lora_base":
            flag, folder = "--lora-base", get_args().lora_base
        if same_folder(get_args().load, get_args().save) and dist.get_rank() == 0:
            restore_old(get_args().save)
        dist.barrier()
        try:
            iteration, operations = load_checkpoint(
                ddp_model, optimizer, *args, **kwargs
            )
        except Refused as error:
            raise UserError(f"{flag} {folder}: {error}") from error
        # the first is a BaseException
        except (CheckpointException, CheckpointingException) as error:
            raise UserError(
                f"{flag} {folder}: it does not fit this run: {causes(error)}"
            ) from error
        unshare_steps(optimizer)
        if self._runtime is not None and iteration > 0:
            self._resume(ddp_model, iteration)
        self._tensors = {}
        return iteration, operations

    def _wants(self, name: str) -> bool:
        """Whether the run resumes from the checkpoint's copy of this name. It needs an
        optimizer (no --skip-train)."""
        wanted = (
            self._runtime.schedule.late_step
            and self._runtime.trainable
            and not get_args().finetune
        )
        if name == "working":
            wanted = wanted and self._runtime.options.correction is not None
        return bool(wanted and self._saved.get(f"has_{name}"))

    def _resume(self, ddp_model: list, iteration: int) -> None:
        (model,) = ddp_model
        copies = {
            name: {
                tensor: tensors[known]
                for known, tensor in _versioned(model).items()
                if known in tensors
            }
            for name, tensors in self._tensors.items()
            if tensors and self._wants(name)
        }
        scale = sync_iterations = None
        if self._runtime.schedule.late_step:
            sync_iterations = self._saved.get("sync_iterations")
            if not get_args().no_load_optim:
                scale = self._saved.get("loss_scale")
        # a number in checkpoints of version 0.1
        saved = self._saved.get("factor") if "shadow" in copies else None
        correction = None if saved is None else parse(str(saved))
        shadow = copies.get("shadow", {})
        working = copies.get("working", {})
        self._runtime.resume(
            RunState(shadow, scale, working, correction, sync_iterations)
        )


def _biases(model: Any) -> dict[str, torch.Tensor]:
    """The biases of experts, which have versions though they are no parameters, by
    name; with adapters they stay."""
    if get_args().lora_rank:
        return {}
    return {
        name: bias
        for name, bias in unwrap_model(model).named_buffers()
        if name.endswith("router.expert_bias")
    }


def _versioned(model: Any) -> dict[str, torch.Tensor]:
    return dict(unwrap_model(model).named_parameters()) | _biases(model)


def _named(
    copy_name: str,
    model: Any,
    content: dict,
    tensors: dict[torch.Tensor, torch.Tensor],
    sharded: bool,
) -> dict[str, Any]:
    """`tensors`, the copy `copy_name`, by the names of their parameters.

    sharded: cut and placed as the parameters in `content` are
    """
    named = {
        name: (tensor, tensors[tensor])
        for name, tensor in _versioned(model).items()
        if tensor in tensors
    }
    if not sharded:
        # A copy, since saving a view saves its whole storage.
        return {name: tensor.clone() for name, (_, tensor) in named.items()}
    entries = {
        id(entry.data): entry
        for entry in nested_values(content)
        if hasattr(entry, "data")
    }
    result = {}
    for name, (param, tensor) in named.items():
        result[name] = entry = copy.copy(entries[id(param)])
        entry.key, entry.data = f"{KEY}.{copy_name}.{entry.key}", tensor
    return result


def _check_loadable(state: dict) -> None:
    faults: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(faults, obstacle(state))
    for rank, fault in enumerate(faults):
        if fault is not None:
            line = (
                f"--save {get_args().save}: no run could load this checkpoint (rank "
                f"{rank}: {fault})"
            )
            remedy = "choose other parallel sizes, another --optimizer, or --ckpt-format torch"
            raise UserError(f"{line}: {remedy}", dist.get_rank() != rank)


@contextlib.contextmanager
def _write_errors() -> Iterator[None]:
    """Report a checkpoint that cannot be written."""
    try:
        yield
    except (OSError, CheckpointException, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "PytorchStreamWriter" not in str(error):
            raise
        folder = get_args().save
        good = latest_iteration(folder)
        rest = (
            "there is no older one here"
            if good is None
            else f"the last good one is that of iteration {good}"
        )
        cause = causes(root(error) if isinstance(error, RuntimeError) else error)
        # the first rank has the causes
        elsewhere = isinstance(error, CheckpointException) and not error.failures
        line = f"--save {folder}: the checkpoint could not be written: {cause}; {rest}"
        raise UserError(line, elsewhere) from error
