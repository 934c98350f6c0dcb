"""The next weights, predicted from the gradient that a stage already has
(--two-bw-correction predict).

Before the first forward of batch j + 1 a stage has run a part of the backwards of batch
j. W(j) and the optimizer's moments are complete then. The microbatches of batch j + 1
run on

    W'(j) = W(j) + (1 + ahead) (V(j+1) - W(j)).

V(j+1) is the optimizer's step from W(j) with an estimate of the gradient of batch j:
the gradient so far divided by the part of the batch that it is of, and clipped as the
last one was. Its square counts in Adam's second moment by that part: it has more noise
than the gradient of a batch. W(j+1) itself is Megatron's own step of the complete
gradient.

The estimate is the mean of the past gradients, as the optimizer's momentum has it, for
parameters whose gradient is a sum over stages or tensor-parallel ranks (tied
embeddings; layer norms under sequence parallelism): their copies stay equal without a
message. The same holds for each element that is inf or nan under a loss scale.

Invariant: nothing here waits for the GPU, or for another stage.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_2bw.base.portions import portions
from megatron_2bw.mcore.correction import Correction
from megatron_2bw.mcore.grad_buffers import Slot
from megatron_2bw.mcore.working_copy import (
    AT_A_TIME,
    SGD,
    WorkingCopy,
    adam_denominators,
    mains_of,
    steps_of,
    with_mains,
)


@dataclass(frozen=True)
class Estimate:
    """How the gradient of a batch is estimated by its part that is known.

    part   of the batch's microbatches
    times  what the gradients so far are multiplied by
    """

    part: float
    times: float | Tensor


class PredictedCopy(WorkingCopy):
    """The working copy that is predicted: a step leaves W in the store, and `predict`
    replaces it by W'.

    Bytes during `predict`: 4 a parameter, divided by the width with the distributed
    optimizer, and 12 for each of AT_A_TIME elements or of the largest parameter.
    """

    def step(
        self,
        megatron_step: Callable[[], tuple],
        views: Sequence[Tensor],
        correction: Correction,
    ) -> tuple:
        result = megatron_step()
        if result[0]:
            self._write_own(views)
        else:
            self._write_true(views)
        return result

    def values(self) -> dict[Parameter, Tensor]:
        """None: between two batches the newest store holds the true weights."""
        return {}

    @torch.no_grad()
    def predict(self, slot: Slot, estimate: Estimate, ahead: float) -> None:
        """Write W' to the newest store.

        slot  the gradients so far of the batch that is under way
        """
        with self._with_gradients(slot) as views:
            predicted = self._predicted(estimate, ahead)
            for part in self._copy:
                mains = mains_of(part)
                working = [predicted.get(id(main), main.data) for main in mains]
                self._copy_values(part, working)
            for param, view in zip(self._stores.params, views):
                proxy = self._proxies.of[param]
                if param in self._proxies.mains:
                    view.copy_(predicted.get(id(proxy), proxy))
            if self._stores.buffer_data:
                self._proxies.gather()

    @torch.no_grad()
    def rehearse(self, slot: Slot) -> None:
        """Run the kernels of `predict` that no step has run."""
        with self._with_gradients(slot):
            self._predicted(Estimate(part=1.0, times=1.0), ahead=0.0)

    @contextlib.contextmanager
    def _with_gradients(self, slot: Slot) -> Iterator[list[Tensor]]:
        """Inside, Megatron's optimizers have these gradients. Yields the parameters in
        the newest store, which they write."""
        version = self._stores.newest
        views = self._stores.values(version)
        self._proxies.point_to(views)
        self._proxies.use_gradients(slot)
        with self._proxies.in_optimizer(self._stores.slot(version)):
            yield views

    def _predicted(self, estimate: Estimate, ahead: float) -> dict[int, Tensor]:
        """W' by the id of what Megatron's optimizers step."""
        predicted: dict[int, Tensor] = {}
        for part in self._parts:
            if part.optimizer is not None:
                take_gradients(part)
                summed = self._summed_over_ranks(part)
                for group in part.optimizer.param_groups:
                    predicted |= _predict(
                        part.optimizer, group, summed, estimate, ahead
                    )
        return predicted

    def _summed_over_ranks(self, part: Any) -> set[int]:
        """The ids of what an optimizer steps, of the parameters whose gradients
        Megatron's finalize function sums over stages or tensor-parallel ranks."""
        config = self._proxies.model.config
        several = config.tensor_model_parallel_size > 1
        params = set()
        for name, param in self._proxies.model.named_parameters():
            over_ranks = several and (
                getattr(param, "sequence_parallel", False)
                or getattr(param, "average_gradients_across_tp_domain", False)
                or (config.qk_layernorm and re.search("[qk]_layernorm", name))
            )
            if over_ranks or getattr(param, "shared_embedding", False):
                params.add(id(param))
        for param, main in with_mains(part):
            if id(param) in params:
                params.add(id(main))
        return params


