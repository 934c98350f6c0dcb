"""Runs one stage of a schedule on Megatron's training loop.

Invariants: outside of an iteration the parameters are bound to the newest complete
weights, or a step is pending that `wait_step` completes; with a late step nothing in
the loop waits for another stage.
"""

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.pipeline_parallel import schedules as megatron_schedules
from megatron.training import get_args, print_rank_0
from torch import Tensor

from megatron_2bw.engine.p2p import Neighbours, connect, connect_group
from megatron_2bw.engine.pipeline import Pipeline, warmed_up
from megatron_2bw.engine.process_groups import streams_warning
from megatron_2bw.engine.recorder import Recorder
from megatron_2bw.engine.trace_file import TraceWriter
from megatron_2bw.engine.updates import (
    InPlaceUpdate,
    LateUpdate,
    StashedUpdate,
    Update,
)
from megatron_2bw.engine.weights import WeightStores
from megatron_2bw.engine.worker import Worker
from megatron_2bw.mcore import cpu
from megatron_2bw.mcore.batch_sizes import Position
from megatron_2bw.mcore.checkpoints.state import RunState
from megatron_2bw.mcore.correction import NO_CORRECTION
from megatron_2bw.mcore.grad_buffers import all_buffers
from megatron_2bw.mcore.late_step import LateStep
from megatron_2bw.mcore.log_lines import LogLines
from megatron_2bw.mcore.options import RunOptions
from megatron_2bw.mcore.rebinding import arguments, around, replaced
from megatron_2bw.mcore.stage import Call, MegatronStage
from megatron_2bw.mcore.stage_times import Meeting, StageClock
from megatron_2bw.mcore.working_copy import resume_note
from megatron_2bw.schedules import Schedule, Shape


