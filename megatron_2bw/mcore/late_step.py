"""The late step (docs/design.md, rule 5): Megatron's own optimizer step, overlapping
the next batch.

Between a batch's REDUCE and its STEP, a thread of the stage finishes the data-parallel
reduction, sums the tied embeddings (and layer norms under sequence parallelism),
divides by the token count, unscales, takes the norm over all ranks, clips, steps and
gathers. All of that is Megatron's code, called as it is. This thread waits for other
stages; the training thread continues with the next batch. At STEP everything has
arrived, because stage 0, the last to finish a batch, needs its step first.

Invariants:
- what the thread writes (a free weight store, a full gradient slot, main parameters and
  optimizer state) the training thread does not touch between `reduce` and `wait_step`,
  and the other way round;
- its collectives have process groups of their own, and a batch's are complete before
  the next batch's begin;
- the result of a batch depends on no timing: loss scale and learning rate are chosen by
  the batch's number.
"""

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.training import async_utils
from torch import Tensor

from megatron_2bw.engine.recorder import Marks
from megatron_2bw.engine.updates import BatchStep, PerBatch
from megatron_2bw.engine.weights import WeightStores
from megatron_2bw.mcore.checkpoints.optimizer_state import is_emerging
from megatron_2bw.mcore.checkpoints.state import RunState
from megatron_2bw.mcore.complete_gradients import CompleteGradients
from megatron_2bw.mcore.correction import NO_CORRECTION, Correction
from megatron_2bw.mcore.grad_buffers import (
    GradientSlots,
    LossScales,
    Slot,
)
from megatron_2bw.mcore.host_memory import HostMemory, empty_pages, use_host_kernels
from megatron_2bw.mcore.options import RunOptions
from megatron_2bw.mcore.prediction import Estimate, PredictedCopy
from megatron_2bw.mcore.proxies import Proxies, thread_local_matmul_precision
from megatron_2bw.mcore.rebinding import constant
from megatron_2bw.mcore.routers import RouterBatch, Routers
from megatron_2bw.mcore.stage import Call, MegatronStage
from megatron_2bw.mcore.stage_times import StageClock, StageStats
from megatron_2bw.mcore.step_groups import Groups
from megatron_2bw.mcore.working_copy import WorkingCopy, own_mains
from megatron_2bw.schedules import Schedule

# Seconds that the step's thread may hold Python's lock while the training thread wants
# to launch its next kernel.
SWITCH_INTERVAL = 5e-4


@dataclass(frozen=True)
class StepInput:
    """What a batch leaves to its step; the training thread hands it over.

    target      the weight store that it writes
    slot        the batch's gradients
    scale       of the batch's losses
    routers     of a mixture of experts; and the losses of --mtp-num-layers
    tokens      unmasked tokens of the batch on this stage, an int tensor of one
                element, with per-token loss
    samples     of the batch, on all pipelines
    marks       what the stage has done since the batch before
    wants_exit  whether this rank wants the run to end
    correction  of the working copy of W(batch + 1); NO_CORRECTION if batches without
                delay read W(batch + 1)
    """

    batch: int
    target: int
    slot: Slot
    scale: Tensor
    routers: RouterBatch | None
    tokens: Tensor | None
    samples: int
    marks: Marks
    wants_exit: bool
    correction: Correction


@dataclass(frozen=True)
class StepResult:
    """One batch's step, the same on all ranks of a pipeline but for `scale` and
    `losses`.

    stepped        False: an inf or nan was found, or the norm was above
                   --grad-norm-skip-threshold
    zeros          zeros in the gradients, with --log-num-zeros-in-grad
    scale          the loss scale after the step, as a tensor; loss_scale: as a number
    learning_rate  after the step
    exit_requested by any rank of the world
    save_complete  all ranks have written their parts of a checkpoint
    losses         auxiliary ones, which are summed
    correction     of the working copy in the store
    gradient_scale what the sum of a batch's gradients was multiplied by, for clipping
                   and the token count; None if the step was skipped or nothing is
                   predicted
    """

    batch: int
    stepped: bool
    grad_norm: float | None
    zeros: int | None
    loss_scale: float
    learning_rate: float | None
    stages: tuple[StageStats, ...]
    exit_requested: bool
    save_complete: bool
    losses: RouterBatch | None = None
    scale: Tensor | None = None
    correction: Correction = NO_CORRECTION
    gradient_scale: float | None = None


