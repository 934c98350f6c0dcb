"""Executes a schedule's actions on Megatron's own forward and backward steps.

Invariants: this object is the only owner of what crosses iterations (microbatches in flight, messages received
ahead, losses and token counts of batches that are not finished); outside of it the parameters are bound to the
newest finished weights; the actions are executed in the order of the schedule's list, and there is no other loop.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.pipeline_parallel import schedules as megatron_schedules
from megatron.core.utils import get_model_config
from megatron.training import print_rank_0

from megatron_2bw.core.p2p import Exchange, connect
from megatron_2bw.core.weights import WeightStores
from megatron_2bw.mcore.extrapolation import going_on
from megatron_2bw.mcore.late_step import LateStep, StageReport
from megatron_2bw.mcore.log_lines import LateLogbook, Logbook, PromptLogbook, Spent
from megatron_2bw.mcore.rng_state import RandomState
from megatron_2bw.schedules import REDUCE, STEP, Action, B, F, Schedule, Shape
from megatron_2bw.timelines.trace import Recorder, TraceWriter

# Iterations in which kernels are compiled, tuned and loaded at their first use, which may wait for the whole GPU.
WARM_UP = 2


@dataclass
class InFlight:
    """A microbatch between its forward and its backward on this stage."""

    microbatch: int
    version: int
    input: torch.Tensor | None
    output: torch.Tensor


@dataclass
class Progress:
    """Where the training loop stands: the iteration that runs now, and the one after the last planned."""

    iteration: int
    end: int


@dataclass
class Call:
    """The arguments of one call of the schedule that the actions need."""

    forward_step_func: Callable
    data_iterator: Any
    model: torch.nn.Module
    config: Any
    groups: Any  # Megatron's ProcessGroupCollection
    force_all_reduce: bool


@dataclass
class Batch:
    """What the finished microbatches of one batch have left behind on this stage."""

    losses: list = field(default_factory=list)
    tokens: torch.Tensor | int = 0


@dataclass(frozen=True)
class Resume:
    """Where a run goes on that was saved, beside what Megatron loads by itself.

    shadow      the weights one update older than the newest, W(iteration - 1), by parameter; empty: take the newest
    loss_scale  of the first batch, as it belongs to those weights; None: the present one
    working     the working copy of the newest weights, with --two-bw-correction; empty: take the newest
    factor      that these copies were extrapolated with; None: they were not
    """

    shadow: dict[torch.nn.Parameter, torch.Tensor] = field(default_factory=dict)
    loss_scale: float | None = None
    working: dict[torch.nn.Parameter, torch.Tensor] = field(default_factory=dict)
    factor: float | None = None


class PipelineRuntime:
    """Runs one stage.

    schedule   what to do when
    progress   reads the training loop's position
    transport  see `communication.connect`
    timeout    likewise
    timed      whether Megatron's timers synchronise with the GPU inside forwards and backwards
    trace      the folder of --two-bw-trace
    alarm      whether this rank wants the run to end (a signal, its duration); asked once an iteration
    factor     of --two-bw-correction extrapolate; None without it
    """

    def __init__(
        self,
        schedule: Schedule,
        progress: Callable[[], Progress],
        transport: str = "auto",
        timeout: timedelta | None = None,
        timed: bool = False,
        trace: Path | None = None,
        alarm: Callable[[], bool] | None = None,
        factor: float | None = None,
    ):
        self.schedule, self.progress = schedule, progress
        self.transport, self.timeout, self.timed = transport, timeout, timed
        self.stores: WeightStores | None = None
        self.late: LateStep | None = None
        self.logbook: Logbook | None = None
        self.in_flight: deque[InFlight] = deque()
        self._batches: dict[int, Batch] = defaultdict(Batch)
        self._shape: Shape | None = None
        self._stage = 0
        self._exchange = Exchange()
        self._step: Action | None = None  # the step that Megatron's optimizer call has to execute next
        self._resume: Resume | None = None
        self._random: RandomState | None = None  # before the forwards that are in flight between iterations
        self._scheduler: Any = None
        self._params: list[torch.nn.Parameter] = []
        self._trace, self._alarm, self._factor = trace, alarm, factor
        self.saving: Callable[[], bool | None] | None = None  # see `LateStep`; given before the first iteration
        self.written = False  # all ranks have written a checkpoint, as all know by the same iteration
        self.alarmed = False  # a rank's alarm has gone off, as all ranks know by the same iteration
        self._writer: TraceWriter | None = None

    # Megatron calls the following.

    def adopt(self, model: list[torch.nn.Module], optimizer) -> None:
        """Take over the stage's weights and the optimizer's step. Called once, before a checkpoint is loaded."""
        self._optimizer, self._megatron_step = optimizer, optimizer.step
        optimizer.step = self.step
        if self.schedule.late_step:  # the training loop takes the method before the first iteration
            optimizer.scale_loss = lambda loss: self.late.scale_loss(loss)
        self._params = [param for chunk in model for param in chunk.parameters() if param.requires_grad]
        if not self.schedule.global_step:
            # Its stages step at different times, so norm and inf flag can span the tensor-parallel ranks only.
            for part in getattr(optimizer, "chained_optimizers", [optimizer]):
                part.grad_stats_parallel_group = mpu.get_tensor_model_parallel_group()
            print_rank_0(
                f"> {self.schedule.name}: gradient norm, clipping and inf check are per stage; "
                "the logged grad norm is the largest stage's"
            )

    def adopt_scheduler(self, scheduler) -> None:
        """Take over the scheduler of learning rate and weight decay."""
        self._scheduler = scheduler

    def forward_backward(
        self,
        *,
        forward_step_func,
        data_iterator,
        model,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable | None = None,
        p2p_communicator=None,
        pg_collection=None,
        force_all_reduce: bool | None = False,
    ) -> list[dict[str, torch.Tensor]]:
        """One training iteration, with the signature of Megatron's schedules. Evaluation is Megatron's own.

        Returns the loss reports of the batch, one a microbatch, on the last stage; an empty list elsewhere.
        """
        if forward_only:
            self.finish()
            return megatron_schedules.get_forward_backward_func()(
                forward_step_func=forward_step_func,
                data_iterator=data_iterator,
                model=model,
                num_microbatches=num_microbatches,
                seq_length=seq_length,
                micro_batch_size=micro_batch_size,
                decoder_seq_length=decoder_seq_length,
                forward_only=True,
                collect_non_loss_data=collect_non_loss_data,
                first_val_step=first_val_step,
                adjust_tensor_shapes_fn=adjust_tensor_shapes_fn,
                p2p_communicator=p2p_communicator,
                pg_collection=pg_collection,
            )
        (model,) = model if isinstance(model, list) else [model]
        config = get_model_config(model)
        _refuse(
            adjust_tensor_shapes_fn=adjust_tensor_shapes_fn,
            p2p_communicator=p2p_communicator,
            variable_seq_lengths=config.variable_seq_lengths,
            num_microbatches_with_partial_activation_checkpoints=(
                config.num_microbatches_with_partial_activation_checkpoints
            ),
        )
        call = Call(
            forward_step_func,
            data_iterator,
            model,
            config,
            pg_collection or megatron_schedules._build_default_pg_collection(),
            bool(force_all_reduce),
        )
        progress = self.progress()
        self._start(call, progress, num_microbatches, micro_batch_size)
        buffer = partial(self._new_message, call, seq_length, micro_batch_size, decoder_seq_length)
        return self._run_iteration(call, progress.iteration, buffer)

    def step(self):
        """Stands in for the optimizer's `step`: executes the schedule's STEP action; returns what Megatron's does.

        With a late step there is nothing to do here, and what Megatron is told (a step was made) is corrected when
        the line is logged.
        """
        if self.late is not None:
            return True, None, None
        action, self._step = self._step, None
        if action is None:
            raise RuntimeError("the optimizer's step was called without an iteration of the schedule before it")
        asked = self._recorder.mark()
        if self.stores is None:
            result = self._megatron_step()
        else:
            with self.stores.writing(self._versions_still_read(action)) as write:
                result = self._megatron_step()
                write.stepped = bool(result[0])
        self._recorder.add(action, asked, asked, self._recorder.mark())
        return result

    def settle(self) -> None:
        """Finish a step that is still being made, and log what waits for it."""
        if self.late is not None and self.late.pending is not None:
            self._settle()
            self.stores.bind_newest()
        if self.logbook is not None:
            self.logbook.flush()

    def finish(self) -> None:
        """Finish a step that is still being made, and show the newest true weights until the next iteration."""
        self.settle()
        if self.late is not None:
            self.late.reveal()

    # Checkpoints (checkpoint.py) ask and tell the following, between iterations.

    def shadow(self) -> dict[torch.nn.Parameter, torch.Tensor]:
        """The weights that are one update older than the newest, by parameter; empty if the schedule has none."""
        if not self.schedule.late_step:
            return {}
        if self.stores is None:
            return self._resume.shadow if self._resume is not None else {}
        return dict(zip(self.stores.params, self.stores.values(self.stores.newest - 1)))

    def working(self) -> dict[torch.nn.Parameter, torch.Tensor]:
        """The working copy of the newest weights, by parameter; empty if it is the weights themselves."""
        if self.late is None:
            return self._resume.working if self._resume is not None else {}
        return self.late.working()

    def loss_scale(self) -> float | None:
        """The loss scale of the next batch, where it is not that of Megatron's optimizer."""
        if self.late is None:
            return self._resume.loss_scale if self._resume is not None else None
        next_batch = self.stores.newest * self._shape.microbatches
        return self.late.loss_scale(self.schedule.version(self._shape, self._stage, next_batch))

    @contextlib.contextmanager
    def random_state_before_flight(self) -> Iterator[None]:
        """Inside, the generators stand where they stood before the microbatches in flight drew from them."""
        if self._random is None:
            yield
            return
        now = RandomState.now()
        self._random.restore()
        try:
            yield
        finally:
            now.restore()

    def resume(self, resume: Resume) -> None:
        """Start from a checkpoint that has been loaded; called before the first iteration."""
        self._resume = resume

    @property
    def factor(self) -> float | None:
        """That of --two-bw-correction extrapolate; None without it."""
        return self._factor

    @property
    def trainable(self) -> list[torch.nn.Parameter]:
        """The stage's trainable parameters."""
        return self._params

    # The rest is this stage's work.

    def _versions_still_read(self, step: Action) -> set[int]:
        """Versions that microbatches in flight, or forwards of the next iteration, read after `step`."""
        to_come = self.schedule.actions(self._shape, self._stage, step.microbatch + 1)
        named = {action.version for action in to_come if action.kind == F and action.version < step.version}
        return named | {flight.version for flight in self.in_flight}

    def _start(self, call: Call, progress: Progress, microbatches: int, micro_batch_size: int) -> None:
        """On the first iteration: learn the pipeline's shape, connect to the neighbours, make the stores."""
        if self._shape is None:
            ranks = torch.distributed.get_process_group_ranks(call.groups.pp)
            device = self._params[0].device
            self._stage = call.groups.pp.rank()
            self._shape = Shape(len(ranks), microbatches, progress.iteration, progress.end)
            self._exchange = connect(ranks, torch.distributed.get_rank(), self.transport, device, self.timeout)
            for outbox, sender in (
                (self._exchange.activations_out, self._stage),
                (self._exchange.gradients_out, self._stage - 1),
            ):
                if outbox is not None:
                    outbox.limit = self.schedule.max_in_flight(self._shape, sender) + 1
            for inbox, boundary in (
                (self._exchange.activations_in, self._stage - 1),
                (self._exchange.gradients_in, self._stage),
            ):
                if inbox is not None:
                    before, after = (self.schedule.ahead(self._shape, boundary + side) for side in (0, 1))
                    inbox.depth = max(before - after, 1)
            self._recorder = Recorder(device)
            if self._trace is not None and mpu.get_tensor_model_parallel_rank() == 0:
                self._writer = TraceWriter(self._trace, self._stage, call.groups.dp_cp.rank())
            if not self.schedule.flushes:
                self._make_stores(call, progress)
            if self.schedule.late_step:
                self._make_late_step(call, progress, microbatches * micro_batch_size)
            else:
                self.logbook = PromptLogbook(self._spent, ranks, self.timeout)
            self._resume = None  # its tensors are copied
        elif microbatches != self._shape.microbatches:
            raise RuntimeError(
                f"--pipeline-schedule {self.schedule.name} cannot change the number of microbatches during a run "
                f"({self._shape.microbatches} to {microbatches})"
            )

    def _make_stores(self, call: Call, progress: Progress) -> None:
        ddp = call.model
        buffers = ddp.buffers if ddp.ddp_config.use_distributed_optimizer else ()
        self.stores = WeightStores(self._params, self.schedule.max_versions(self._shape, self._stage), buffers)
        resume = self._resume or Resume()
        shadow = resume.shadow if self.schedule.late_step else {}
        self.stores.start(progress.iteration, [shadow[param] for param in self._params] if shadow else None)
        if progress.iteration > 0:
            versions = "both weight versions of the checkpoint" if shadow else "the loaded weights as every version"
            if self.schedule.extrapolates(progress.iteration):
                versions += going_on(resume.factor, self._factor)
            print_rank_0(f"> {self.schedule.name}: starts from iteration {progress.iteration} with {versions}")

    def _make_late_step(self, call: Call, progress: Progress, samples: int) -> None:
        working = None
        if self._resume is not None and self.schedule.extrapolates(progress.iteration):
            working = self._resume.working
        synchronous = min(self.schedule.sync_iterations, progress.end)
        if progress.iteration < synchronous:
            print_rank_0(
                f"> {self.schedule.name}: iterations {progress.iteration + 1} to {synchronous} run without gradient "
                "delay"
            )
        self.late = LateStep(
            call.model,
            self._optimizer,
            self._scheduler,
            self.stores,
            slots=self.schedule.gradient_slots,
            increment=samples * mpu.get_data_parallel_world_size(),
            groups=call.groups,
            first=progress.iteration,
            timeout=self.timeout,
            alarm=self._alarm,
            loss_scale=self.loss_scale(),
            saving=self.saving,
            factor=self._factor,
            working=working,
        )
        self.logbook = LateLogbook()

    def _run_iteration(self, call: Call, iteration: int, new_message: Callable[[], torch.Tensor]) -> list:
        actions = self.schedule.actions(self._shape, self._stage, iteration)
        if call.config.timers is not None:  # before a receive is posted: a timer waits for the whole GPU
            call.config.timers("forward-backward", log_level=1).start()
        if self.late is not None:
            self.late.cover()
        self._announce(iteration, new_message)
        backwards = [action for action in actions if action.kind == B]
        self._random = None
        with _GradSync(call) as grad_sync:
            for action in actions:
                if action.kind == F and self._random is None and self._shape.batch(action.microbatch) > iteration:
                    self._random = RandomState.now()
                if action == backwards[0]:
                    if self.late is not None:
                        self.late.open(iteration, action.version)
                    grad_sync.hold()
                if action == backwards[-1]:
                    grad_sync.before_last_backward(first_stage=self._stage == 0)
                if action.kind == REDUCE:
                    grad_sync.after_last_backward()
                self._execute(action, call)
        if self.late is not None and self.late.pending is not None and not self._is_warm(iteration):
            self._settle()
        if self.stores is not None:
            self.stores.bind_newest()
        if self.late is not None and iteration == self._shape.end - 1:
            self.late.reveal()
        if call.config.timers is not None:
            call.config.timers("forward-backward").stop()
        return self._batches.pop(iteration).losses

    def _is_warm(self, iteration: int) -> bool:
        """Whether nothing is left that must not run beside the training thread at its first use.

        That is what waits for the whole device, where messages occupy it, and a step that is compiled. Until then
        receives are not posted ahead, and a step is settled in its own iteration.
        """
        boxes = self._exchange.activations_in, self._exchange.gradients_in
        occupied = any(box is not None and box.link.occupies_device for box in boxes)
        if not occupied and not (self.late is not None and self.late.compiles):
            return True
        stepped = self.late is None or self.late.has_stepped
        return stepped and iteration - self._shape.first >= WARM_UP

    def _execute(self, action: Action, call: Call) -> None:
        asked = start = self._recorder.mark()
        if action.kind == F:
            start = self._forward(action, call)
        elif action.kind == B:
            start = self._backward(action, call)
        elif action.kind == REDUCE:
            self._reduce(action, call)
        elif self.late is None:  # Megatron's call of the optimizer's step executes and records it
            self._step = action
            return
        elif self.late.pending == action.microbatch:  # else an evaluation or a checkpoint has settled it
            self._settle()
            start = self._recorder.mark()
        self._recorder.add(action, asked, start, self._recorder.mark())

    def _settle(self) -> None:
        outcome = self.late.settle()
        self.alarmed |= outcome.alarm
        self.written |= outcome.written
        self.logbook.settled(outcome)

    def _report(self, marks: list) -> StageReport:
        """What happened since the last report; called in the late step's thread."""
        records = self._recorder.resolve(marks)
        if self._writer is not None:
            self.late.defer(partial(self._writer.write, records))
        waited = sum(record.start - record.asked for record in records)
        elapsed = sum(record.end - record.asked for record in records)  # without evaluation, saving, the loop itself
        return StageReport(waited, elapsed, torch.cuda.max_memory_allocated())

    def _spent(self) -> Spent:
        """What happened since the last call, where no step is late; called at a batch's end, when all stages have met.

        To meet Megatron's loop has waited for the GPU, so nothing is left to wait for here.
        """
        marks = self._recorder.cut()
        if not marks:
            return Spent()
        now = self._recorder.mark()
        *records, end = self._recorder.resolve([*marks, (marks[-1][0], now, now, now)])
        if self._writer is not None:
            self._writer.write(records)
        last = max(index for index, record in enumerate(records) if record.action.kind == B)
        computing = records[: last + 1]
        return Spent(
            sum(record.start - record.asked for record in computing),
            sum(record.end - record.asked for record in computing),
            end.end - records[last].end,
        )

    def close_trace(self) -> None:
        """Write what is left of the trace."""
        if self._writer is not None:
            rest = partial(self._writer.write, self._recorder.resolve(self._recorder.cut()))
            self.late.defer(rest).result() if self.late is not None else rest()

    def _announce(self, iteration: int, new_message: Callable[[], torch.Tensor]) -> None:
        """Tell the inboxes what the neighbours' lists send this stage in this iteration, and what it leaves over."""
        for inbox, neighbour, kind in (
            (self._exchange.activations_in, self._stage - 1, F),
            (self._exchange.gradients_in, self._stage + 1, B),
        ):
            if inbox is None:
                continue
            sent, taken = (
                sum(action.kind == kind for action in self.schedule.actions(self._shape, stage, iteration))
                for stage in (neighbour, self._stage)
            )
            inbox.ahead = self._is_warm(iteration) and not (inbox.link.occupies_device and self.timed)
            inbox.expect(sent, new_message, held=inbox.outstanding + sent - taken)

    def _forward(self, action: Action, call: Call) -> Any:
        """Returns the mark of the moment when its input had arrived; so does `_backward`."""
        batch = self._batches[self._shape.batch(action.microbatch)]
        index = action.microbatch % self._shape.microbatches
        received = None
        if self._exchange.activations_in is not None:
            received = self._exchange.activations_in.take().requires_grad_()
        start = self._recorder.mark()
        self._bind(action)
        output, tokens = megatron_schedules.forward_step(
            call.forward_step_func,
            call.data_iterator,
            call.model,
            self._shape.microbatches,
            received,
            batch.losses,
            call.config,
            call.groups.cp.size(),
            is_first_microbatch=index == 0,
            current_microbatch=index,
            is_last_stage=self._exchange.activations_out is None,
        )
        batch.tokens = batch.tokens + tokens
        if self._exchange.activations_out is not None:
            self._exchange.activations_out.put(output.detach())
        megatron_schedules.deallocate_output_tensor(output, call.config.deallocate_pipeline_outputs)
        self.in_flight.append(InFlight(action.microbatch, action.version, received, output))
        return start

    def _backward(self, action: Action, call: Call) -> Any:
        flight = self.in_flight.popleft()
        assert (flight.microbatch, flight.version) == action[1:3], f"{action} meets microbatch {flight.microbatch}"
        gradient = None
        if self._exchange.gradients_in is not None:
            gradient = self._exchange.gradients_in.take()
        start = self._recorder.mark()
        self._bind(action)
        input_gradient = megatron_schedules.backward_step(flight.input, flight.output, gradient, call.config)
        if self._exchange.gradients_out is not None:
            self._exchange.gradients_out.put(input_gradient)
        return start

    def _reduce(self, action: Action, call: Call) -> None:
        """Data-parallel reduction, tied embeddings, token count: Megatron's own finalize function, now or later."""
        tokens = None
        if call.config.calculate_per_token_loss:
            tokens = torch.as_tensor(self._batches[action.microbatch].tokens, dtype=torch.int, device="cuda").clone()
        if self.late is not None:
            to_come = Action(STEP, action.microbatch, action.version + 1)
            marks = self._recorder.cut()
            self.late.start(
                action.microbatch,
                self._versions_still_read(to_come),
                tokens,
                partial(self._report, marks),
                extrapolate=self.schedule.extrapolates(action.microbatch + 1),
            )
            return
        call.config.finalize_model_grads_func(
            [call.model], tokens, pg_collection=call.groups, force_all_reduce=call.force_all_reduce
        )

    def _bind(self, action: Action) -> None:
        """Weights and gradient slot of the microbatch."""
        if self.stores is not None:
            self.stores.bind(action.version)
        if self.late is not None:
            self.late.bind(self._shape.batch(action.microbatch))

    @staticmethod
    def _new_message(
        call: Call, seq_length: int, micro_batch_size: int, decoder_seq_length: int | None
    ) -> torch.Tensor:
        """An empty tensor [sequence, microbatch, hidden] of the pipeline's dtype, for one boundary message."""
        (shape,) = megatron_schedules.get_tensor_shapes(
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            decoder_seq_length=decoder_seq_length,
            config=call.config,
            tp_group=call.groups.tp,
            cp_group=call.groups.cp,
        )
        return torch.empty(shape, dtype=call.config.pipeline_dtype, device=torch.cuda.current_device())


