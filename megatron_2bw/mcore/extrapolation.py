"""Extrapolated weights: gradients are taken near the weights that they change.

A weight store holds the working copy W'(j) of flags/correction.py in model precision. The true W(j) are the optimizer's
main parameters; they are what is evaluated and saved as the model's weights.

Invariants: W' is computed in fp32, from main parameters before and after Megatron's own step, and from the gradients
and second moments of that step; after a skipped step W'(j+1) = W(j+1) = W(j); nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from megatron_2bw.core.weights import WeightStores
from megatron_2bw.mcore.grad_buffers import GradientSlots
from megatron_2bw.mcore.proxies import Proxies
from megatron_2bw.portions import portions

# Where Megatron's optimizers hold the fp32 main parameters (or shards of them) that they copy to the model's.
MAIN_GROUPS = ("fp32_from_float16_groups", "shard_fp32_from_float16_groups", "shard_fp32_groups")
# Classes of torch, Apex and Transformer Engine whose last gradient's part of an update can be computed on its own.
ADAM, SGD = ("Adam", "AdamW", "FusedAdam"), ("SGD", "FusedSGD")
AT_A_TIME = 1 << 26  # elements whose denominators exist at the same time


class Lead(NamedTuple):
    """What W' adds to W: `factor` of the last update, `gradient` times the last gradient's part of it."""

    factor: float = 0.0
    gradient: float = 0.0


class Extrapolation:
    """Lets Megatron's optimizer write W' where it would write W.

    parts   Megatron's optimizers of the stage, which step the proxies of the parameters
    stores  the weight versions; the newest is the true W now
    takes_gradients  whether a lead may have a gradient term

    Bytes: fp32 parameters of the model, which an optimizer would step in their weight store, get main parameters (4 a
    parameter; the distributed optimizer's have them already). While a step runs, the main parameters before it: 4 a
    parameter of mixed precision, divided by the width with the distributed optimizer; and, with a gradient term, 4 for
    each of AT_A_TIME elements or of the largest parameter.
    """

    def __init__(self, parts: Iterable[Any], stores: WeightStores, takes_gradients: bool):
        self._parts, self._takes_gradients, self._lead = list(parts), takes_gradients, Lead()
        self._params = stores.params
        in_place = [] if stores.buffer_data else [param for param in stores.params if param.dtype == torch.float32]
        self.main = {param: param.detach().clone() for param in in_place}
        self._copy = {}  # by part, Megatron's method that writes its main parameters to the model's
        self._before: dict[Any, list[torch.Tensor]] = {}  # by part, its main parameters before the step
        for part in self._parts:
            if part.optimizer is not None and hasattr(part, "_copy_main_params_to_model_params"):
                self._copy[part] = part._copy_main_params_to_model_params
                part._copy_main_params_to_model_params = partial(self._copy_extrapolated, part)

    def before_step(self, views: Sequence[torch.Tensor], lead: Lead) -> None:
        """Keep the weights that the step will change.

        views  the parameters in the store that is written, in the order of the stores
        lead   of the W' that the store gets; Lead() is W
        """
        self._lead = lead
        self._before = {part: [main.detach().clone() for main in _mains(part)] for part in self._copy}
        for param, view in zip(self._params, views):
            if param in self.main:
                view.copy_(self.main[param])

    def after_step(self, views: Sequence[torch.Tensor], proxies: Proxies) -> None:
        """Write the parameters that have a main parameter in `main`; the step has written the others."""
        mine = [(param, view) for param, view in zip(self._params, views) if param in self.main]
        if mine:
            stepped = [proxies.of(param) for param, _ in mine]
            self._extrapolate([view for _, view in mine], [self.main[param] for param, _ in mine], stepped)

    def write_true(self, views: Sequence[torch.Tensor]) -> None:
        """Write W to a store; with the distributed optimizer this rank's shards of it. Ends a skipped step."""
        self._before.clear()
        for copy in self._copy.values():
            copy()
        for param, view in zip(self._params, views):
            if param in self.main:
                view.copy_(self.main[param])

    def _copy_extrapolated(self, part: Any) -> None:
        """Megatron's copy from main to model parameters, with W' as the main parameters."""
        working = self._before.pop(part, None)
        if working is None:
            self._copy[part]()
            return
        mains = _mains(part)
        true = [main.data for main in mains]
        self._extrapolate(working, true, mains)
        for main, tensor in zip(mains, working):
            main.data = tensor
        try:
            self._copy[part]()
        finally:
            for main, tensor in zip(mains, true):
                main.data = tensor

    def _extrapolate(
        self, before: list[torch.Tensor], now: list[torch.Tensor], stepped: Sequence[torch.Tensor]
    ) -> None:
        """Turn `before` into W'; exactly `now` with a lead of zeros.

        stepped  the tensors by which the optimizers know `now`, with the gradients of the step
        """
        # The same kernels and the same memory with every lead: the first W' uses none for the first time in training.
        if before:
            torch._foreach_lerp_(before, now, 1 + self._lead.factor)
        working = {id(tensor): ahead for tensor, ahead in zip(stepped, before)}
        for part in self._parts if self._takes_gradients else ():
            for group in part.optimizer.param_groups if part.optimizer is not None else ():
                tensors = [tensor for tensor in group["params"] if id(tensor) in working and tensor.grad is not None]
                for some in portions(tensors, torch.Tensor.numel, AT_A_TIME):
                    ahead = [working[id(tensor)] for tensor in some]
                    add_gradients(part.optimizer, group, some, ahead, self._lead.gradient)


def add_gradients(
    optimizer: Any, group: dict[str, Any], stepped: list[torch.Tensor], working: list[torch.Tensor], times: float
) -> None:
    """Add to `working`, `times` over, what the last gradients contributed to the last update of `stepped`.

    Adam: -(1 - beta1) rate g / (sqrt(v / (1 - beta2^t)) + eps); SGD: -rate g. Nothing for other optimizers.
    """
    kind, rate = type(optimizer).__name__, float(group["lr"])
    gradients = [tensor.grad for tensor in stepped]
    if kind in SGD:
        torch._foreach_add_(working, gradients, alpha=-times * rate)
    elif kind in ADAM:
        beta1, beta2 = group["betas"]
        states = [optimizer.state[tensor] for tensor in stepped]
        # torch counts in the state. Megatron leaves the saved count of a resumed run in the group, where Apex counts.
        count = float(states[0]["step"] if "step" in states[0] else group["step"])
        below = torch._foreach_sqrt([state["exp_avg_sq"] for state in states])
        torch._foreach_div_(below, (1 - beta2**count) ** 0.5)
        torch._foreach_add_(below, group["eps"])
        torch._foreach_addcdiv_(working, gradients, below, value=-times * (1 - beta1) * rate)


def _mains(part: Any) -> list[torch.Tensor]:
    return [main for name in MAIN_GROUPS for group in getattr(part, name, ()) for main in group]


class WorkingCopy:
    """The working copy W' of the newest weights in the weight stores, and its swap with the true W.

    saved  the first version's working copy, by parameter; empty: the stores hold the true weights
    """

    def __init__(
        self,
        extrapolation: Extrapolation,
        stores: WeightStores,
        slots: GradientSlots,
        proxies: Proxies,
        saved: Mapping[torch.nn.Parameter, torch.Tensor] | None = None,
    ):
        self._extrapolation, self._stores, self._slots, self._proxies = extrapolation, stores, slots, proxies
        self.extrapolated = bool(saved)  # the newest version's store holds its working copy
        self._stashed: list[torch.Tensor] | None = None  # that copy, while the store holds the true weights
        for param, view in zip(stores.params, stores.values(stores.newest) if saved else ()):
            view.copy_(saved[param])

    def step(self, megatron_step: Callable[[], tuple], views: Sequence[torch.Tensor], lead: Lead) -> tuple:
        """Megatron's step, which writes the parameters' `views` in a weight store; returns what Megatron's returns."""
        self._extrapolation.before_step(views, lead)
        result = megatron_step()
        if result[0]:
            self._extrapolation.after_step(views, self._proxies)
        else:
            self._write_true(views)
        return result

    def swap_in_true_weights(self) -> None:
        """Write the true W(newest) to its store, until `restore`. Between batches, when no step is pending.

        The working copy is kept in the memory of the gradients, which is free then.
        """
        if not self.extrapolated or self._stashed is not None:
            return
        version = self._stores.newest
        views, target = self._stores.values(version), self._stores.slot(version)
        with torch.no_grad():
            self._stashed = self._slots.stash(self._stores.params, views)
            self._proxies.point_to(views)
            with self._proxies.in_optimizer(target):
                self._write_true(views)

    def restore(self) -> None:
        """Undo `swap_in_true_weights`, before the next batch."""
        if self._stashed is not None:
            for view, copy in zip(self._stores.values(self._stores.newest), self._stashed):
                view.copy_(copy)
            self._stashed = None

    def values(self) -> dict[torch.nn.Parameter, torch.Tensor]:
        """The newest version's working copy, by parameter; between `swap_in_true_weights` and `restore`.

        Where nothing is extrapolated yet it equals the true weights: all checkpoints of a run have the same entries.
        """
        copies = self._stores.values(self._stores.newest) if self._stashed is None else self._stashed
        return dict(zip(self._stores.params, copies))

    def _write_true(self, views: Sequence[torch.Tensor]) -> None:
        self._extrapolation.write_true(views)
        if self._stores.buffer_data:
            self._proxies.gathering.gather()


def resume_note(saved: float | str | None, correction: object | None) -> str:
    """A resumed run's log note if its checkpoint's weights have another correction; empty if they have the same."""
    before, after = (
        None if each is None else f"{each:g}" if isinstance(each, float) else str(each) for each in (saved, correction)
    )
    if before == after:
        return ""
    before, after = ("not extrapolated" if each is None else f"extrapolated by {each}" for each in (before, after))
    return f": {before} at first, {after} from then on"
