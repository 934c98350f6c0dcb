"""The model of one stage on Megatron's own forward and backward steps
(`pipeline.Stage`).

Invariant: this object owns the losses and token counts of batches that are not
complete, and the random state from before the forwards that are in flight between
iterations.
"""

import contextlib
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core import mpu, tensor_parallel
from megatron.core.pipeline_parallel import schedules as megatron_schedules
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_2bw.mcore.batch_sizes import Position


@dataclass
class Call:
    """The arguments of one call of Megatron's schedule function, under Megatron's
    names."""

    forward_step_func: Callable
    data_iterator: Any
    model: Any
    num_microbatches: int
    seq_length: int
    micro_batch_size: int
    decoder_seq_length: int | None = None
    collect_non_loss_data: bool = False
    first_val_step: bool | None = None
    adjust_tensor_shapes_fn: Callable | None = None
    p2p_communicator: Any = None
    pg_collection: Any = None
    force_all_reduce: bool | None = False

    def __post_init__(self) -> None:
        if isinstance(self.model, list):
            (self.model,) = self.model
        self.config = get_model_config(self.model)
        self.groups = self.pg_collection
        if self.groups is None:
            self.groups = megatron_schedules._build_default_pg_collection()
        unsupported = (
            self.config.num_microbatches_with_partial_activation_checkpoints,
            self.config.variable_seq_lengths,
            self.adjust_tensor_shapes_fn,
            self.p2p_communicator,
        )
        if any(unsupported):
            raise RuntimeError(
                "several shapes of messages, recompute of some microbatches: "
                "only with Megatron's schedule"
            )


def random_state() -> tuple:
    """What Megatron saves of a rank's generators: Python's, NumPy's, torch's on host
    and device, its own tracker's.

    Taking it copies some kilobytes on the host and waits for no kernel.
    """
    states = tensor_parallel.get_cuda_rng_tracker().get_states()
    tracked = {
        name: tensor_parallel.convert_cuda_rng_state(state)
        for name, state in states.items()
    }
    return (
        random.getstate(),
        np.random.get_state(),
        torch.get_rng_state(),
        torch.cuda.get_rng_state(),
        tracked,
    )


def restore_random_state(state: tuple) -> None:
    """Undo all draws since `random_state` returned `state`."""
    python, numpy, host, device, tracked = state
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(host)
    torch.cuda.set_rng_state(device)
    tracker = tensor_parallel.get_cuda_rng_tracker()
    graphable = tensor_parallel.is_graph_safe_cuda_rng_tracker(tracker)
    convert = partial(tensor_parallel.convert_cuda_rng_state, to_graphable=graphable)
    tracker.set_states({name: convert(state) for name, state in tracked.items()})


@dataclass(frozen=True)
class EndedBatch:
    """A batch after its last backward on this stage.

    tokens             an int tensor of one element, with per-token loss
    samples            on all pipelines
    next_microbatches  of the batch after it
    """

    tokens: Tensor | None
    samples: int
    next_microbatches: int


@dataclass
class Batch:
    """What the microbatches of one batch have left on this stage."""

    losses: list = field(default_factory=list)
    tokens: Tensor | int = 0