class MegatronRuntime:
    """One stage, as Megatron's training loop calls it.

    Megatron's functions that are replaced by methods of this class are the rows of
    patches.py. Megatron calls `forward_backward`, which runs one iteration of the
    pipeline (engine/pipeline.py), then `step`.

    schedule  what to do when
    position  reads where the training loop is
    options   of the run

    pipeline        from the first iteration on; it alone knows the pipeline's shape
    late            what the late step needs of each batch, in a schedule that has one;
                    `_update` runs it
    exit_requested  a rank wants the run to end, as all ranks know by the same iteration
    save_complete   all ranks have written a checkpoint, as all know by the same
                    iteration
    """

    def __init__(
        self,
        schedule: Schedule,
        position: Callable[[], Position],
        options: RunOptions = RunOptions(),
    ):
        self.schedule = schedule
        self.position = position
        self.options = options
        self.pipeline: Pipeline | None = None
        self.stores: WeightStores | None = None
        self.late: LateStep | None = None
        self.log: LogLines | None = None
        self.trainable: list[torch.nn.Parameter] = []
        self.exit_requested = False
        self.save_complete = False
        self._update: Update
        self._resume = RunState()
        self._optimizer: Any = None
        self._scheduler: Any = None
        self._step_result: tuple = ()
        # exit flags as they were given, which `decide_exit` hides
        self._given: dict[str, Any] = {}

    # Replacements of Megatron's functions (patches.py); their first argument is the
    # original.

    @around
    def make_optimizer(
        self, make: Callable, config: Any, model: list, *args: Any, **kwargs: Any
    ) -> Any:
        """Take over the stage's weights and the optimizer's step, before a checkpoint
        is loaded."""
        optimizer = make(config, model, *args, **kwargs)
        self._optimizer = optimizer
        self._megatron_step = optimizer.step
        optimizer.step = self.step
        if self.schedule.late_step:
            # the training loop takes the method before the first iteration
            optimizer.scale_loss = self._scale_loss
        for chunk in model:
            for param in chunk.parameters():
                if param.requires_grad:
                    self.trainable.append(param)
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
        with replaced(get_args(), **self._given):
            return save_checkpoint(*args, **kwargs)

    @around
    def decide_exit(
        self, checkpoint_and_decide_exit: Callable, *args: Any, **kwargs: Any
    ) -> bool:
        hidden = {}
        if not self.exit_requested:
            # Megatron asks all ranks in every iteration; here the late step has asked
            # them in the background.
            hidden = dict(exit_signal_handler=False, exit_duration_in_mins=None)
        with replaced(get_args(), **hidden) as self._given:
            leave = checkpoint_and_decide_exit(*args, **kwargs)
        if leave:
            self.sync_weights()
        return leave

    # Megatron calls the following.

    def forward_backward(
        self, *, forward_only: bool = False, **values: Any
    ) -> list[dict[str, Tensor]]:
        """One training iteration, called as Megatron's schedules are (see `Call`).
        Evaluation is Megatron's own.

        Returns the loss reports of the batch, one a microbatch, on the last stage; an
        empty list elsewhere.
        """
        if forward_only:
            self.sync_weights()
            evaluate = megatron_schedules.get_forward_backward_func()
            return evaluate(forward_only=True, **values)
        call = Call(**values)
        position = self.position()
        shape = Shape(
            call.groups.pp.size(),
            call.num_microbatches,
            position.iteration,
            position.end,
        )
        if self.pipeline is None:
            self._start(call, shape)
        elif shape.microbatches != self.pipeline.shape.microbatches:
            # The iteration before has drained the pipeline.
            self.wait_step()
            self.pipeline.use_shape(shape)
        timers = call.config.timers
        # before a receive is posted: a timer waits for the whole GPU
        if timers is not None:
            timers("forward-backward", log_level=1).start()
        self._iterate(call, position)
        if timers is not None:
            timers("forward-backward").stop()
        return self._stage.losses(position.iteration)

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
        if self.late is not None and self._update.pending is not None:
            self._update.sync_weights()
            self._take_results()
        if self.log is not None:
            self.log.flush()

    def sync_weights(self) -> None:
        """Complete a pending step; the parameters are the newest true weights until the
        next iteration.

        See docs/design.md, [Note: what an evaluation sees].
        """
        self.wait_step()
        if self.late is not None:
            self.late.show_true_weights()

    # Checkpoints (checkpoints/state.py) call the following, between iterations.

    def state(self) -> RunState:
        """What the run resumes from, in addition to what Megatron saves. No step may be
        pending."""
        if not self.schedule.late_step:
            return RunState()
        if self.pipeline is None:
            return self._resume
        shape = self.pipeline.shape
        next_microbatch = self.stores.newest * shape.microbatches
        version = self.schedule.version(shape, self.pipeline.index, next_microbatch)
        return self.late.state(version)

    def random_state_before_flight(self) -> contextlib.AbstractContextManager:
        """Inside, the generators have their states from before the microbatches in
        flight drew from them."""
        if self.pipeline is None:
            return contextlib.nullcontext()
        return self._stage.random_state_before_flight()

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
        if self.pipeline is not None:
            self._clock.close()

    # The rest is this stage's work.

    def _start(self, call: Call, shape: Shape) -> None:
        """On the first iteration: connect to the neighbours, make stores, update and
        pipeline.

        torch names process groups by a counter, so every rank makes them in this order:
        connections, late step, log.
        """
        options = self.options
        index = call.groups.pp.rank()
        ranks = torch.distributed.get_process_group_ranks(call.groups.pp)
        device = next(call.model.parameters()).device
        neighbours = self._connect(call, shape, ranks, device)
        recorder = Recorder(device)
        writer = None
        if options.trace is not None and mpu.get_tensor_model_parallel_rank() == 0:
            writer = TraceWriter(options.trace, index, call.groups.dp_cp.rank())
        worker = None
        if self.schedule.late_step:
            worker = Worker("2bw step", device, cpu.answering)
        self._stage = MegatronStage(shape.stages, index, self.schedule.predicts)
        self._clock = StageClock(recorder, writer, worker)
        if not self.schedule.flushes:
            self._make_stores(call, shape, index)
        if worker is not None:
            self._make_late_step(call, shape, worker)
        elif self.stores is not None:
            self._update = StashedUpdate(
                self.stores, self._step_now, self._stage.finalize_grads
            )
        else:
            self._update = InPlaceUpdate(self._step_now, self._stage.finalize_grads)
        meeting = None
        if worker is None:
            meeting = Meeting(self._clock.times, ranks, options.timeout)
        self.log = LogLines(meeting)
        if warning := streams_warning():
            print_rank_0(warning)
        self._resume = RunState()  # its tensors are copied
        self.pipeline = Pipeline(
            self.schedule,
            shape,
            index,
            neighbours,
            self._stage,
            self._update,
            recorder=recorder,
            free_output=self._stage.free_output,
            # Megatron's call of the optimizer's step runs it
            defer_step=worker is None,
        )

    def _connect(
        self, call: Call, shape: Shape, ranks: list[int], device: torch.device
    ) -> Neighbours:
        rank = torch.distributed.get_rank()
        ahead = [self.schedule.ahead(shape, stage) for stage in range(shape.stages)]
        lanes = [max(upper - lower, 1) for upper, lower in itertools.pairwise(ahead)]
        neighbours = connect(
            ranks, rank, self.options.transport, device, self.options.timeout, lanes
        )
        if self.options.evaluates:
            connect_group(call.groups.pp, ranks, rank, device)
        return neighbours

    def _make_stores(self, call: Call, shape: Shape, index: int) -> None:
        buffers = None
        if call.model.ddp_config.use_distributed_optimizer:
            buffers = all_buffers(call.model)
        self.stores = WeightStores(
            self.trainable, self.schedule.max_versions(shape, index), buffers
        )
        saved = self._resume.shadow
        shadow = None
        versions = "the loaded weights as every version"
        if saved:
            shadow = [saved[param] for param in self.trainable]
            versions = "both weight versions of the checkpoint"
        self.stores.start(shape.first, shadow)
        if shape.first == 0:
            return
        if self.schedule.reads_late(shape.first):
            now = NO_CORRECTION
            if self.options.correction is not None:
                now = self.options.correction(shape.microbatches)
            versions += resume_note(self._resume.correction or NO_CORRECTION, now)
        print_rank_0(
            f"> {self.schedule.name}: starts from iteration {shape.first} with {versions}"
        )

    def _make_late_step(self, call: Call, shape: Shape, worker: Worker) -> None:
        end = min(self.schedule.sync_iterations, get_args().train_iters)
        if shape.first < end:
            print_rank_0(
                f"> {self.schedule.name}: iterations {shape.first + 1} to {end} "
                "run without gradient delay"
            )
        self.late = LateStep(
            schedule=self.schedule,
            options=self.options,
            resume=self._resume,
            stage=self._stage,
            clock=self._clock,
            stores=self.stores,
            call=call,
            optimizer=self._optimizer,
            scheduler=self._scheduler,
        )
        self._update = LateUpdate(self.stores, worker, self.late)

    def _iterate(self, call: Call, position: Position) -> None:
        pipeline = self.pipeline
        iteration = position.iteration
        if self.late is not None:
            self.late.show_working_weights()
        prefetch = self._is_warm(iteration)
        if pipeline.neighbours.occupies_device and self.options.timed:
            prefetch = False
        with self._stage.iteration(position, call):
            pipeline.run(iteration, prefetch)
        if self.late is not None:
            if self._update.pending is not None and not self._is_warm(iteration):
                self._update.wait_step()
                self.late.rehearse()
            self._update.bind_newest()
            self._take_results()
            if iteration == pipeline.shape.end - 1:
                self.late.show_true_weights()
        elif self.stores is not None:
            self.stores.bind_newest()

    def _is_warm(self, iteration: int) -> bool:
        """Whether everything has run once that must not run concurrently with the
        training thread at its first use.

        That is what waits for the whole device, where messages occupy it, and a step
        that is compiled. Until then receives are not posted early, and a step is
        completed in its own iteration.
        """
        if not self.pipeline.neighbours.occupies_device:
            if self.late is None or not self.late.compiles:
                return True
        if self.late is not None and not self.late.has_run:
            return False
        return warmed_up(iteration - self.pipeline.shape.first)

    def _take_results(self) -> None:
        """What the steps that are complete have found."""
        while self.late.results:
            result = self.late.results.popleft()
            self.exit_requested |= result.exit_requested
            self.save_complete |= result.save_complete
            self.log.completed(result)

    def _scale_loss(self, loss: Tensor) -> Tensor:
        return self.late.scale_loss(loss)

    def _step_now(self) -> bool:
        self._step_result = self._megatron_step()
        return bool(self._step_result[0])
