"""What the routers of a mixture of experts keep that is no parameter, while
microbatches of two batches are in flight.

Megatron adds to it in forwards (in backwards, where a layer is recomputed), and reads
and clears it once a batch, when its gradients are reduced. Here the next batch's
forwards run by then, and the step is in another thread.

Invariants: an expert's bias has the version of the weights with which it routes; token
counts and logged losses belong to one batch; the training thread touches neither the
counts nor the losses of a batch after its REDUCE.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import moe_logging
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron_2bw.engine.updates import PerBatch

# sums over the microbatches of a batch
COUNTS = ("local_tokens_per_expert", "global_tokens_per_expert", "ga_steps")
# of the pipelines the mean, and sums
HEADS = ("loss_values", "correct_values", "total_values")
# Megatron's names of those it logs
LOSSES = {"aux_loss": "", "seq_aux_loss": "seq_", "global_aux_loss": "global_"}


@dataclass(frozen=True)
class RouterBatch:
    """The routers' part of one batch, which its step has.

    modules  what Megatron's finalize function reads of the routers, and the biases that
             it changes
    tracker  of the auxiliary losses
    heads    Megatron's tracker of the losses of --mtp-num-layers
    """

    modules: list[SimpleNamespace]
    tracker: Any
    heads: dict[str, Any]


class Routers(PerBatch):
    """The routers of a stage; none on a stage of dense layers, which has a part in the
    reductions all the same.

    model   the model chunk
    first   the first batch, whose weights are W(first)
    shadow  the biases of W(first - 1), by the present ones; without an entry they are
            equal
    """

    def __init__(
        self,
        model: Any,
        config: Any,
        first: int,
        shadow: Mapping[torch.Tensor, torch.Tensor],
    ):
        self._config = config
        self._routers = [
            module for module in model.modules() if isinstance(module, TopKRouter)
        ]
        for router in self._routers:
            router._maintain_float32_expert_bias()
        biases = [router.expert_bias for router in self._routers]
        now = [None if bias is None else bias.data for bias in biases]
        before = [
            bias if bias is None else shadow.get(bias, bias.data) for bias in biases
        ]
        self._biases = {first: now, first - 1: before}  # by weight version
        self._batches: dict[int, RouterBatch] = {}

    # The training thread calls the following.

    def bind(self, version: int, batch: int | None) -> None:
        """Route by the biases of W(version); count tokens and losses for `batch`."""
        for router, bias in zip(self._routers, self._biases[version]):
            if bias is not None:
                router.expert_bias.data = bias
        if batch is None:
            return
        own = self._batches.get(batch) or self._batches.setdefault(batch, self._begin())
        for router, module in zip(self._routers, own.modules):
            for name in filter(vars(module).__contains__, COUNTS):
                getattr(router, name).data = getattr(module, name)
        moe_logging.set_moe_metrics_tracker(own.tracker)
        MTPLossLoggingHelper.tracker = own.heads

    def _begin(self) -> RouterBatch:
        always, modules = (
            dict(training=True, reset_global_aux_loss_tracker=lambda: None),
            [],
        )
        for router in self._routers:
            counted = [
                (name, tensor)
                for name in COUNTS
                if (tensor := getattr(router, name, None)) is not None
            ]
            modules.append(
                SimpleNamespace(
                    **always,
                    **{name: torch.zeros_like(tensor) for name, tensor in counted},
                )
            )
        return RouterBatch(modules, moe_logging.MoEMetricsTracker(), {})

    def end_batch(self, batch: int) -> RouterBatch:
        """After the last backward of `batch`: what its step has."""
        own = self._batches.pop(batch)
        for module, bias in zip(own.modules, self._biases[batch]):
            if bias is not None:
                module.expert_bias = bias.clone()
        return own

    def complete(self, batch: int, result: Any) -> None:
        """Megatron changes the biases in skipped steps too."""
        self._biases[batch + 1] = [
            getattr(module, "expert_bias", None) for module in result.losses.modules
        ]
        self._biases.pop(batch - 1, None)

    def shadow(self, newest: int) -> dict[torch.Tensor, torch.Tensor]:
        """The biases of W(newest - 1), by the routers' own."""
        pairs = zip(self._routers, self._biases[newest - 1])
        return {router.expert_bias: bias for router, bias in pairs if bias is not None}

    # The step's thread calls the following.

    def reduce_losses(
        self, own: RouterBatch, groups: Any, twin_of: Callable[[Any], Any]
    ) -> None:
        """Sum the auxiliary losses over all stages and pipelines, as Megatron does for
        the log line."""
        config, tracker, heads = self._config, own.tracker, own.heads
        for name in [name for name in HEADS if name in heads]:
            dist.all_reduce(heads[name], group=groups.dp_cp)
            heads[name] /= groups.dp_cp.size() if name == HEADS[0] else 1
            heads["avg_group"] = None
        if config.num_moe_experts is None:
            return
        kinds = config.moe_router_load_balancing_type
        names = [
            f"{prefix}load_balancing_loss"
            for kind, prefix in LOSSES.items()
            if kind in kinds
        ]
        for name in names + ["z_loss"] * (config.moe_z_loss_coeff is not None):
            tracker.ensure_initialized(
                name, config.num_layers + (config.mtp_num_layers or 0)
            )
            entry = tracker.metrics[name]
            entry.reduce_group, entry.avg_group = (
                twin_of(entry.reduce_group),
                twin_of(entry.avg_group),
            )
            tracker._sync_metrics([name], groups)
        tracker._sync_metrics = lambda names, groups=None: None
