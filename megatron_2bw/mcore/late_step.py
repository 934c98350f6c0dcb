"""The late step (design, rule 5): Megatron's own optimizer, run beside the pipeline.

Between a batch's REDUCE and its STEP, a thread of the stage finishes the data-parallel reduction, sums the tied
embeddings (and layer norms under sequence parallelism), divides by the token count, unscales, takes the norm over all
ranks, clips, steps and gathers. All of that is Megatron's code, called as it is: what waits for other stages is this
thread, and the training thread goes on with the next batch. At STEP everything has arrived, because stage 0, the last
to finish a batch, needs its step first.

Invariants:
- what the thread writes (a free weight store, a full gradient slot, main parameters and optimizer state) the training
  thread does not touch between `start` and `settle`, and the other way round;
- its collectives have process groups of their own, and a batch's are over before the next batch's begin;
- the result of a batch depends on no timing: loss scale and learning rate are chosen by the batch's number.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

from megatron_2bw.checkpoints.optimizer_state import is_emerging
from megatron_2bw.core.weights import WeightStores
from megatron_2bw.core.worker import Worker
from megatron_2bw.mcore.extrapolation import Extrapolation
from megatron_2bw.mcore.grad_buffers import GradientSlots, Slot, use_group
from megatron_2bw.mcore.proxies import (
    BatchScaler,
    StandInModel,
    lists_of_parameters,
    own_matmul_precision,
    own_shards,
    rename_keys,
    shards_of_stand_ins,
    stand_in_of,
)

# Seconds that the step's thread may hold Python's lock while the training thread wants to launch its next kernel.
SWITCH_INTERVAL = 5e-4


@dataclass(frozen=True)
class StageReport:
    """What one stage has to say about the time since its last report."""

    waited: float  # seconds that it could not go on
    elapsed: float  # seconds
    memory: float  # peak bytes so far


@dataclass(frozen=True)
class Outcome:
    """One batch's step, the same on all ranks of a pipeline."""

    batch: int
    stepped: bool  # False: an inf or nan was found, or the norm was above --grad-norm-skip-threshold
    grad_norm: float | None
    zeros: int | None  # zeros in the gradients, with --log-num-zeros-in-grad
    loss_scale: float  # after the step
    learning_rate: float | None  # after the step
    stages: tuple[StageReport, ...]
    alarm: bool  # see `LateStep`
    written: bool  # likewise


@dataclass(frozen=True)
class _Pending:
    """A step that is being made: W(batch + 1), in the weight store `target`, or its working copy."""

    batch: int
    target: int
    extrapolated: bool
    future: Future


