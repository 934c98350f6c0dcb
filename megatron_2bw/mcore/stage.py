"""The model of one stage on Megatron's own forward and backward steps; see
`core.pipeline.Stage`.

Invariant: this object owns the losses and token counts of batches that are not
complete, and the random state from before the forwards that are in flight between
iterations.
"""

from __future__ import annotations

import contextlib
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel
from megatron.core.pipeline_parallel import schedules as megatron_schedules
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from megatron.core.utils import get_model_config

from megatron_2bw.schedules import Shape


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
        (self.model,) = self.model if isinstance(self.model, list) else [self.model]
        self.config = get_model_config(self.model)
        self.groups = (
            self.pg_collection or megatron_schedules._build_default_pg_collection()
        )
        partly, shapes = (
            self.config.num_microbatches_with_partial_activation_checkpoints,
            self.adjust_tensor_shapes_fn,
        )
        if (
            partly
            or shapes
            or self.p2p_communicator
            or self.config.variable_seq_lengths
        ):
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
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    graphable = tensor_parallel.is_graph_safe_cuda_rng_tracker(tracker)
    convert = partial(tensor_parallel.convert_cuda_rng_state, to_graphable=graphable)
    tracker.set_states({name: convert(state) for name, state in tracked.items()})


@dataclass
class Batch:
    """What the microbatches of one batch have left on this stage."""

    losses: list = field(default_factory=list)
    tokens: torch.Tensor | int = 0


class MegatronStage:
    """One stage, number `index` from 0."""

    def __init__(self, shape: Shape, index: int):
        # between batches of one size and of another it is replaced
        self.shape, self._index = shape, index
        self._batches: dict[int, Batch] = defaultdict(Batch)
        self._random: tuple | None = None
        self._call: Call
        self._iteration = 0
        self._no_sync: contextlib.AbstractContextManager | None = None

    @contextlib.contextmanager
    def iteration(self, iteration: int, call: Call) -> Iterator[None]:
        """Inside, forwards and backwards use the arguments of `call`."""
        self._iteration, self._call, self._random = iteration, call, None
        try:
            yield
        finally:
            self._release_sync()

    def losses(self, batch: int) -> list:
        """The loss reports of a complete batch, one a microbatch, on the last stage; an
        empty list elsewhere."""
        return self._batches.pop(batch).losses

    def receive_buffer(self) -> torch.Tensor:
        """An empty tensor [sequence, microbatch, hidden] of the pipeline's dtype."""
        call = self._call
        sizes = {
            name: getattr(call, name)
            for name in ("seq_length", "micro_batch_size", "decoder_seq_length")
        }
        groups = dict(tp_group=call.groups.tp, cp_group=call.groups.cp)
        (shape,) = megatron_schedules.get_tensor_shapes(
            config=call.config, **sizes, **groups
        )
        return torch.empty(
            shape, dtype=call.config.pipeline_dtype, device=torch.cuda.current_device()
        )

    def forward(self, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        """The stage's output; on the last stage the scaled loss."""
        call, number = self._call, self.shape.batch(microbatch)
        if self._random is None and number > self._iteration:
            self._random = random_state()
        batch, index = self._batches[number], microbatch % self.shape.microbatches
        step, data, model, config = (
            call.forward_step_func,
            call.data_iterator,
            call.model,
            call.config,
        )
        given = (
            step,
            data,
            model,
            self.shape.microbatches,
            received,
            batch.losses,
            config,
            call.groups.cp.size(),
        )
        place = dict(is_first_microbatch=index == 0, current_microbatch=index)
        last = self._index == self.shape.stages - 1
        output, tokens = megatron_schedules.forward_step(
            *given, **place, is_last_stage=last
        )
        batch.tokens = batch.tokens + tokens
        return output

    def free_output(self, output: torch.Tensor) -> None:
        """After the output is sent: its data go, its graph stays."""
        megatron_schedules.deallocate_output_tensor(
            output, self._call.config.deallocate_pipeline_outputs
        )

    def backward(
        self,
        microbatch: int,
        received: torch.Tensor | None,
        output: torch.Tensor,
        gradient: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Accumulate gradients. Their reduction waits for the last backward of a batch,
        as in Megatron's schedules."""
        config, index = self._call.config, microbatch % self.shape.microbatches
        if index == 0:  # after the gradient buffers are zeroed, which would undo it
            self._no_sync = (config.no_sync_func or contextlib.nullcontext)()
            self._no_sync.__enter__()
        # With --align-grad-reduce only the first stage starts its reduction inside the
        # backward.
        if index == self.shape.microbatches - 1 and (
            config.grad_sync_func is None or self._index == 0
        ):
            self._release_sync()
        # Megatron sets them in each forward. The last one here may be of the next
        # batch, which has another scale.
        share = 1.0 if config.calculate_per_token_loss else 1 / self.shape.microbatches
        if config.num_moe_experts is not None:
            scale = megatron_schedules._get_moe_loss_scale(config, output.device)
            whole = config.calculate_per_token_loss
            MoEAuxLossAutoScaler.set_loss_scale(
                scale * share * (1 if whole else self._call.groups.cp.size())
            )
        if config.mtp_num_layers is not None:
            MTPLossAutoScaler.set_loss_scale(
                megatron_schedules._get_mtp_loss_scale(config, output.device) * share
            )
        return megatron_schedules.backward_step(received, output, gradient, config)

    def end_batch(self, batch: int) -> torch.Tensor | None:
        """After the last backward of a batch: start its reduction if it has not
        started. Returns the batch's tokens on this stage, an int tensor of one element,
        with per-token loss."""
        config = self._call.config
        if self._no_sync is not None:
            self._release_sync()
            if config.grad_sync_func is not None:
                config.grad_sync_func(self._call.model.parameters())
        if not config.calculate_per_token_loss:
            return None
        # Megatron's zero is on the host; a copy of it would wait for the GPU
        if self._index < self.shape.stages - 1:
            return torch.zeros((), dtype=torch.int, device="cuda")
        return self._batches[batch].tokens.to(torch.int, copy=True)

    def finalize_grads(self, batch: int) -> None:
        """Data-parallel reduction, tied embeddings, token count: Megatron's own
        finalize function, at a flush."""
        tokens, call = self.end_batch(batch), self._call
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
