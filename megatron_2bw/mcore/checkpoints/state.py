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

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.utils import unwrap_model
from megatron.training import get_args
from torch import Tensor
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
from megatron_2bw.mcore.correction import Correction
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
    gradient_scale   see `StepResult` (late_step.py), of the last step; None: unknown
    """

    shadow: dict[Tensor, Tensor] = field(default_factory=dict)
    loss_scale: float | None = None
    working: dict[Tensor, Tensor] = field(default_factory=dict)
    correction: Correction | None = None
    sync_iterations: int | None = None
    gradient_scale: float | None = None


class Checkpoints:
    """Megatron's functions for saving and loading, extended. A method's first argument
    is the original function.

    runtime: the runtime of one of this project's schedules, or None with Megatron's
    own.
    """

    def __init__(self, runtime: Any):
        self._runtime = runtime
        self._saved = {}  # under KEY in the checkpoint that is being loaded
        self._checked = False  # whether a checkpoint of this run can be loaded

    @around
    def collect(self, generate: Callable, *args, **kwargs) -> dict:
        """generate_state_dict: for saving, and as the plan of what to load."""
        values = arguments(generate, args, kwargs)
        complete_optimizer(values["optimizer"])
        state = generate(*args, **kwargs)
        loading = (values["optim_sd_kwargs"] or {}).get("is_loading")
        if not loading:
            name_step_zero(state.get("optimizer"), values["optimizer"])
        sharded = values["args"].ckpt_format == "torch_dist"
        if sharded:
            number_groups(state.get("optimizer"))
        if self._runtime is not None:
            (model,) = values["model"]
            place = partial(_place, model, state["model"] if sharded else None)
            if not loading:
                state[KEY] = self._content(values, place)
            elif plan := self._plan(model, place):
                state[KEY] = plan
        if sharded and not loading and not self._checked:
            _check_loadable(state)
            self._checked = True
        return state

    def _plan(self, model: Any, place: Callable) -> dict[str, Any]:
        """Places for the copies that are loaded."""
        plan = {}
        for name in filter(self._wants, COPIES):
            versioned = list(self._runtime.trainable)
            if name == "shadow":
                versioned += _biases(model).values()
            tensors = {tensor: torch.empty_like(tensor.data) for tensor in versioned}
            plan[name] = place(name, tensors)
        return plan

    def _content(self, values: dict[str, Any], place: Callable) -> dict[str, Any]:
        """What is saved under KEY. values: the arguments of generate_state_dict"""
        run = self._runtime.state()
        content = {
            "schedule": self._runtime.schedule.name,
            "version": values["iteration"],
            "loss_scale": None if values["args"].no_save_optim else run.loss_scale,
            "factor": None,
            "gradient": None,
            "ahead": None,
            "gradient_scale": run.gradient_scale,
            "sync_iterations": run.sync_iterations,
        }
        if run.correction:
            content |= asdict(run.correction)
        for name in COPIES:
            tensors = getattr(run, name)
            content[f"has_{name}"] = bool(tensors)
            if tensors:
                content[name] = place(name, tensors)
        return content

    @around
    def random_state(self, get_rng_state: Callable, *args, **kwargs) -> Any:
        """get_rng_state: as it was before the microbatches in flight."""
        if self._runtime is None:
            return get_rng_state(*args, **kwargs)
        with self._runtime.random_state_before_flight():
            return get_rng_state(*args, **kwargs)

    @around
    def read(self, load: Callable, *args, **kwargs) -> tuple:
        """_load_base_checkpoint: first the head, then all that `collect` has
        planned."""
        result = load(*args, **kwargs)
        state = result[0]
        if state is not None:
            list_groups(state.get("optimizer"))
            state.setdefault("model", {})  # A stage without adapters saves nothing.
            self._saved = state.pop(KEY, None) or {}
        return result

    @around
    def save(self, save_checkpoint: Callable, *args, **kwargs) -> None:
        """save_checkpoint: keep the previous checkpoint intact; report write errors in
        one line."""
        values = arguments(save_checkpoint, args, kwargs)
        folder = get_args().save
        # the torch format reads it before generate_state_dict
        complete_optimizer(values["optimizer"])
        kept = "://" not in folder and not values["non_persistent_ckpt"]
        with _write_errors():
            if kept and dist.get_rank() == 0:
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
        *args,
        **kwargs,
    ) -> tuple:
        """load_checkpoint: also give the runtime its state."""
        run = get_args()
        flag, folder = source(run)
        if kwargs.get("load_arg") == "lora_base":
            flag = "--lora-base"
            folder = run.lora_base
        if same_folder(run.load, run.save) and dist.get_rank() == 0:
            restore_old(run.save)
        dist.barrier()
        try:
            result = load_checkpoint(ddp_model, optimizer, *args, **kwargs)
        except Refused as error:
            raise UserError(f"{flag} {folder}: {error}") from error
        # the first is a BaseException
        except (CheckpointException, CheckpointingException) as error:
            line = f"{flag} {folder}: it does not fit this run: {causes(error)}"
            raise UserError(line) from error
        unshare_steps(optimizer)
        if self._runtime is not None and result[0] > 0:
            self._resume(ddp_model[0])
        self._saved = {}
        return result

    def _wants(self, name: str) -> bool:
        """Whether the run resumes from the checkpoint's copy of this name. It needs an
        optimizer (no --skip-train)."""
        runtime = self._runtime
        if name == "working" and runtime.options.correction is None:
            return False
        if get_args().finetune or not runtime.trainable:
            return False
        return runtime.schedule.late_step and bool(self._saved.get(f"has_{name}"))

    def _resume(self, model: Any) -> None:
        late = self._runtime.schedule.late_step
        loads_scale = late and not get_args().no_load_optim
        shadow = self._copy(model, "shadow")
        state = RunState(
            shadow=shadow,
            loss_scale=self._saved.get("loss_scale") if loads_scale else None,
            working=self._copy(model, "working"),
            correction=correction_of_checkpoint(self._saved) if shadow else None,
            sync_iterations=self._saved.get("sync_iterations") if late else None,
            gradient_scale=self._saved.get("gradient_scale"),
        )
        self._runtime.resume(state)

    def _copy(self, model: Any, name: str) -> dict[Tensor, Tensor]:
        """The checkpoint's copy of this name, by the present weights."""
        saved = self._saved.get(name) or {}
        if not self._wants(name):
            return {}
        versioned = _versioned(model).items()
        return {tensor: saved[key] for key, tensor in versioned if key in saved}