class LateStep(BatchStep):
    """Megatron's step of one stage, and the owner of all that it needs of each batch.

    What has versions or batches is a `PerBatch`: `_slots` the gradients, `_scales` the
    loss scales, `_routers` what experts count, `_working` the working copy. All are
    told of each bind, begin and completion together.

    schedule    the stage's; one with a late step
    options     of the run: timeout, correction, wants_exit
    resume      what the run resumes from
    stage       the model, which knows the batch's tokens
    clock       of the stage's actions
    stores      the weight versions; the newest must be the ones to start with
    call        of Megatron's schedule function, for its model and process groups
    optimizer   Megatron's optimizer; its `zero_grad` and `get_loss_scale` are answered
                from here from now on, its `step` and `scale_loss` by the runtime
    scheduler   Megatron's OptimizerParamScheduler; stepped here from now on, after each
                batch that was not skipped

    results     of the steps that are complete, for the log
    has_run     a step was not skipped, so that all its kernels have run once
    compiles    the first step is compiled. Compiling resets the random generators to
                their states before it, whatever the training thread has drawn meanwhile
    """

    def __init__(
        self,
        *,
        schedule: Schedule,
        options: RunOptions,
        resume: RunState,
        stage: MegatronStage,
        clock: StageClock,
        stores: WeightStores,
        call: Call,
        optimizer: Any,
        scheduler: Any,
    ):
        """Every rank must make one at the same time, for its process groups."""
        self.results: deque[StepResult] = deque()
        self.has_run = False
        self._schedule = schedule
        self._in_host_memory = schedule.memory == "host"
        self._options = options
        self._stage = stage
        self._clock = clock
        self._stores = stores
        self._optimizer = optimizer
        self._optimizers = getattr(optimizer, "chained_optimizers", [optimizer])
        self._correction = NO_CORRECTION  # of the newest working copy
        self._gradient_scale = resume.gradient_scale  # of the last step
        self.compiles = any(is_emerging(part.optimizer) for part in self._optimizers)
        self._make_parts(call, resume)
        self._take_over(optimizer, scheduler)
        interval = min(sys.getswitchinterval(), SWITCH_INTERVAL)
        sys.setswitchinterval(interval)

    def _make_parts(self, call: Call, resume: RunState) -> None:
        """What has versions or batches; the groups, and what the step works on."""
        options = self._options
        first = self._stores.newest  # the first batch, whose weights are W(first)
        experts = call.config.num_moe_experts is not None
        self._groups = Groups(
            call.groups,
            next(call.model.parameters()).device,
            options.timeout,
            self._optimizers,
            self._in_host_memory,
            call.model.expt_dp_group if experts else None,
        )
        self._has_replicas = any(group.size() > 1 for group in self._groups.data)
        self._routers: Routers | None = None
        if experts or call.config.mtp_num_layers:
            self._routers = Routers(call.model, call.config, first, resume.shadow)
        memory = self._schedule.memory
        self._slots = GradientSlots(
            call.model,
            1 if memory == "one-slot" else 2,
            self._groups.data,
            first,
            shared=memory in ("shard", "host"),
        )
        self._make_proxies(call)
        self._working: WorkingCopy | None = None
        if options.correction is not None:
            correction = options.correction(call.num_microbatches)
            make = PredictedCopy if self._schedule.predicts else WorkingCopy
            self._working = make(
                self._optimizers,
                self._stores,
                self._slots,
                self._proxies,
                takes_gradients=correction.gradient != 0,
                saved=self._saved_copy(resume, first),
            )
        self._scales = LossScales(self._optimizers, first, resume.loss_scale)
        self._per_batch: list[PerBatch] = [self._slots, self._scales]
        for part in (self._complete_gradients, self._routers, self._working):
            if part is not None:
                self._per_batch.append(part)

    def _saved_copy(self, resume: RunState, first: int) -> dict[Tensor, Tensor]:
        """The working copy of W(first) in the checkpoint."""
        if self._schedule.predicts or not self._schedule.reads_late(first):
            return {}
        return resume.working

    def _make_proxies(self, call: Call) -> None:
        """What Megatron's optimizers step, and the gradients that they read."""
        corrects = self._options.correction is not None
        slot = self._slots.gradients_of(self._stores.newest)
        mains: dict[torch.nn.Parameter, Tensor] = {}
        self._host: HostMemory | None = None
        self._complete_gradients: CompleteGradients | None = None
        if self._in_host_memory:
            mains = own_mains(self._stores, empty_pages)
            use_host_kernels(self._optimizers)
            self._host = HostMemory(
                call, self._stores, slot, mains, inside=not corrects
            )
            self._complete_gradients = self._host
        elif corrects:
            mains = own_mains(self._stores)
        if self._schedule.memory == "shard":
            self._complete_gradients = CompleteGradients(call, slot, torch.zeros_like)
        self._proxies = Proxies(
            call.model,
            self._optimizers,
            self._stores,
            self._groups.data,
            mains,
            self._host,
        )

    def _take_over(self, optimizer: Any, scheduler: Any) -> None:
        """Keep Megatron's methods that the step calls, and replace them: when the
        training loop calls them, another batch's gradients are under way."""
        self._megatron = SimpleNamespace(
            step=type(optimizer).step.__get__(optimizer),
            zero_grad=optimizer.zero_grad,
            advance=scheduler.step,
        )
        for part in self._optimizers:
            group = part.get_grad_stats_parallel_group()
            part.grad_stats_parallel_group = self._groups.twin_of(
                group or torch.distributed.group.WORLD
            )
        for part in {*self._optimizers, optimizer}:
            # they wait for the whole GPU; the trace shows more
            part.config.timers = None
            if hasattr(part, "start_param_sync_for_bucket_group_subset"):
                part.start_param_sync_for_bucket_group_subset = self._proxies.gather
        optimizer.zero_grad = constant(None)
        optimizer.get_loss_scale = self._logged_scale
        scheduler.step = constant(None)

    # The training thread calls the following.

    def bind(self, version: int, batch: int | None) -> None:
        for part in self._per_batch:
            part.bind(version, batch)

    def begin_batch(self, batch: int, version: int) -> None:
        for part in self._per_batch:
            part.begin_batch(batch, version)

    def rehearse(self) -> None:
        """Run the kernels of `predict` once, without its result."""
        if self._schedule.predicts and self.has_run:
            estimate = self._estimate(self._stores.newest, done=1.0)
            self._sum_over_replicas(estimate)
            self._working.rehearse(estimate)

    def predict(self, batch: int, done: float) -> Callable[[], None] | None:
        if self._gradient_scale is None:
            return None  # the scale of a gradient is not known yet
        self._correction = self._options.correction(0)
        job = partial(self._predict, self._estimate(batch - 1, done))
        if self._has_replicas:
            return job
        job()
        return None

    def _estimate(self, batch: int, done: float) -> Estimate:
        """The gradient of `batch` by the part of it that is `done`. With replicas it is
        a copy, not yet summed over them."""
        slot = self._slots.gradients_of(batch)
        if self._has_replicas:
            slot = slot.twin(Tensor.clone)
        times: float | Tensor = self._gradient_scale / done
        if self._scales.scales_losses:
            times = times / self._scales.current.squeeze()
        return Estimate(slot, times)

    def _predict(self, estimate: Estimate) -> None:
        self._sum_over_replicas(estimate)
        with self._precision():
            self._working.predict(estimate, self._correction.ahead)

    def _sum_over_replicas(self, estimate: Estimate) -> None:
        if self._has_replicas:
            estimate.slot.reduce()

    def job(self, batch: int, target: int) -> Callable[[], StepResult]:
        ended = self._stage.end_batch(batch)
        correction = NO_CORRECTION
        if self._working is not None and self._schedule.reads_late(batch + 1):
            correction = self._options.correction(ended.next_microbatches)
        self._correction = correction
        if self._complete_gradients is not None:
            self._complete_gradients.end_batch(batch)
        wants_exit = self._options.wants_exit
        step_input = StepInput(
            batch=batch,
            target=target,
            slot=self._slots.end_batch(batch),
            scale=self._scales.end_batch(batch),
            routers=self._routers.end_batch(batch) if self._routers else None,
            tokens=ended.tokens,
            samples=ended.samples,
            marks=self._clock.marks(),
            wants_exit=wants_exit is not None and wants_exit(),
            correction=correction,
        )
        return partial(self.run_job, step_input)

    def complete(self, batch: int, result: StepResult) -> None:
        for part in self._per_batch:
            part.complete(batch, result)
        self.has_run |= result.stepped
        if result.gradient_scale is not None:
            self._gradient_scale = result.gradient_scale
        self.results.append(result)

    def has_stepped(self, result: StepResult) -> bool:
        """With a working copy a skipped step writes the store too."""
        return result.stepped or self._working is not None

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss times the scale of its batch."""
        return self._scales.scale_loss(loss)

    def show_true_weights(self) -> None:
        """Until `show_working_weights`: the store of the newest weights holds W, not
        W'. No step may be pending."""
        if self._working is not None:
            self._working.swap_in_true_weights()

    def show_working_weights(self) -> None:
        """Before a batch."""
        if self._working is not None:
            self._working.restore()

    def state(self, version: int) -> RunState:
        """What the run resumes from; its next batch runs on W(version). No step may be
        pending."""
        stores = self._stores
        shadow = dict(zip(stores.params, stores.values(stores.newest - 1)))
        if self._routers is not None:
            shadow |= self._routers.shadow(stores.newest)
        return RunState(
            shadow=shadow,
            loss_scale=self._scales.at(version),
            working=self._working.values() if self._working is not None else {},
            correction=self._correction or None,
            sync_iterations=self._schedule.sync_iterations,
            gradient_scale=self._gradient_scale,
        )

    def _logged_scale(self) -> Tensor:
        return torch.tensor([self._scales.logged], device="cpu")

    # The rest runs in the step's thread.

    def run_job(self, step_input: StepInput) -> StepResult:
        """The step of one batch."""
        with torch.no_grad(), contextlib.ExitStack() as on_host:
            views = self._stores.views(step_input.target)
            if self._host is not None:
                views = self._host.views
            self._proxies.point_to(views)
            self._reduce(step_input)
            if self._host is not None:
                on_host.enter_context(self._host.inside())
            self._finalize(step_input)
            stages = self._exchange_stats(step_input)
            # before the step: it waits for no rank then
            exit_requested, save_complete = self._ask_all(step_input.wants_exit)
            stepped, norm, zeros = self._step(step_input, views)
            scale = self._scales.now()
            norm = None if norm is None else float(norm)
            return StepResult(
                batch=step_input.batch,
                stepped=bool(stepped),
                grad_norm=norm,
                zeros=zeros,
                loss_scale=float(scale),
                learning_rate=get_canonical_lr_for_logging(
                    self._optimizer.param_groups
                ),
                stages=stages,
                exit_requested=exit_requested,
                save_complete=save_complete,
                losses=step_input.routers,
                scale=scale,
                correction=step_input.correction,
                gradient_scale=self._scale_of(step_input, norm, stepped),
            )

    def _scale_of(
        self, step_input: StepInput, norm: float | None, stepped: bool
    ) -> float | None:
        if not stepped or not self._schedule.predicts:
            return None
        scale = 1.0
        limit = self._optimizer.config.clip_grad
        if norm is not None and limit > 0:
            scale = min(limit / (norm + 1e-6), 1.0)
        if step_input.tokens is not None:
            scale /= max(int(step_input.tokens), 1)
        return scale

    def _reduce(self, step_input: StepInput) -> None:
        """The data-parallel reduction, and the sums of what the routers count."""
        proxies = self._proxies
        proxies.use_gradients(self._complete_gradients or step_input.slot)
        if self._routers is not None:
            proxies.model.routers = step_input.routers.modules
            self._routers.reduce_losses(
                step_input.routers, self._groups.megatron, self._groups.twin_of
            )
        if self._complete_gradients is not None:
            self._complete_gradients.take(step_input.slot)
        else:
            step_input.slot.finish_grad_sync()

    def _finalize(self, step_input: StepInput) -> None:
        """Tied embeddings, layer norms, division by the token count: Megatron's own
        finalize function."""
        model = self._proxies.model
        if model.share_embeddings_and_output_weights or model.config.mtp_num_layers:
            self._groups.align_embedding_ranks()
        tokens = step_input.tokens
        if self._host is not None and tokens is not None:
            tokens = tokens.to("cpu")
        model.config.finalize_model_grads_func(
            [model], tokens, pg_collection=self._groups.megatron
        )

    def _exchange_stats(self, step_input: StepInput) -> tuple[StageStats, ...]:
        own = self._clock.stats(step_input.marks)
        rows = self._groups.gather_over_pipeline([own.waited, own.elapsed, own.memory])
        return tuple(StageStats(*row) for row in rows)

    def _step(
        self, step_input: StepInput, views: Sequence[Tensor]
    ) -> tuple[Any, Any, Any]:
        """Clip, step, copy and gather: Megatron's own step, into the weight
        store, whose parameters are `views`. Returns what Megatron's does."""
        with (
            self._proxies.in_optimizer(step_input.target),
            self._scales.unscaling_by(step_input.scale),
            self._precision(),
        ):
            if self._working is not None:
                step = self._megatron.step
                result = self._working.step(step, views, step_input.correction)
            else:
                if self._host is None:
                    self._stores.prepare(step_input.target)
                result = self._megatron.step()
            self._megatron.zero_grad()
        if self._host is not None:
            self._host.give(self._stores.views(step_input.target))
        if result[0]:
            self._megatron.advance(increment=step_input.samples)
        return result

    def _precision(self) -> contextlib.AbstractContextManager[None]:
        """Inside, this thread has its own precision of fp32 products, which some
        optimizers change."""
        if self.compiles:
            return thread_local_matmul_precision()
        return contextlib.nullcontext()

    def _ask_all(self, wants_exit: bool) -> tuple[bool, bool]:
        """Whether any rank of the world wants to exit, and whether all have written
        their parts of a checkpoint.

        No traffic if no rank can answer.
        """
        written = written_here()
        if self._options.wants_exit is None and written is None:
            return False, False
        exit_requested, unwritten = self._groups.any_rank(wants_exit, not written)
        return exit_requested, written is not None and not unwritten


def written_here() -> bool | None:
    """Whether this rank has written the oldest checkpoint in the queue; None if it is
    empty. Asks no other rank."""
    if async_utils.is_empty_async_queue():
        return None
    call = async_utils._async_calls_queue.async_calls[0]
    written = call.async_caller.is_current_async_call_done(blocking=False, no_dist=True)
    if written and hasattr(call.async_caller, "cur_item"):
        # a persistent worker reports it only once, and Megatron asks again
        call.async_caller.cur_item = call.idx
    return written
