"""What the routers of a mixture of experts keep that is no parameter, while
microbatches of two batches are in flight.

Megatron adds to it in forwards (in backwards, where a layer is recomputed), and reads
and clears it once a batch, when its gradients are reduced. Here the next batch's
forwards run by then, and the step is in another thread.

Invariants: an expert's bias has the version of the weights with which it routes; token
counts and logged losses belong to one batch; the training thread touches neither the
counts nor the losses of a batch after its REDUCE.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import moe_logging
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch import Tensor

from megatron_2bw.engine.updates import PerBatch
from megatron_2bw.mcore.rebinding import constant

# sums over the microbatches of a batch
COUNTS = ("local_tokens_per_expert", "global_tokens_per_expert", "ga_steps")
# of the pipelines the mean, and sums
HEADS = ("loss_values", "correct_values", "total_values")
# by --moe-router-load-balancing-type, Megatron's names in its log
LOSSES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}


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
        shadow: Mapping[Tensor, Tensor],
    ):
        self._config = config
        self._routers = []
        newest = []
        older = []
        for router in model.modules():
            if isinstance(router, TopKRouter):
                router._maintain_float32_expert_bias()
                self._routers.append(router)
                bias = router.expert_bias
                newest.append(None if bias is None else bias.data)
                older.append(shadow.get(bias, newest[-1]))
        self._biases = {first: newest, first - 1: older}  # by weight version
        self._batches = {}

    # The training thread calls the following.

    def bind(self, version: int, batch: int | None) -> None:
        """Route by the biases of W(version); count tokens and losses for `batch`."""
        for router, bias in zip(self._routers, self._biases[version]):
            if bias is not None:
                router.expert_bias.data = bias
        if batch is None:
            return
        if batch not in self._batches:
            self._batches[batch] = self._begin()
        own = self._batches[batch]
        for router, module in zip(self._routers, own.modules):
            for name in COUNTS:
                if hasattr(module, name):
                    getattr(router, name).data = getattr(module, name)
        moe_logging.set_moe_metrics_tracker(own.tracker)
        MTPLossLoggingHelper.tracker = own.heads

    def _begin(self) -> RouterBatch:
        modules = []
        for router in self._routers:
            module = SimpleNamespace(
                training=True, reset_global_aux_loss_tracker=constant(None)
            )
            for name in COUNTS:
                tensor = getattr(router, name, None)
                if tensor is not None:
                    setattr(module, name, torch.zeros_like(tensor))
            modules.append(module)
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
        modules = result.losses.modules
        biases = [getattr(module, "expert_bias", None) for module in modules]
        self._biases[batch + 1] = biases
        self._biases.pop(batch - 1, None)

    def shadow(self, newest: int) -> dict[Tensor, Tensor]:
        """The biases of W(newest - 1), by the routers' own."""
        biases = {}
        for router, bias in zip(self._routers, self._biases[newest - 1]):
            if bias is not None:
                biases[router.expert_bias] = bias
        return biases

    # The step's thread calls the following.

    def reduce_losses(self, own: RouterBatch, groups: Any, twin_of: Callable) -> None:
        """Sum the auxiliary losses over all stages and pipelines, as Megatron does for
        the log line."""
        for name in HEADS:
            if name in own.heads:
                dist.all_reduce(own.heads[name], group=groups.dp_cp)
                if name == "loss_values":
                    own.heads[name] /= groups.dp_cp.size()
                own.heads["avg_group"] = None
        config = self._config
        if config.num_moe_experts is None:
            return
        names = []
        for kind, name in LOSSES.items():
            if kind in config.moe_router_load_balancing_type:
                names.append(name)
        if config.moe_z_loss_coeff is not None:
            names.append("z_loss")
        layers = config.num_layers + (config.mtp_num_layers or 0)
        for name in names:
            own.tracker.ensure_initialized(name, layers)
            entry = own.tracker.metrics[name]
            entry.reduce_group = twin_of(entry.reduce_group)
            entry.avg_group = twin_of(entry.avg_group)
            own.tracker._sync_metrics([name], groups)
        own.tracker._sync_metrics = constant(None)