def correction_of_checkpoint(saved: dict[str, Any]) -> Correction | None:
    """The correction of the working copies; None if they are the true weights.

    Older checkpoints hold one text, such as "0.5 and gradient 2", or one number. Of a
    factor that changed over the run ("1:0.5") the first counts.
    """
    factor = saved.get("factor")
    gradient = saved.get("gradient", 0)
    if isinstance(factor, str):
        factor, _, gradient = factor.partition(" and gradient ")
        factor = factor.partition(":")[0]
    if factor is None:
        return None
    return Correction(float(factor), float(gradient or 0), saved.get("ahead"))


def _biases(model: Any) -> dict[str, Tensor]:
    """The biases of experts, which have versions though they are no parameters, by
    name; with adapters they stay."""
    if get_args().lora_rank:
        return {}
    buffers = unwrap_model(model).named_buffers()
    suffix = "router.expert_bias"
    return {name: bias for name, bias in buffers if name.endswith(suffix)}


def _versioned(model: Any) -> dict[str, Tensor]:
    return dict(unwrap_model(model).named_parameters()) | _biases(model)


def _place(
    model: Any, content: dict | None, name: str, tensors: dict[Tensor, Any]
) -> dict[str, Any]:
    """`tensors`, the copy of this name, by the names of their parameters.

    content: the model's sharded state, as whose entries they are cut and placed; None:
    they are not sharded
    """
    entries = {}
    for entry in nested_values(content or {}):
        if hasattr(entry, "data"):
            entries[id(entry.data)] = entry
    places = {}
    for key, param in _versioned(model).items():
        if param not in tensors:
            continue
        if content is None:
            # A copy, since saving a view saves its whole storage.
            places[key] = tensors[param].clone()
        else:
            entry = copy.copy(entries[id(param)])
            entry.key = f"{KEY}.{name}.{entry.key}"
            entry.data = tensors[param]
            places[key] = entry
    return places


def _check_loadable(state: dict) -> None:
    faults = [None] * dist.get_world_size()
    dist.all_gather_object(faults, obstacle(state))
    for rank, fault in enumerate(faults):
        if fault is not None:
            line = (
                f"--save {get_args().save}: no run could load this checkpoint (rank "
                f"{rank}: {fault}): choose other parallel sizes, another --optimizer, "
                "or --ckpt-format torch"
            )
            raise UserError(line, dist.get_rank() != rank)


@contextlib.contextmanager
def _write_errors() -> Iterator[None]:
    """Report a checkpoint that cannot be written."""
    try:
        yield
    except (OSError, CheckpointException, RuntimeError) as error:
        stream = isinstance(error, RuntimeError)
        if stream and "PytorchStreamWriter" not in str(error):
            raise
        folder = get_args().save
        good = latest_iteration(folder)
        rest = f"the last good one is that of iteration {good}"
        if good is None:
            rest = "there is no older one here"
        cause = causes(root(error) if stream else error)
        line = f"--save {folder}: the checkpoint could not be written: {cause}; {rest}"
        # the first rank has the causes
        elsewhere = isinstance(error, CheckpointException) and not error.failures
        raise UserError(line, elsewhere) from error
