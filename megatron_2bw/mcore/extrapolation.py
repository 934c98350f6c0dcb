"""Extrapolated weights: gradients are taken near the weights that they change.

With 2BW the gradient of batch j + 1 changes W(j+1), and is taken one update earlier. With this correction it is taken
at the working copy

    W'(j) = W(j) + factor (W(j) - W(j-1)),

which assumes that one update resembles the last (arXiv 2606.30634). A weight store holds W'(j) in model precision. The
true W(j) are the optimizer's main parameters; they are what is evaluated and saved as the model's weights.

Invariants: W' is computed in fp32, from main parameters before and after Megatron's own step; after a skipped step
W'(j+1) = W(j+1) = W(j); nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from megatron_2bw.core.weights import WeightStores
from megatron_2bw.mcore.grad_buffers import GradientSlots
from megatron_2bw.mcore.proxies import Proxies

# Where Megatron's optimizers hold the fp32 main parameters (or shards of them) that they copy to the model's.
MAIN_GROUPS = ("fp32_from_float16_groups", "shard_fp32_from_float16_groups", "shard_fp32_groups")
# Optimizers whose update is a running mean of gradients, and the decay of that mean.
DECAYS = {"adam": "adam_beta1", "sgd": "sgd_momentum", "muon": "muon_momentum", "soap": "adam_beta1"}


def warning(args) -> str | None:
    """A line for the user who gives too little momentum, or None.

    Where gradients are independent noise, extrapolation takes them sqrt(1 - 2 decay factor + factor^2) updates away
    from the weights that they change, and plain 2BW takes them one update away (docs/convergence.md).
    """
    decay = getattr(args, DECAYS.get(args.optimizer, ""), 1.0)
    if args.two_bw_correction != "extrapolate" or decay >= args.two_bw_correction_factor / 2:
        return None
    flag = "--" + DECAYS[args.optimizer].replace("_", "-")
    better = f", or give --two-bw-correction-factor {decay:g}" if decay else ""
    return (
        f"WARNING: --two-bw-correction extrapolate with {flag} {decay:g}: one update says little about the next, and "
        f"where gradients are mostly noise this is worse than no correction. Leave it out{better} (docs/convergence.md)"
    )


def uncorrected(args) -> str | None:
    """A line about a run of 2bw that has no option against the gradient delay, or None."""
    if args.pipeline_schedule != "2bw" or args.two_bw_correction != "none" or args.two_bw_sync_iterations != 0:
        return None
    return (
        "> 2bw: every gradient is late by one update, which raises the loss. --two-bw-correction extrapolate "
        "--two-bw-sync-iterations 20% recover most of it (docs/convergence.md)"
    )


class Extrapolation:
    """Lets Megatron's optimizer write W' where it would write W.

    parts   Megatron's optimizers of the stage, which step the proxies of the parameters
    stores  the weight versions; the newest is the true W now
    factor  0 (no correction) to 1

    Bytes: fp32 parameters of the model, which an optimizer would step in their weight store, get main parameters (4 a
    parameter; the distributed optimizer's have them already). While a step runs, the main parameters before it: 4 a
    parameter of mixed precision, divided by the width with the distributed optimizer.
    """

    def __init__(self, parts: Iterable[Any], stores: WeightStores, factor: float):
        self._factor, self._weight = factor, 1.0
        self._params = stores.params
        in_place = [] if stores.buffer_data else [param for param in stores.params if param.dtype == torch.float32]
        self.main = {param: param.detach().clone() for param in in_place}
        self._copy = {}  # by part, Megatron's method that writes its main parameters to the model's
        self._before: dict[Any, list[torch.Tensor]] = {}  # by part, its main parameters before the step
        for part in parts:
            if part.optimizer is not None and hasattr(part, "_copy_main_params_to_model_params"):
                self._copy[part] = part._copy_main_params_to_model_params
                part._copy_main_params_to_model_params = partial(self._copy_extrapolated, part)

    def before_step(self, views: Sequence[torch.Tensor], extrapolate: bool) -> None:
        """Keep the weights that the step will change.

        views        the parameters in the store that is written, in the order of the stores
        extrapolate  whether the store gets W'; else W, which is W' of factor 0
        """
        # The same kernels and the same memory either way: the first W' uses none for the first time during training.
        self._weight = 1 + (self._factor if extrapolate else 0.0)
        self._before = {part: [main.detach().clone() for main in _mains(part)] for part in self._copy}
        for param, view in zip(self._params, views):
            if param in self.main:
                view.copy_(self.main[param])

    def after_step(self, views: Sequence[torch.Tensor]) -> None:
        """Write the parameters that have a main parameter in `main`; the step has written the others."""
        for param, view in zip(self._params, views):
            if param in self.main:
                self._extrapolate([view], [self.main[param]])

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
        self._extrapolate(working, true)
        for main, tensor in zip(mains, working):
            main.data = tensor
        try:
            self._copy[part]()
        finally:
            for main, tensor in zip(mains, true):
                main.data = tensor

    def _extrapolate(self, before: list[torch.Tensor], now: list[torch.Tensor]) -> None:
        """Turn `before` into now + factor (now - before), in one pass over the memory; exactly `now` if it is 0."""
        if before:
            torch._foreach_lerp_(before, now, self._weight)


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

    def step(self, megatron_step: Callable[[], tuple], views: Sequence[torch.Tensor], extrapolate: bool) -> tuple:
        """Megatron's step, which writes the parameters' `views` in a weight store; returns what Megatron's returns."""
        self._extrapolation.before_step(views, extrapolate)
        result = megatron_step()
        if result[0]:
            self._extrapolation.after_step(views)
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


def resume_note(saved_factor: float | None, factor: float | None) -> str:
    """A resumed run's log note if its checkpoint's weights have another factor; empty if they have the same."""
    if saved_factor == factor:
        return ""
    before, after = (
        "not extrapolated" if each is None else f"extrapolated by {each:g} of an update"
        for each in (saved_factor, factor)
    )
    return f": {before} at first, {after} from then on"
