"""Extrapolated weights: gradients are taken near the weights that they change.

With 2BW the gradient of batch j + 1 changes W(j+1), and is taken one update earlier. With this correction it is taken
at the working copy

    W'(j) = W(j) + factor (W(j) - W(j-1)),

which guesses that one update resembles the last (arXiv 2606.30634). A weight store holds W'(j) in model precision; the
true W(j) are the optimizer's main parameters, and all that is evaluated or saved as the model's.

Invariants: W' is computed in fp32, from main parameters before and after Megatron's own step; after a skipped step
W'(j+1) = W(j+1) = W(j); nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from megatron_2bw.core.weights import WeightStores

# Where Megatron's optimizers hold the fp32 main parameters (or shards of them) that they copy to the model's.
MAIN_GROUPS = ("fp32_from_float16_groups", "shard_fp32_from_float16_groups", "shard_fp32_groups")
# Optimizers whose update is a running mean of gradients, and the decay of that mean.
DECAYS = {"adam": "adam_beta1", "sgd": "sgd_momentum", "muon": "muon_momentum", "soap": "adam_beta1"}


def warning(args) -> str | None:
    """A line for who gives too little momentum: noisy gradients make extrapolation worse than nothing then. Or None.

    Of independent noise it takes gradients sqrt(1 - 2 decay factor + factor^2) updates away from the weights that they
    change, where plain 2BW takes them one update away (docs/convergence.md).
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


class Extrapolation:
    """Lets the optimizer write W' where it would write W.

    parts   Megatron's optimizers of the stage, which step parameters that the caller has put in place
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
        """Note the weights that the step will change.

        views        the parameters in the store that is written, in the order of the stores
        extrapolate  whether the store is to hold W'; else W, which is W' of factor 0
        """
        # The same kernels and the same memory either way: none is new when the first W' is made, beside training.
        self._weight = 1 + (self._factor if extrapolate else 0.0)
        self._before = {part: [main.detach().clone() for main in _mains(part)] for part in self._copy}
        for param, view in zip(self._params, views):
            if param in self.main:
                view.copy_(self.main[param])

    def after_step(self, views: Sequence[torch.Tensor]) -> None:
        """Write the parameters whose main ones are `main`; the others were written in the step."""
        for param, view in zip(self._params, views):
            if param in self.main:
                self._extrapolate([view], [self.main[param]])

    def write_true(self, views: Sequence[torch.Tensor]) -> None:
        """Write W to a store, of the distributed optimizer's parameters this rank's shards. Ends a skipped step."""
        self._before.clear()
        for copy in self._copy.values():
            copy()
        for param, view in zip(self._params, views):
            if param in self.main:
                view.copy_(self.main[param])

    def _copy_extrapolated(self, part: Any) -> None:
        """Megatron's copy from main to model parameters, shown W' as the main ones."""
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


def going_on(then: float | None, now: float | None) -> str:
    """What the log says of a resumed run whose checkpoint has weights of the factor `then`: nothing if it is `now`."""
    if then == now:
        return ""
    before, after = (
        "not extrapolated" if factor is None else f"extrapolated by {factor:g} of an update" for factor in (then, now)
    )
    return f": {before} at first, {after} from then on"
