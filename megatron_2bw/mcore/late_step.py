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

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

from megatron_2bw.engine.streams import own_stream
from megatron_2bw.engine.updates import LateUpdate
from megatron_2bw.engine.weights import WeightStores
from megatron_2bw.engine.worker import Worker
from megatron_2bw.mcore import cpu
from megatron_2bw.mcore.checkpoints.optimizer_state import is_emerging
from megatron_2bw.mcore.checkpoints.state import RunState
from megatron_2bw.mcore.complete_gradients import CompleteGradients
from megatron_2bw.mcore.correction import Correction
from megatron_2bw.mcore.grad_buffers import GradientSlots, Slot
from megatron_2bw.mcore.host_memory import HostMemory, empty_pages, settle
from megatron_2bw.mcore.loss_scales import LossScales
from megatron_2bw.mcore.options import RunOptions
from megatron_2bw.mcore.proxies import Proxies, thread_local_matmul_precision
from megatron_2bw.mcore.routers import RouterBatch, Routers
from megatron_2bw.mcore.stage import Call
from megatron_2bw.mcore.stage_times import StageStats
from megatron_2bw.mcore.step_groups import Groups
from megatron_2bw.mcore.working_copy import WorkingCopy, own_mains
from megatron_2bw.schedules import Action, Schedule, Shape

# Seconds that the step's thread may hold Python's lock while the training thread wants
# to launch its next kernel.
SWITCH_INTERVAL = 5e-4


@dataclass(frozen=True)
class StepResult:
    """One batch's step, the same on all ranks of a pipeline."""

    batch: int
    # False: an inf or nan was found, or the norm was above --grad-norm-skip-threshold
    stepped: bool
    grad_norm: float | None
    zeros: int | None  # zeros in the gradients, with --log-num-zeros-in-grad
    loss_scale: float  # after the step
    learning_rate: float | None  # after the step
    stages: tuple[StageStats, ...]
    exit_requested: bool  # by any rank of the world
    save_complete: bool  # all ranks have written their parts of a checkpoint
    losses: RouterBatch | None = None  # auxiliary ones, which are summed


@dataclass(frozen=True)
class Job:
    """A batch's step, as the training thread hands it over.

    target      the weight store that it writes
    scale       of the batch's losses
    tokens      unmasked tokens of the batch on this stage, an int tensor of one
                element, with per-token loss
    stats       called in the step's thread
    routers     of a mixture of experts; and the losses of --mtp-num-layers
    correction  of the working copy of W(batch + 1); None if batches without delay read
                W(batch + 1)
    """

    batch: int
    target: int
    slot: Slot
    scale: torch.Tensor
    wants_exit: bool
    routers: RouterBatch | None
    tokens: torch.Tensor | None
    stats: Callable[[], StageStats]
    correction: Correction | None