def _predict(
    optimizer: Any,
    group: dict[str, Any],
    summed: set[int],
    estimate: Estimate,
    ahead: float,
) -> dict[int, Tensor]:
    """W' of the tensors of a group that have been stepped, by their ids.

    summed  see `PredictedCopy._summed_over_ranks`
    """
    own: list[Tensor] = []
    of_means: list[Tensor] = []
    for tensor in group["params"]:
        if tensor.grad is not None and steps_of(optimizer, group, tensor):
            tensors = of_means if id(tensor) in summed else own
            tensors.append(tensor)
    predicted: dict[int, Tensor] = {}
    for some in portions(own, Tensor.numel, AT_A_TIME):
        gradients = _estimated(optimizer, group, some, estimate.times)
        stepped = next_weights(optimizer, group, some, gradients, estimate.part)
        working = torch._foreach_lerp(some, stepped, 1 + ahead)
        predicted |= zip(map(id, some), working)
    for some in portions(of_means, Tensor.numel, AT_A_TIME):
        gradients = mean_gradients(optimizer, group, some)
        stepped = next_weights(optimizer, group, some, gradients)
        working = torch._foreach_lerp(some, stepped, 1 + ahead)
        predicted |= zip(map(id, some), working)
    for tensor in group["params"]:
        tensor.grad = None
    return predicted


def _estimated(
    optimizer: Any,
    group: dict[str, Any],
    tensors: list[Tensor],
    times: float | Tensor,
) -> list[Tensor]:
    gradients = torch._foreach_mul([tensor.grad for tensor in tensors], times)
    if isinstance(times, Tensor):  # with a loss scale
        means = mean_gradients(optimizer, group, tensors)
        for gradient, mean in zip(gradients, means):
            is_known = torch.isfinite(gradient)
            gradient.copy_(torch.where(is_known, gradient, mean))
    return gradients


def take_gradients(part: Any) -> None:
    """Let what an optimizer of Megatron steps have the gradients of the proxies."""
    if hasattr(part, "_copy_model_grads_to_main_grads"):
        part._copy_model_grads_to_main_grads()
        return
    for group in part.optimizer.param_groups:
        for param in group["params"]:
            param.grad = param.main_grad


def is_sgd(optimizer: Any) -> bool:
    return type(optimizer).__name__ in SGD


def mean_gradients(
    optimizer: Any, group: dict[str, Any], tensors: list[Tensor]
) -> list[Tensor]:
    """The mean of past gradients that the momentum of an optimizer holds; 0 without
    momentum."""
    states = [optimizer.state[tensor] for tensor in tensors]
    if not is_sgd(optimizer):
        count = steps_of(optimizer, group, tensors[0])
        bias = 1 - group["betas"][0] ** count
        return torch._foreach_div([state["exp_avg"] for state in states], bias)
    if not group["momentum"]:
        return torch._foreach_mul(tensors, 0.0)
    sums = [state["momentum_buffer"] for state in states]
    return torch._foreach_mul(sums, 1 - group["momentum"])


def next_weights(
    optimizer: Any,
    group: dict[str, Any],
    tensors: list[Tensor],
    gradients: list[Tensor],
    part: float = 1.0,
) -> list[Tensor]:
    """A step of `tensors` with these gradients, which are overwritten, in the order of
    torch's additions.

    part  see `Estimate`
    """
    rate = float(group["lr"])
    decay = group["weight_decay"]
    if is_sgd(optimizer):
        torch._foreach_add_(gradients, tensors, alpha=decay)
        if group["momentum"]:
            sums = [optimizer.state[tensor]["momentum_buffer"] for tensor in tensors]
            sums = torch._foreach_mul(sums, group["momentum"])
            torch._foreach_add_(gradients, sums)
        return torch._foreach_add(tensors, gradients, alpha=-rate)
    if is_decoupled(optimizer, group):
        stepped = torch._foreach_mul(tensors, 1 - rate * decay)
    else:
        torch._foreach_add_(gradients, tensors, alpha=decay)
        stepped = [tensor.clone() for tensor in tensors]
    beta1, beta2 = group["betas"]
    count = steps_of(optimizer, group, tensors[0]) + 1
    means = [optimizer.state[tensor]["exp_avg"] for tensor in tensors]
    means = torch._foreach_lerp(means, gradients, 1 - beta1)
    squares = [optimizer.state[tensor]["exp_avg_sq"] for tensor in tensors]
    squares = torch._foreach_mul(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, value=part * (1 - beta2))
    below = adam_denominators(group, squares, count)
    torch._foreach_addcdiv_(
        stepped, means, below, value=-rate / (1 - beta1**count)
    )
    return stepped


def is_decoupled(optimizer: Any, group: dict[str, Any]) -> bool:
    """Whether Adam's weight decay is not part of the gradient."""
    apex = getattr(optimizer, "adam_w_mode", type(optimizer).__name__ == "AdamW")
    return bool(group.get("decoupled_weight_decay", apex))
