"""Runs one stage of a schedule on Megatron's training loop.

Invariants: outside of an iteration the parameters are bound to the newest complete
weights, or a step is pending that `wait_step` completes; with a late step nothing in
the loop waits for another stage.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.pipeline_parallel import schedules as megatron_schedules
from megatron.training import get_args, print_rank_0

from megatron_2bw.engine.p2p import connect, connect_group
from megatron_2bw.engine.pipeline import WARM_UP, Pipeline, Update
from megatron_2bw.engine.process_groups import streams_warning
from megatron_2bw.engine.recorder import Recorder
from megatron_2bw.engine.trace_file import TraceWriter
from megatron_2bw.engine.updates import InPlaceUpdate, StashedUpdate
from megatron_2bw.engine.weights import WeightStores
from megatron_2bw.mcore.batch_sizes import Position
from megatron_2bw.mcore.checkpoints.state import RunState
from megatron_2bw.mcore.correction import Correction
from megatron_2bw.mcore.grad_buffers import all_buffers
from megatron_2bw.mcore.late_step import LateStep, StepResult
from megatron_2bw.mcore.log_lines import LogLines
from megatron_2bw.mcore.options import RunOptions
from megatron_2bw.mcore.rebinding import arguments, around
from megatron_2bw.mcore.stage import Call, MegatronStage
from megatron_2bw.mcore.stage_times import Meeting, StageClock
from megatron_2bw.mcore.working_copy import resume_note
from megatron_2bw.schedules import Schedule, Shape


class MegatronRuntime:
    """One stage.

    schedule  what to do when
    position  reads where the training loop is
    """

    def __init__(
        self,
        schedule: Schedule,
        position: Callable[[], Position],
        options: RunOptions = RunOptions(),
    ):
        self.schedule, self.position, self.options = schedule, position, options
        self.pipeline: Pipeline | None = None  # from the first iteration on
        self.stores: WeightStores | None = None
        self.late: LateStep | None = None
        self.log: LogLines | None = None
        self.trainable: list[torch.nn.Parameter] = []
        # see `LateStep`; given before the first iteration
        self.save_pending: Callable[[], bool | None] | None = None
        # all ranks have written a checkpoint, as all know by the same iteration
        self.save_complete = False
        # a rank wants the run to end, as all ranks know by the same iteration
        self.exit_requested = False
        self._resume = RunState()
        self._correction: Correction | None = None  # of the newest working copy
        # microbatches of the batch after the last one of the present size
        self._following = 0
        self._scheduler: Any = None
        self._step_result: tuple = ()
        # exit flags as they were given, while `decide_exit` hides them
        self._hidden: tuple | None = None

    # Replacements of Megatron's functions (patches.py); their first argument is the
    # original.

    @around
    def make_optimizer(
        self, make: Callable, config: Any, model: list, *args: Any, **kwargs: Any
    ) -> Any:
        """Take over the stage's weights and the optimizer's step, before a checkpoint
        is loaded."""
        optimizer = make(config, model, *args, **kwargs)
        self._optimizer, self._megatron_step = optimizer, optimizer.step
        optimizer.step = self.step
        # the training loop takes the method before the first iteration
        if self.schedule.late_step:
            optimizer.scale_loss = lambda loss: self.late.scales.scale_loss(loss)
        self.trainable = [
            param
            for chunk in model
            for param in chunk.parameters()
            if param.requires_grad
        ]
        if not self.schedule.global_step:
            # Its stages step at different times, so norm and inf flag can span the
            # tensor-parallel ranks only.
            for part in getattr(optimizer, "chained_optimizers", [optimizer]):
                part.grad_stats_parallel_group = mpu.get_tensor_model_parallel_group()
            print_rank_0(
                f"> {self.schedule.name}: gradient norm, clipping and inf check are per stage; "
                "the logged grad norm is the largest stage's"
            )
        return optimizer

    @around
    def make_scheduler(self, make: Callable, optimizer: Any) -> Any:
        """Take over the scheduler of learning rate and weight decay."""
        self._scheduler = make(optimizer)
        return self._scheduler

    @around
    def add_line(self, training_log: Callable, *args: Any, **kwargs: Any) -> bool:
        return self.log.add(training_log, arguments(training_log, args, kwargs))

    @around
    def print_line(self, print_rank_last: Callable, message: str) -> None:
        print_rank_last(self.log.line(message) if self.log else message)

    @around
    def sync_first(self, read_weights: Callable, *args: Any, **kwargs: Any) -> Any:
        self.sync_weights()
        return read_weights(*args, **kwargs)

    @around
    def save(self, save_checkpoint: Callable, *args: Any, **kwargs: Any) -> Any:
        self.sync_weights()
        # A checkpoint holds the arguments.
        with (
            contextlib.nullcontext()
            if self._hidden is None
            else _exit_flags(*self._hidden)
        ):
            return save_checkpoint(*args, **kwargs)

    @around
    def decide_exit(
        self, checkpoint_and_decide_exit: Callable, *args: Any, **kwargs: Any
    ) -> bool:
        # Megatron asks all ranks in every iteration; here the late step has asked them
        # in the background.
        with (
            contextlib.nullcontext()
            if self.exit_requested
            else _exit_flags(False, None) as self._hidden
        ):
            try:
                leave = checkpoint_and_decide_exit(*args, **kwargs)
            finally:
                self._hidden = None
        if leave:
            self.sync_weights()
        return leave

    # Megatron calls the following.

    def forward_backward(
        self, *, forward_only: bool = False, **values: Any
    ) -> list[dict[str, torch.Tensor]]:
        """One training iteration, called as Megatron's schedules are (see `Call`).
        Evaluation is Megatron's own.

        Returns the loss reports of the batch, one a microbatch, on the last stage; an
        empty list elsewhere.
        """
        if forward_only:
            self.sync_weights()
            return megatron_schedules.get_forward_backward_func()(
                forward_only=True, **values
            )
        call = Call(**values)
        iteration, end, self._following = self.position()
        if self.pipeline is None:
            self._start(call, iteration, end)
        elif call.num_microbatches != self.pipeline.shape.microbatches:
            self._use_shape(
                Shape(
                    self.pipeline.shape.stages, call.num_microbatches, iteration, end
                ),
                call,
            )
        return self._iterate(call, iteration)

    def step(self) -> tuple:
        """Replaces the optimizer's `step`: runs the schedule's STEP action; returns
        what Megatron's does.

        A late step runs in its thread. Megatron gets the answer that it was not
        skipped; the log line has the true one.
        """
        if self.late is not None:
            return True, None, None
        self.pipeline.run_deferred_step()
        return self._step_result

    def wait_step(self) -> None:
        """Complete a pending step, and write the log lines that wait for it."""
        if self.late is not None and self.late.pending is not None:
            self.late.sync_weights()
        if self.log is not None:
            self.log.flush()

    def sync_weights(self) -> None:
        """Complete a pending step; the parameters are the newest true weights until the
        next iteration.

        See docs/design.md, [Note: what an evaluation sees].
        """
        self.wait_step()
        if self.late is not None and self.late.working is not None:
            self.late.working.swap_in_true_weights()

    # Checkpoints (checkpoints/state.py) call the following, between iterations.

    def state(self) -> RunState:
        """What the run resumes from, in addition to what Megatron saves. No step may be
        pending."""
        if self.pipeline is None:
            return self._resume if self.schedule.late_step else RunState()
        if self.late is None or self.stores is None:
            return RunState()
        newest, pipeline = self.stores.newest, self.pipeline
        version = self.schedule.version(
            pipeline.shape, pipeline.index, newest * pipeline.shape.microbatches
        )
        biases = {} if self.late.routers is None else self.late.routers.shadow(newest)
        return RunState(
            shadow=dict(zip(self.stores.params, self.stores.values(newest - 1)))
            | biases,
            loss_scale=self.late.scales.of(version),
            working=self.late.working.values() if self.late.working is not None else {},
            correction=self._correction,
            sync_iterations=self.schedule.sync_iterations,
        )

    def random_state_before_flight(self) -> contextlib.AbstractContextManager:
        """Inside, the generators have their states from before the microbatches in
        flight drew from them."""
        return (
            self._stage.random_state_before_flight()
            if self.pipeline is not None
            else contextlib.nullcontext()
        )

    def resume(self, state: RunState) -> None:
        """Start from a checkpoint that has been loaded; called before the first
        iteration.

        The synchronous start belongs to the beginning of the run, so its length is that
        of the checkpoint.
        """
        self._resume = state
        if state.sync_iterations is not None:
            self.schedule = replace(
                self.schedule, sync_iterations=state.sync_iterations
            )

    def close_trace(self) -> None:
        """Write the rest of the trace."""
        if self.late is not None:
            # after what the step's thread writes
            self.late.defer(self._clock.write_rest).result()
        elif self.pipeline is not None:
            self._clock.write_rest()

    # The rest is this stage's work.

    def _start(self, call: Call, first: int, end: int) -> None:
        """On the first iteration: learn the pipeline's shape, connect to the
        neighbours, make stores and update.

        torch names process groups by a counter, so every rank makes them in this order:
        connections, late step, log.
        """
        ranks, index = (
            torch.distributed.get_process_group_ranks(call.groups.pp),
            call.groups.pp.rank(),
        )
        device, options = next(call.model.parameters()).device, self.options
        shape = Shape(len(ranks), call.num_microbatches, first, end)
        ahead = [self.schedule.ahead(shape, stage) for stage in range(shape.stages)]
        lanes = [max(upper - lower, 1) for upper, lower in itertools.pairwise(ahead)]
        neighbours = connect(
            ranks,
            torch.distributed.get_rank(),
            options.transport,
            device,
            options.timeout,
            lanes,
        )
        if options.evaluates:
            connect_group(call.groups.pp, ranks, torch.distributed.get_rank(), device)
        recorder, writer = Recorder(device), None
        if options.trace is not None and mpu.get_tensor_model_parallel_rank() == 0:
            writer = TraceWriter(options.trace, index, call.groups.dp_cp.rank())
        self._stage, self._clock = (
            MegatronStage(shape, index),
            StageClock(recorder, writer),
        )
        if not self.schedule.flushes:
            self._make_stores(call, shape, index)
        if self.schedule.late_step:
            last = min(self.schedule.sync_iterations, get_args().train_iters)
            if first < last:
                print_rank_0(
                    f"> {self.schedule.name}: iterations {first + 1} to {last} "
                    "run without gradient delay"
                )
            parts = (
                self.schedule,
                shape,
                self.stores,
                call,
                self._optimizer,
                self._scheduler,
                options,
                self._resume,
            )
            asks = dict(
                end_batch=self._end_batch,
                complete=self._complete,
                save_pending=self.save_pending,
            )
            self.late = LateStep(*parts, **asks)
        self.log = LogLines(
            None if self.late else Meeting(self._clock.times, ranks, options.timeout)
        )
        if warning := streams_warning():
            print_rank_0(warning)
        self._resume = RunState()  # its tensors are copied
        deferred = self.late is None  # Megatron's call of the optimizer's step runs it
        more = dict(
            recorder=recorder, free_output=self._stage.free_output, defer_step=deferred
        )
        self.pipeline = Pipeline(
            self.schedule, shape, index, neighbours, self._stage, self._update(), **more
        )

    def _update(self) -> Update:
        def step() -> bool:
            self._step_result = self._megatron_step()
            return bool(self._step_result[0])

        reduce = lambda action: self._stage.finalize_grads(action.batch)
        if self.late is not None:
            return self.late
        return (
            InPlaceUpdate(step, reduce)
            if self.stores is None
            else StashedUpdate(self.stores, step, reduce)
        )

    def _make_stores(self, call: Call, shape: Shape, index: int) -> None:
        buffers = (
            all_buffers(call.model)
            if call.model.ddp_config.use_distributed_optimizer
            else None
        )
        self.stores = WeightStores(
            self.trainable, self.schedule.max_versions(shape, index), buffers
        )
        shadow = self._resume.shadow if self.schedule.late_step else {}
        self.stores.start(
            shape.first, [shadow[param] for param in self.trainable] if shadow else None
        )
        if shape.first > 0:
            versions = (
                "both weight versions of the checkpoint"
                if shadow
                else "the loaded weights as every version"
            )
            if self.schedule.reads_late(shape.first):
                versions += resume_note(
                    self._resume.correction, self._correction_of(shape.microbatches)
                )
            print_rank_0(
                f"> {self.schedule.name}: starts from iteration {shape.first} with {versions}"
            )

    def _use_shape(self, shape: Shape, call: Call) -> None:
        """From here on batches have another size. The iteration before has drained the
        pipeline."""
        self.wait_step()
        self.pipeline.use_shape(shape)
        self._stage.shape = shape
        if self.late is not None:
            self.late.use_shape(shape, call)

    def _iterate(self, call: Call, iteration: int) -> list:
        pipeline, late, timers = self.pipeline, self.late, call.config.timers
        # before a receive is posted: a timer waits for the whole GPU
        if timers is not None:
            timers("forward-backward", log_level=1).start()
        if late is not None and late.working is not None:
            late.working.restore()
        prefetch = self._is_warm(iteration) and not (
            pipeline.neighbours.occupies_device and self.options.timed
        )
        with self._stage.iteration(iteration, call):
            pipeline.run(iteration, prefetch)
        if (
            late is not None
            and late.pending is not None
            and not self._is_warm(iteration)
        ):
            late.wait_step()
        if self.stores is not None:
            (late or self.stores).bind_newest()
        if (
            late is not None
            and late.working is not None
            and iteration == pipeline.shape.end - 1
        ):
            late.working.swap_in_true_weights()
        if timers is not None:
            timers("forward-backward").stop()
        return self._stage.losses(iteration)

    def _is_warm(self, iteration: int) -> bool:
        """Whether everything has run once that must not run concurrently with the
        training thread at its first use.

        That is what waits for the whole device, where messages occupy it, and a step
        that is compiled. Until then receives are not posted early, and a step is
        completed in its own iteration.
        """
        if not self.pipeline.neighbours.occupies_device and not (
            self.late is not None and self.late.compiles
        ):
            return True
        stepped = self.late is None or self.late.has_stepped
        return stepped and iteration - self.pipeline.shape.first >= WARM_UP

    def _end_batch(self, batch: int) -> tuple:
        tokens = self._stage.end_batch(batch)
        shape = self.pipeline.shape
        microbatches = shape.microbatches if batch + 1 < shape.end else self._following
        self._correction = (
            self._correction_of(microbatches)
            if self.schedule.reads_late(batch + 1)
            else None
        )
        return tokens, self._clock.stats_later(self.late.defer), self._correction

    def _correction_of(self, microbatches: int) -> Correction | None:
        return (
            self.options.correction(microbatches)
            if self.options.correction is not None
            else None
        )

    def _complete(self, result: StepResult) -> None:
        self.exit_requested |= result.exit_requested
        self.save_complete |= result.save_complete
        self.log.completed(result)


@contextlib.contextmanager
def _exit_flags(signal_handler: bool, minutes: int | None) -> Iterator[tuple]:
    """--exit-signal-handler and --exit-duration-in-mins with other values; yields what
    they were."""
    args = get_args()
    asked = args.exit_signal_handler, args.exit_duration_in_mins
    args.exit_signal_handler, args.exit_duration_in_mins = signal_handler, minutes
    try:
        yield asked
    finally:
        args.exit_signal_handler, args.exit_duration_in_mins = asked