class Groups:
    """Process groups of the late step's own, with the ranks of Megatron's.

    The small ones travel over gloo in the background, which costs no kernel that would wait on the GPU for another
    stage. Every rank must make them, at the same time.
    """

    def __init__(
        self,
        megatron: Any,
        statistics: dist.ProcessGroup | None,
        device: torch.device,
        timeout: timedelta | None,
        parts: Sequence[Any] = (),
    ):
        def twin(group: dist.ProcessGroup | None, name: str, backend: str | None = None) -> dist.ProcessGroup:
            # torch names a group by a counter that must agree on its members, so each rank makes equally many.
            ranks = [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
            return dist.new_group(
                ranks, backend=backend, timeout=timeout, use_local_synchronization=True, group_desc=f"2bw {name}"
            )

        self.world = twin(dist.group.WORLD, "world", "gloo")
        self.statistics = twin(statistics or dist.group.WORLD, "statistics", "gloo")
        self.data = twin(megatron.dp_cp, "data")
        self.embedding = twin(megatron.embd, "embedding")
        for group in (self.data, self.embedding):
            # NCCL builds its communicator at the first use: here, where every rank is, and not beside training.
            dist.all_reduce(torch.zeros(1, device=device), group=group)
        self.embedding_meeting = twin(megatron.embd, "embedding meeting", "gloo")
        # What Megatron's finalize function is given.
        self.megatron = copy.copy(megatron)
        self.megatron.pp = twin(megatron.pp, "pipeline", "gloo")
        self.megatron.tp = twin(megatron.tp, "tensor", "gloo")
        self.megatron.dp_cp = self.data
        self.megatron.embd = self.embedding if megatron.embd is not None else None
        position = twin(megatron.pos_embd, "position embedding")
        self.megatron.pos_embd = position if megatron.pos_embd is not None else None
        for part in parts:
            # Muon orthogonalises a matrix that the tensor-parallel ranks share; every stage has such a part, or none.
            if getattr(part.optimizer, "pg_collection", None) is not None:
                part.optimizer.pg_collection = copy.copy(part.optimizer.pg_collection)
                part.optimizer.pg_collection.tp = tensor = twin(megatron.tp, "matrices")
                dist.all_reduce(torch.zeros(1, device=device), group=tensor)

    def meet_for_the_embedding(self) -> None:
        """Both ends of the tied embedding come to their sum at one time: on NCCL a waiting sum occupies the GPU."""
        if dist.get_backend(self.embedding) == "nccl" and self.embedding_meeting.size() > 1:
            dist.barrier(group=self.embedding_meeting)


class LateStep:
    """Steps of one stage.

    ddp        the model chunk in Megatron's DistributedDataParallel
    optimizer  Megatron's optimizer; its `zero_grad` and `get_loss_scale` are answered from here from now on, its `step`
               and `scale_loss` by the runtime
    scheduler  Megatron's OptimizerParamScheduler; stepped here from now on, after each batch that was not skipped
    stores     the weight versions; the newest must be the ones to start with
    slots      gradient slots, 1 or 2
    increment  samples of a batch, by which the scheduler advances
    groups     Megatron's ProcessGroupCollection
    first      the first batch
    alarm      asked at each REDUCE; the Outcome tells whether any rank of the world said yes
    loss_scale of the first batch, if it is not the scaler's present one
    saving     whether this rank has written its part of the checkpoint that is on its way; None if none is, on all
               ranks alike. The Outcome tells whether all ranks have written theirs.
    factor     of --two-bw-correction extrapolate; None without it
    working    the first version's working copy, by parameter; empty: the stores hold the true weights
    """

    def __init__(
        self,
        ddp: Any,
        optimizer: Any,
        scheduler: Any,
        stores: WeightStores,
        *,
        slots: int,
        increment: int,
        groups: Any,
        first: int,
        timeout: timedelta | None = None,
        alarm: Callable[[], bool] | None = None,
        loss_scale: float | None = None,
        saving: Callable[[], bool | None] | None = None,
        factor: float | None = None,
        working: Mapping[torch.nn.Parameter, torch.Tensor] | None = None,
    ):
        self._parts = list(getattr(optimizer, "chained_optimizers", [optimizer]))
        self._optimizer, self._stores = optimizer, stores
        self._increment, self._alarm, self._saving = increment, alarm, saving
        self._device = stores.params[0].device
        statistics = self._parts[0].get_grad_stats_parallel_group()
        self._groups = Groups(groups, statistics, self._device, timeout, self._parts)
        self._slots = GradientSlots(ddp, slots, self._groups.data, first)
        for part in self._parts:
            own_shards(part)
        self._gathering = _Gathering(ddp, self._groups.data)
        self._stand_ins = {param: stand_in_of(param) for param in stores.params}
        self._places = [
            (places, index)
            for part in self._parts
            for places in lists_of_parameters(part)
            for index, param in enumerate(places)
            if isinstance(param, torch.nn.Parameter) and param in self._stand_ins
        ]
        self._model = StandInModel(ddp, self._stand_ins)
        self._worker = Worker("2bw step", self._device)
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL))
        self._stream = torch.cuda.Stream(device=self._device)
        self._pending: _Pending | None = None
        self.has_stepped = False  # a step was made and not skipped, so that all its kernels have run once
        # Its first step is compiled, and compiling sets the random generators back to where they stood before it,
        # whatever the training thread has drawn meanwhile.
        self.compiles = any(is_emerging(part.optimizer) for part in self._parts)
        self._precision = own_matmul_precision if self.compiles else contextlib.nullcontext
        # A batch is scaled as the step left it that made its weights: the newest that is over wherever it begins.
        scale = self._current_scale().clone()
        shadow = scale if loss_scale is None else torch.full_like(scale, loss_scale)
        self._scales = {first - 1: shadow, first: scale}  # by weight version
        self._loss_scale, self._logged_scale = scale, float(scale)
        self._take_over(optimizer, scheduler)
        self._correction = None if factor is None else Extrapolation(self._parts, stores, factor)
        self._extrapolated = bool(working)  # the newest version's store holds its working copy
        self._parked: list[torch.Tensor] | None = None  # that copy, while the store shows the true weights
        for param, view in zip(stores.params, stores.values(stores.newest) if working else ()):
            view.copy_(working[param])

    def _take_over(self, optimizer: Any, scheduler: Any) -> None:
        self._megatron = SimpleNamespace(
            step=type(optimizer).step.__get__(optimizer), zero_grad=optimizer.zero_grad, schedule=scheduler.step
        )
        for part in {id(part): part for part in (*self._parts, optimizer)}.values():
            part.grad_stats_parallel_group = self._groups.statistics
            part.config.timers = None  # they wait for the whole GPU; the trace tells more
            if hasattr(part, "start_param_sync_for_bucket_group_subset"):
                part.start_param_sync_for_bucket_group_subset = self._gathering.gather
        # Between the training step's calls of these, another batch's gradients are on their way.
        optimizer.zero_grad = lambda set_to_none=True: None
        optimizer.get_loss_scale = lambda: torch.tensor([self._logged_scale], device="cpu")
        scheduler.step = lambda increment: None

    @property
    def pending(self) -> int | None:
        """The batch whose step has been started and not settled."""
        return None if self._pending is None else self._pending.batch

    # The training thread calls the following.

    def bind(self, batch: int) -> None:
        """Before a forward or a backward of `batch`: its gradients go to its slot."""
        self._slots.bind(batch)

    def open(self, batch: int, version: int) -> None:
        """Before the first backward of `batch`, which runs on W(version).

        Its gradients start from zero, its losses have one scale.
        """
        self._slots.open(batch)
        self._scales = {other: scale for other, scale in self._scales.items() if other >= version}
        self._loss_scale = self._scales[version]

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """A loss of the batch that `open` was last called for, times its loss scale."""
        return self._loss_scale * loss

    def loss_scale(self, version: int) -> float:
        """The loss scale of a batch that runs on W(version), the newest or the one before; no step may be pending."""
        return float(self._scales[version])

    def start(
        self,
        batch: int,
        needed: set[int],
        tokens: torch.Tensor | None,
        report: Callable[[], StageReport],
        extrapolate: bool,
    ) -> None:
        """After the last backward of `batch`: start its reduction and step.

        needed  weight versions that microbatches in flight, or forwards before the step is settled, read
        tokens  unmasked tokens of the batch on this stage, an int tensor of one element, with per-token loss
        report  called in the step's thread
        extrapolate  whether the correction, if there is one, applies to W(batch + 1)
        """
        assert self._pending is None, f"batch {self.pending} is not settled"
        target, slot = self._stores.reserve(needed), self._slots.filled(batch)
        alarm = self._alarm is not None and self._alarm()
        ready = torch.cuda.Event()
        ready.record()
        extrapolate = extrapolate and self._correction is not None
        job = partial(self._update, batch, target, slot, tokens, self._loss_scale, report, alarm, extrapolate, ready)
        self._pending = _Pending(batch, target, extrapolate, self._worker.submit(job))

    def settle(self) -> Outcome:
        """Wait until the step of the pending batch is made; W(batch + 1) is there then."""
        pending = self._pending
        outcome, scale, done = pending.future.result()
        self._pending = None
        torch.cuda.current_stream().wait_event(done)
        self._stores.commit(pending.target, outcome.stepped or self._correction is not None)
        self._extrapolated = pending.extrapolated
        self._scales[pending.batch + 1] = scale
        self._logged_scale = outcome.loss_scale
        self.has_stepped |= outcome.stepped
        return outcome

    def reveal(self) -> None:
        """Show the true W(newest) in its store, until `cover`. Between batches, when no step is pending.

        The working copy is kept in the memory of the gradients, which nobody needs then.
        """
        if not self._extrapolated or self._parked is not None:
            return
        version = self._stores.newest
        views, target = self._stores.values(version), self._stores.slot(version)
        with torch.no_grad():
            self._parked = self._slots.park(self._stores.params, views)
            self._point_stand_ins(views)
            with self._parameters_replaced(target):
                self._write_true(views)

    def cover(self) -> None:
        """Undo `reveal`, before the next batch."""
        if self._parked is not None:
            for view, copy in zip(self._stores.values(self._stores.newest), self._parked):
                view.copy_(copy)
            self._parked = None

    def working(self) -> dict[torch.nn.Parameter, torch.Tensor]:
        """The newest version's working copy, by parameter; after `reveal`. Empty without a correction.

        Where nothing is extrapolated yet it equals the true weights: all checkpoints of a run have the same entries.
        """
        if self._correction is None:
            return {}
        copies = self._stores.values(self._stores.newest) if self._parked is None else self._parked
        return dict(zip(self._stores.params, copies))

    def defer(self, job: Callable[[], None]) -> Future:
        """Run `job` in the step's thread once the step that is being made is over."""
        return self._worker.submit(job)

    # The rest runs in the worker's thread.

    def _update(
        self,
        batch: int,
        target: int,
        slot: Slot,
        tokens: torch.Tensor | None,
        scale: torch.Tensor,
        report: Callable[[], StageReport],
        alarm: bool,
        extrapolate: bool,
        ready: torch.cuda.Event,
    ) -> tuple[Outcome, torch.Tensor, torch.cuda.Event]:
        with torch.no_grad(), torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            views = self._stores.views(target)
            self._point_stand_ins(views)
            for param, stand_in in self._stand_ins.items():
                stand_in.main_grad = slot.main_grads[param]
            slot.finish_grad_sync()
            if self._model.share_embeddings_and_output_weights:
                self._groups.meet_for_the_embedding()
            self._model.scale_gradients = slot.scale_gradients
            self._model.config.finalize_model_grads_func([self._model], tokens, pg_collection=self._groups.megatron)
            stages = self._exchange(report())
            alarm, written = self._ask_all(alarm)  # before the step: it waits for nobody then
            with self._parameters_replaced(target), self._scaled_by(scale), self._precision():
                stepped, grad_norm, zeros = self._step(target, views, extrapolate)
                self._megatron.zero_grad()
            if stepped:
                self._megatron.schedule(increment=self._increment)
            scale = self._current_scale().clone()
            outcome = Outcome(
                batch,
                bool(stepped),
                None if grad_norm is None else float(grad_norm),
                zeros,
                float(scale),
                get_canonical_lr_for_logging(self._optimizer.param_groups),
                stages,
                alarm,
                written,
            )
            done = torch.cuda.Event()
            done.record()
        return outcome, scale, done

    def _point_stand_ins(self, views: Sequence[torch.Tensor]) -> None:
        """Let the stand-ins be parameters in a weight store, or their main parameters if a correction has made some."""
        main = {} if self._correction is None else self._correction.main
        for param, view in zip(self._stores.params, views):
            self._stand_ins[param].data = main.get(param, view)

    def _step(self, target: int, views: Sequence[torch.Tensor], extrapolate: bool) -> tuple[bool, Any, Any]:
        """Megatron's step, into the weight store `target`, whose parameters are `views`."""
        if self._correction is None:
            self._stores.prepare(target)
            return self._megatron.step()
        self._correction.before_step(views, extrapolate)
        result = self._megatron.step()
        if result[0]:
            self._correction.after_step(views)
        else:
            self._write_true(views)
        return result

    def _write_true(self, views: Sequence[torch.Tensor]) -> None:
        self._correction.write_true(views)
        if self._stores.buffer_data:
            self._gathering.gather()

    def _current_scale(self) -> torch.Tensor:
        part = self._parts[0]
        return type(part).get_loss_scale(part)

    def _exchange(self, report: StageReport) -> tuple[StageReport, ...]:
        """The reports of all stages of the pipeline, first to last."""
        group = self._groups.megatron.pp
        own = torch.tensor([report.waited, report.elapsed, report.memory], dtype=torch.float64, device="cpu")
        all_stages = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(all_stages, own, group=group)
        return tuple(StageReport(*stage.tolist()) for stage in all_stages)

    def _ask_all(self, alarm: bool) -> tuple[bool, bool]:
        """Whether any rank of the world gives alarm, and whether all have written their parts of a checkpoint.

        No traffic if nobody can answer.
        """
        here = None if self._saving is None else self._saving()
        if self._alarm is None and here is None:
            return False, False
        values = torch.tensor([int(alarm), int(not here)], device="cpu")
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._groups.world)
        return bool(values[0]), here is not None and not values[1]

    @contextlib.contextmanager
    def _parameters_replaced(self, target: int) -> Iterator[None]:
        """Show Megatron's optimizer stand-ins for the parameters, whose own pointers belong to the training thread.

        A stand-in's data lies in the weight store that is written, its main_grad in the full gradient slot.
        """
        states = [part.optimizer.state for part in self._parts if part.optimizer is not None]
        originals = [places[index] for places, index in self._places]
        with contextlib.ExitStack() as undo:
            for part in self._parts:
                if hasattr(part, "model_param_gbuf_map"):
                    undo.enter_context(shards_of_stand_ins(part, self._stand_ins))
            if self._stores.buffer_data:
                self._gathering.point_to(self._stores.buffer_data[target])
            for (places, index), param in zip(self._places, originals):
                places[index] = self._stand_ins[param]
            rename_keys(states, self._stand_ins)
            try:
                yield
            finally:
                rename_keys(states, {stand_in: param for param, stand_in in self._stand_ins.items()})
                for (places, index), param in zip(self._places, originals):
                    places[index] = param

    @contextlib.contextmanager
    def _scaled_by(self, scale: torch.Tensor) -> Iterator[None]:
        """Unscale with the scale of the batch, whatever the scaler's is by now (design, rule 7)."""
        scalers = [getattr(part, "grad_scaler", None) for part in self._parts]
        for part, scaler in zip(self._parts, scalers):
            if scaler is not None:
                part.grad_scaler = BatchScaler(scaler, scale)
        try:
            yield
        finally:
            for part, scaler in zip(self._parts, scalers):
                if scaler is not None:
                    part.grad_scaler = scaler


class _Gathering:
    """The distributed optimizer's parameter buffers, as they are written and gathered into a weight store."""

    def __init__(self, ddp: Any, group: dist.ProcessGroup):
        self._ddp, self._buffers = ddp, list(ddp.buffers)
        self._groups = [copy.copy(bucket_group) for bucket_group in ddp.bucket_groups]
        for bucket_group in self._groups:
            use_group(bucket_group, group)

    def point_to(self, data: list[torch.Tensor]) -> None:
        """Let the optimizer write its shards to `data`, one flat tensor a buffer."""
        for buffer, flat in zip(self._buffers, data):
            for bucket in buffer.buckets:
                bucket.param_data = flat[bucket.offset : bucket.offset + bucket.param_data.numel()]
        for bucket_group in self._groups:
            bucket_group.cached_param_buffer_shard_list = [None] * len(bucket_group.buckets)

    def gather(self) -> None:
        for bucket_group in self._groups:
            self._ddp._start_bucket_group_param_sync(bucket_group, force_sync=True)
