"""The next weights, predicted from the gradient that a stage already has
(--two-bw-correction predict).

Before the first forward of batch j + 1 a stage has run a part of the backwards of batch
j. W(j) and the optimizer's state are complete then. The microbatches of batch j + 1 run
on

    W'(j) = W(j) + (1 + ahead) (V(j+1) - W(j)).

V(j+1) is the optimizer's own step from W(j), on copies, with an estimate of the
gradient of batch j: the gradient so far divided by the part of the batch that it is of,
and clipped as the last one was. W(j+1) itself is Megatron's step of the complete
gradient.

The estimate is the mean of past gradients, as the optimizer's momentum has it, for
parameters whose gradient is a sum over stages or tensor-parallel ranks (tied
embeddings; layer norms under sequence parallelism): their copies stay equal without a
message. Under a loss scale it is 0 where the gradient so far is inf or nan.

Invariant: nothing here waits for another stage; without replicas of the stage nothing
waits for the GPU.
"""

import contextlib
import copy
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
    WorkingCopy,
    mains_of,
    with_mains,
)


@dataclass(frozen=True)
class Estimate:
    """The estimated gradient: `times` the `slot`, in which it accumulates. times is a
    tensor under a loss scale."""

    slot: Slot
    times: float | Tensor


class PredictedCopy(WorkingCopy):
    """The working copy that is predicted: a step leaves W in the store, and `predict`
    replaces it by W'.

    Bytes during `predict`: 4 a parameter, divided by the width with the distributed
    optimizer; and for AT_A_TIME elements, or those of the largest parameter, a copy of
    gradient, weight and the optimizer's state.
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
    def predict(self, estimate: Estimate, ahead: float) -> None:
        """Write W' to the newest store."""
        with self._predicted(estimate, ahead) as predicted:
            for part in self._copy:
                mains = mains_of(part)
                working = [predicted.get(id(main), main.data) for main in mains]
                self._copy_values(part, working)
            views = self._stores.values(self._stores.newest)
            for param, view in zip(self._stores.params, views):
                proxy = self._proxies.of[param]
                if param in self._proxies.mains:
                    view.copy_(predicted.get(id(proxy), proxy))
            if self._stores.buffer_data:
                self._proxies.gather()

    @torch.no_grad()
    def rehearse(self, estimate: Estimate) -> None:
        """Run the kernels of `predict` that no step has run."""
        with self._predicted(estimate, ahead=0.0):
            pass

    @contextlib.contextmanager
    def _predicted(
        self, estimate: Estimate, ahead: float
    ) -> Iterator[dict[int, Tensor]]:
        """W' by the id of what Megatron's optimizers step. Inside, they write the newest
        store."""
        version = self._stores.newest
        self._proxies.point_to(self._stores.values(version))
        self._proxies.use_gradients(estimate.slot)
        with self._proxies.in_optimizer(self._stores.slot(version)):
            predicted: dict[int, Tensor] = {}
            for part in self._parts:
                if part.optimizer is not None:
                    _take_gradients(part)
                    means = self._summed_over_ranks(part)
                    for group in part.optimizer.param_groups:
                        step = _GroupStep(part.optimizer, group, means)
                        predicted |= step.predict(estimate.times, ahead)
            yield predicted

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


def _take_gradients(part: Any) -> None:
    """Let what an optimizer of Megatron steps have the gradients of the proxies."""
    if hasattr(part, "_copy_model_grads_to_main_grads"):
        part._copy_model_grads_to_main_grads()
        return
    for group in part.optimizer.param_groups:
        for param in group["params"]:
            param.grad = param.main_grad


@dataclass(frozen=True)
class _GroupStep:
    """The step of a parameter group that an optimizer will do.

    means  ids of the tensors whose estimate is the mean of past gradients
    """

    optimizer: Any
    group: dict[str, Any]
    means: set[int]

    def predict(self, times: float | Tensor, ahead: float) -> dict[int, Tensor]:
        """W' of the tensors, by their ids."""
        tensors = [each for each in self.group["params"] if each.grad is not None]
        predicted: dict[int, Tensor] = {}
        for some in portions(tensors, Tensor.numel, AT_A_TIME):
            so_far = [tensor.grad for tensor in some]
            estimates = torch._foreach_mul(so_far, times)
            for tensor, estimate in zip(some, estimates):
                if id(tensor) in self.means:
                    estimate.copy_(self._mean_gradient(tensor))
                elif isinstance(times, Tensor):
                    estimate.nan_to_num_(0.0, 0.0, 0.0)
                tensor.grad = estimate
            working = torch._foreach_lerp(some, self._stepped(some), 1 + ahead)
            predicted |= zip(map(id, some), working)
            for tensor in some:
                tensor.grad = None
        return predicted

    def _mean_gradient(self, tensor: Tensor) -> Tensor:
        state = self.optimizer.state.get(tensor, {})
        if "exp_avg" in state:
            return state["exp_avg"]
        if state.get("momentum_buffer") is not None:  # a sum
            return state["momentum_buffer"] * (1 - self.group["momentum"])
        return torch.zeros_like(tensor)

    def _stepped(self, tensors: list[Tensor]) -> list[Tensor]:
        """The tensors after a step of the optimizer on copies of them and of its
        state."""
        optimizer = self.optimizer
        groups = optimizer.param_groups
        weights = [tensor.data for tensor in tensors]
        states = [optimizer.state.pop(tensor, None) for tensor in tensors]
        try:
            for tensor, weight, state in zip(tensors, weights, states):
                tensor.data = weight.clone()
                if state is not None:
                    optimizer.state[tensor] = copy.deepcopy(state)
            optimizer.param_groups = [self.group | {"params": tensors}]
            optimizer.step()
            return [tensor.data for tensor in tensors]
        finally:
            optimizer.param_groups = groups
            for tensor, weight, state in zip(tensors, weights, states):
                tensor.data = weight
                optimizer.state.pop(tensor, None)
                if state is not None:
                    optimizer.state[tensor] = state