class LateStep(LateUpdate):
    """The update of one stage.

    schedule    the stage's; one with a late step
    shape       of the pipeline and the run
    stores      the weight versions; the newest must be the ones to start with
    call        of Megatron's schedule function, for its model and process groups
    optimizer   Megatron's optimizer; its `zero_grad` and `get_loss_scale` are answered
                from here from now on, its `step` and `scale_loss` by the runtime
    scheduler   Megatron's OptimizerParamScheduler; stepped here from now on, after each
                batch that was not skipped
    options     of the runtime: timeout, correction, wants_exit
    resume      what the run resumes from
    """

    def __init__(
        self,
        schedule: Schedule,
        shape: Shape,
        stores: WeightStores,
        call: Call,
        optimizer: Any,
        scheduler: Any,
        options: RunOptions,
        resume: RunState,
        *,
        end_batch: Callable[
            [int],
            tuple[torch.Tensor | None, Callable[[], StageStats], Correction | None],
        ],
        complete: Callable[[StepResult], object],
        save_pending: Callable[[], bool | None] | None = None,
    ):
        """Every rank must make one at the same time, for its process groups.

        end_batch     called at each REDUCE; returns the last three fields of the
                      batch's Job
        complete      called in the training thread with each result
        save_pending  whether this rank has written its part of the checkpoint; None, on
                      all ranks, if none is saved
        """
        device = next(call.model.parameters()).device
        parts = list(getattr(optimizer, "chained_optimizers", [optimizer]))
        super().__init__(
            stores,
            Worker("2bw step", device, cpu.answering),
            step=lambda gradients, target: False,
        )
        self._optimizer, self._parts = optimizer, parts
        self.use_shape(shape, call)
        host, experts = options.host, call.config.num_moe_experts is not None
        expert_group = call.model.expt_dp_group if experts else None
        self._groups = Groups(
            call.groups, device, options.timeout, parts, host, expert_group
        )
        counts = experts or call.config.mtp_num_layers
        self.routers = (
            Routers(call.model, call.config, shape.first, resume.shadow)
            if counts
            else None
        )
        shard = schedule.gradient_slots == "shard"
        slots = 2 if shard else schedule.gradient_slots
        self._slots = GradientSlots(
            call.model, slots, self._groups.data, shape.first, shared=host or shard
        )
        correction = options.correction
        mains = (
            own_mains(stores, empty_pages if host else torch.empty_like)
            if host or correction is not None
            else {}
        )
        if host:
            settle(parts)
        self._proxies = Proxies(
            call.model, parts, stores, self._groups.data, mains, host
        )
        slot = self._slots.gradients_of(shape.first)
        self.host = (
            HostMemory(call, stores, slot, mains, correction is None) if host else None
        )
        self.complete = (
            CompleteGradients(call, slot, torch.zeros_like) if shard else self.host
        )
        self._proxies.host = self.host
        self.working: WorkingCopy | None = None
        if correction is not None:
            saved = resume.working if schedule.reads_late(shape.first) else {}
            takes_gradients = correction(shape.microbatches).gradient != 0
            self.working = WorkingCopy(
                parts, stores, self._slots, self._proxies, takes_gradients, saved
            )
        self.scales = LossScales(parts, shape.first, resume.loss_scale)
        self._end_batch, self._report = end_batch, complete
        self._wants_exit, self._save_pending = options.wants_exit, save_pending
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL))
        self.stream = own_stream(device)  # on the CPU a stand-in
        # a step was not skipped, so that all its kernels have run once
        self.has_stepped = False
        # Its first step is compiled, and compiling resets the random generators to
        # their states before it, whatever the training thread has drawn meanwhile.
        self.compiles = any(is_emerging(part.optimizer) for part in parts)
        self._precision = (
            thread_local_matmul_precision if self.compiles else contextlib.nullcontext
        )
        self._attach(optimizer, scheduler)

    def _attach(self, optimizer: Any, scheduler: Any) -> None:
        self._megatron = SimpleNamespace(
            step=type(optimizer).step.__get__(optimizer),
            zero_grad=optimizer.zero_grad,
            schedule=scheduler.step,
        )
        for part in self._parts:
            part.grad_stats_parallel_group = self._groups.twin_of(
                part.get_grad_stats_parallel_group() or torch.distributed.group.WORLD
            )
        for part in {id(part): part for part in (*self._parts, optimizer)}.values():
            # they wait for the whole GPU; the trace shows more
            part.config.timers = None
            if hasattr(part, "start_param_sync_for_bucket_group_subset"):
                part.start_param_sync_for_bucket_group_subset = self._proxies.gather
        # When the training step calls these, another batch's gradients are under way.
        optimizer.zero_grad = lambda set_to_none=True: None
        optimizer.get_loss_scale = lambda: torch.tensor(
            [self.scales.logged], device="cpu"
        )
        scheduler.step = lambda increment: None

    # The training thread calls the following.

    def use_shape(self, shape: Shape, call: Call) -> None:
        """From batch `shape.first` on; no step may be pending."""
        self._shape = shape
        self._increment = (
            shape.microbatches
            * call.micro_batch_size
            * mpu.get_data_parallel_world_size()
        )

    def bind(self, action: Action) -> None:
        """Weights and gradient slot of a microbatch."""
        super().bind(action)
        batch = self._shape.batch(action.microbatch)
        self._slots.bind(batch)
        if self.routers is not None:
            self.routers.bind(action.version, batch)

    def bind_newest(self) -> None:
        super().bind_newest()
        if self.routers is not None:
            self.routers.bind(self.stores.newest)

    def begin_batch(self, action: Action) -> None:
        """The batch's gradients start from zero, its losses have one scale."""
        self._slots.begin_batch(self._shape.batch(action.microbatch))
        if self.complete is not None:
            self.complete.begin_batch()
        self.scales.begin_batch(action.version)

    def defer(self, job: Callable[[], None]) -> Future:
        """Run `job` in the step's thread after the pending step."""
        return self.worker.submit(job)

    def _job(self, action: Action, target: int) -> Callable[[], Any]:
        batch = action.batch
        end, slot = self._end_batch(batch), self._slots.gradients_of(batch)
        if self.complete is not None:
            self.complete.hand_over()
        wants_exit = self._wants_exit is not None and self._wants_exit()
        routers = None if self.routers is None else self.routers.end_batch(batch)
        return partial(
            self.run_job,
            Job(batch, target, slot, self.scales.current, wants_exit, routers, *end),
        )

    def _complete(self, result: tuple[Job, StepResult, torch.Tensor]) -> bool:
        job, outcome, scale = result
        if self.working is not None:
            self.working.in_store = job.correction is not None
        self.scales.complete(job.batch + 1, scale, outcome.loss_scale)
        if self.routers is not None and job.routers is not None:
            self.routers.complete(job.batch, job.routers)
        self.has_stepped |= outcome.stepped
        self._report(outcome)
        return outcome.stepped or self.working is not None

    # The rest runs in the worker's thread.

    def run_job(self, job: Job) -> tuple[Job, StepResult, torch.Tensor]:
        """The step of one batch."""
        proxies, host = self._proxies, self.host
        with torch.no_grad(), contextlib.ExitStack() as on_host:
            views = self.stores.views(job.target) if host is None else host.views
            proxies.point_to(views)
            proxies.use_gradients(self.complete or job.slot)
            if self.routers is not None and job.routers is not None:
                proxies.model.routers = job.routers.modules
                self.routers.reduce_losses(
                    job.routers, self._groups.megatron, self._groups.twin_of
                )
            if self.complete is None:
                job.slot.finish_grad_sync()
            else:
                self.complete.take(job.slot)
            if host is not None:
                on_host.enter_context(host.inside())
            if (
                proxies.model.share_embeddings_and_output_weights
                or proxies.model.config.mtp_num_layers
            ):
                self._groups.align_embedding_ranks()
            proxies.model.config.finalize_model_grads_func(
                [proxies.model],
                job.tokens
                if host is None or job.tokens is None
                else job.tokens.to("cpu"),
                pg_collection=self._groups.megatron,
            )
            stats = job.stats()
            stages = self._groups.gather_over_pipeline(
                [stats.waited, stats.elapsed, stats.memory]
            )
            # before the step: it waits for no rank then
            exit_requested, save_complete = self._ask_all(job.wants_exit)
            with (
                proxies.in_optimizer(job.target),
                self.scales.unscaling_by(job.scale),
                self._precision(),
            ):
                stepped, grad_norm, zeros = self._megatron_step(job, views)
                self._megatron.zero_grad()
            if host is not None:
                host.give(self.stores.views(job.target))
            if stepped:
                self._megatron.schedule(increment=self._increment)
            scale = self.scales.now()
            norm = None if grad_norm is None else float(grad_norm)
            after = (
                float(scale),
                get_canonical_lr_for_logging(self._optimizer.param_groups),
            )
            reports = tuple(StageStats(*stage) for stage in stages)
            known = *after, reports, exit_requested, save_complete, job.routers
            return job, StepResult(job.batch, bool(stepped), norm, zeros, *known), scale

    def _megatron_step(
        self, job: Job, views: list[torch.Tensor]
    ) -> tuple[bool, Any, Any]:
        """Megatron's step, into the job's weight store, whose parameters are
        `views`."""
        if self.working is not None:
            return self.working.step(
                self._megatron.step, views, job.correction or Correction()
            )
        if self.host is None:
            self.stores.prepare(job.target)
        return self._megatron.step()

    def _ask_all(self, wants_exit: bool) -> tuple[bool, bool]:
        """Whether any rank of the world wants to exit, and whether all have written
        their parts of a checkpoint.

        No traffic if no rank can answer.
        """
        written = None if self._save_pending is None else self._save_pending()
        if self._wants_exit is None and written is None:
            return False, False
        exit_requested, unwritten = self._groups.any_rank(wants_exit, not written)
        return exit_requested, written is not None and not unwritten