def _refuse(**features: object) -> None:
    """Stop at what Megatron's own schedules take and this one does not; the command line's checks come before."""
    for name, value in features.items():
        if value:
            raise RuntimeError(f"{name} is set: only --pipeline-schedule megatron supports it")


class _GradSync(contextlib.AbstractContextManager):
    """Holds back the data-parallel reduction until the last backward of a batch, as Megatron's schedules do."""

    def __init__(self, call: Call):
        self.call = call
        self._no_sync: contextlib.AbstractContextManager | None = None

    def hold(self) -> None:
        """Before the first backward; the gradient buffers are zeroed before, which would undo it."""
        self._no_sync = (self.call.config.no_sync_func or contextlib.nullcontext)()
        self._no_sync.__enter__()

    def __exit__(self, *exc) -> None:
        self._release()

    def before_last_backward(self, first_stage: bool) -> None:
        # With --align-grad-reduce only the first stage starts its reduction inside the backward.
        if self.call.config.grad_sync_func is None or first_stage:
            self._release()

    def after_last_backward(self) -> None:
        if self._no_sync is not None:
            self._release()
            if self.call.config.grad_sync_func is not None:
                self.call.config.grad_sync_func(self.call.model.parameters())

    def _release(self) -> None:
        if self._no_sync is not None:
            self._no_sync.__exit__(None, None, None)
            self._no_sync = None