class MegatronStage:
    """One stage, number `index` from 0, of `stages`.

    Batches have the size of the present call; when it changes, none is in flight.

    predicts  the reduction of a batch starts in `end_batch`, not in its last backward
    """

    def __init__(self, stages: int, index: int, predicts: bool = False):
        self._predicts = predicts
        self._is_last = index == stages - 1
        self._is_first = index == 0
        self._batches = defaultdict(Batch)
        self._random = None
        self._no_sync = None

    @contextlib.contextmanager
    def iteration(self, position: Position, call: Call) -> Iterator[None]:
        """Inside, forwards and backwards use the arguments of `call`."""
        self._position = position
        self._call = call
        self._random = None
        try:
            yield
        finally:
            self._release_sync()

    def losses(self, batch: int) -> list:
        """The loss reports of a complete batch, one a microbatch, on the last stage; an
        empty list elsewhere."""
        return self._batches.pop(batch).losses

    def receive_buffer(self) -> Tensor:
        """An empty tensor [sequence, microbatch, hidden] of the pipeline's dtype."""
        call = self._call
        (shape,) = megatron_schedules.get_tensor_shapes(
            seq_length=call.seq_length,
            micro_batch_size=call.micro_batch_size,
            decoder_seq_length=call.decoder_seq_length,
            config=call.config,
            tp_group=call.groups.tp,
            cp_group=call.groups.cp,
        )
        return torch.empty(
            shape, dtype=call.config.pipeline_dtype, device=torch.cuda.current_device()
        )

    def forward(self, microbatch: int, received: Tensor | None) -> Tensor:
        """The stage's output; on the last stage the scaled loss."""
        call = self._call
        number, index = divmod(microbatch, call.num_microbatches)
        if self._random is None and number > self._position.iteration:
            self._random = random_state()
        batch = self._batches[number]
        output, tokens = megatron_schedules.forward_step(
            call.forward_step_func,
            call.data_iterator,
            call.model,
            call.num_microbatches,
            received,
            batch.losses,
            call.config,
            call.groups.cp.size(),
            is_first_microbatch=index == 0,
            current_microbatch=index,
            is_last_stage=self._is_last,
        )
        batch.tokens = batch.tokens + tokens
        return output

    def free_output(self, output: Tensor) -> None:
        """After the output is sent: its data go, its graph stays."""
        megatron_schedules.deallocate_output_tensor(
            output, self._call.config.deallocate_pipeline_outputs
        )

    def backward(
        self,
        microbatch: int,
        received: Tensor | None,
        output: Tensor,
        gradient: Tensor | None,
    ) -> Tensor | None:
        """Accumulate gradients. Their reduction waits for the last backward of a batch,
        as in Megatron's schedules."""
        config = self._call.config
        index = microbatch % self._call.num_microbatches
        if index == 0:  # after the gradient buffers are zeroed, which would undo it
            no_sync = config.no_sync_func or contextlib.nullcontext
            self._no_sync = no_sync()
            self._no_sync.__enter__()
        # With --align-grad-reduce only the first stage starts its reduction inside the
        # backward.
        inside = config.grad_sync_func is None or self._is_first
        if self._predicts:  # a prediction reads the gradients after the last backward
            inside = False
        if inside and index == self._call.num_microbatches - 1:
            self._release_sync()
        self._scale_auxiliary_losses(output.device)
        return megatron_schedules.backward_step(received, output, gradient, config)

    def _scale_auxiliary_losses(self, device: torch.device) -> None:
        """Megatron does this in each forward. The last one here may be of the next
        batch, which has another scale."""
        config = self._call.config
        share = 1.0
        context_ranks = 1
        if not config.calculate_per_token_loss:
            share = 1 / self._call.num_microbatches
            context_ranks = self._call.groups.cp.size()
        if config.num_moe_experts is not None:
            scale = megatron_schedules._get_moe_loss_scale(config, device)
            MoEAuxLossAutoScaler.set_loss_scale(scale * share * context_ranks)
        if config.mtp_num_layers is not None:
            scale = megatron_schedules._get_mtp_loss_scale(config, device)
            MTPLossAutoScaler.set_loss_scale(scale * share)

    def end_batch(self, batch: int) -> EndedBatch:
        """After the last backward of a batch: start its reduction if it has not
        started."""
        call = self._call
        microbatches = call.num_microbatches
        pipelines = mpu.get_data_parallel_world_size()
        is_last_of_size = batch + 1 == self._position.end
        return EndedBatch(
            tokens=self._start_reduction(batch),
            samples=microbatches * call.micro_batch_size * pipelines,
            next_microbatches=self._position.following
            if is_last_of_size
            else microbatches,
        )

    def _start_reduction(self, batch: int) -> Tensor | None:
        config = self._call.config
        if self._no_sync is not None:
            self._release_sync()
            model = self._call.model
            if config.grad_sync_func is not None:
                config.grad_sync_func(model.parameters())
            elif model.ddp_config.overlap_grad_reduce:
                model.start_grad_sync()
        if not config.calculate_per_token_loss:
            return None
        if not self._is_last:
            # Megatron's zero is on the host; a copy of it would wait for the GPU
            return torch.zeros((), dtype=torch.int, device="cuda")
        return self._batches[batch].tokens.to(torch.int, copy=True)

    def finalize_grads(self, batch: int) -> None:
        """Data-parallel reduction, tied embeddings, token count: Megatron's own
        finalize function, at a flush."""
        tokens = self._start_reduction(batch)
        call = self._call
        call.config.finalize_model_grads_func(
            [call.model],
            tokens,
            pg_collection=call.groups,
            force_all_reduce=bool(call.force_all_reduce),
        )

    @contextlib.contextmanager
    def random_state_before_flight(self) -> Iterator[None]:
        """Inside, the generators have their states from before the forwards that are in
        flight drew from them."""
        if self._random is None:
            yield
            return
        now = random_state()
        restore_random_state(self._random)
        try:
            yield
        finally:
            restore_random_state(now)

    def _release_sync(self) -> None:
        if self._no_sync is not None:
            self._no_sync.__exit__(None, None, None)
            self._no_sync = None
