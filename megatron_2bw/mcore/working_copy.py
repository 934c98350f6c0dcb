"""The working copy: weights near those that a gradient changes, on which it is taken
(--two-bw-correction).

A weight store holds the working copy W'(j) of correction.py in model precision.
The true W(j) are the optimizer's main parameters; they are what is evaluated and saved
as the model's weights.

Invariants: W' is computed in fp32, from main parameters before and after Megatron's own
step, and from the gradients and second moments of that step; after a skipped step
W'(j+1) = W(j+1) = W(j); nothing here communicates, but for the distributed optimizer's
gathering of true weights.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_2bw.base.portions import portions
from megatron_2bw.engine.updates import PerBatch
from megatron_2bw.engine.weights import WeightStores
from megatron_2bw.mcore.correction import NO_CORRECTION, Correction
from megatron_2bw.mcore.grad_buffers import GradientSlots
from megatron_2bw.mcore.proxies import Proxies
from megatron_2bw.mcore.rebinding import replaced

# Where Megatron's optimizers hold parameters of the model, and the fp32 main parameters
# (or shards of them) that they copy to these.
MAIN_GROUPS = {
    "float16_groups": "fp32_from_float16_groups",
    "model_float16_groups": "shard_fp32_from_float16_groups",
    "model_fp32_groups": "shard_fp32_groups",
}
# Classes of torch, Apex and Transformer Engine whose last gradient's part of an update
# can be computed on its own.
ADAM, SGD = ("Adam", "AdamW", "FusedAdam"), ("SGD", "FusedSGD")
AT_A_TIME = 1 << 26  # elements whose denominators exist at the same time


def own_mains(
    stores: WeightStores, new: Callable = torch.empty_like
) -> dict[Parameter, Tensor]:
    """Main parameters for those that an optimizer would step in their weight store:
    fp32 parameters of the model.

    new: makes their memory.

    4 bytes a parameter; the distributed optimizer has main parameters of its own.
    """
    mains: dict[Parameter, Tensor] = {}
    if stores.buffer_data:
        return mains
    for param in stores.params:
        if param.dtype == torch.float32:
            mains[param] = new(param.detach()).copy_(param.detach())
    return mains


class WorkingCopy(PerBatch):
    """Lets Megatron's optimizer write W' where it would write W, and swaps the newest
    W' with the true W.

    parts    Megatron's optimizers of the stage, which step the proxies of the
             parameters
    stores   the weight versions
    slots    the gradients, in whose memory W' is kept between batches while W is in its
             place
    proxies  of the parameters, with the main parameters of `own_mains`
    takes_gradients  whether a correction may have a gradient term
    saved    the first version's working copy, by parameter; empty: the stores hold the
             true weights

    Bytes while a step runs: the main parameters before it, 4 a parameter of mixed
    precision, divided by the width with the distributed optimizer; and, with a gradient
    term, 4 for each of AT_A_TIME elements or of the largest parameter.
    """

    def __init__(
        self,
        parts: Sequence[Any],
        stores: WeightStores,
        slots: GradientSlots,
        proxies: Proxies,
        takes_gradients: bool,
        saved: Mapping[Parameter, Tensor] | None = None,
    ):
        self._parts = parts
        self._stores = stores
        self._slots = slots
        self._proxies = proxies
        self._takes_gradients = takes_gradients
        self._correction = NO_CORRECTION
        # the newest version's store holds its working copy, not the true weights
        self._in_store = bool(saved)
        # that copy, while the store holds the true weights
        self._stashed: list[Tensor] | None = None
        # by part, Megatron's method that writes its main parameters to the model's
        self._copy = {}
        # by part, its main parameters before the step
        self._before: dict[Any, list[Tensor]] = {}
        name = "_copy_main_params_to_model_params"
        for part in parts:
            if part.optimizer is not None and hasattr(part, name):
                self._copy[part] = getattr(part, name)
                setattr(part, name, partial(self._copy_working, part))
        if saved:
            for param, view in zip(stores.params, stores.values(stores.newest)):
                view.copy_(saved[param])

    def step(
        self,
        megatron_step: Callable[[], tuple],
        views: Sequence[Tensor],
        correction: Correction,
    ) -> tuple:
        """Megatron's step, which writes the parameters' `views` in a weight store;
        returns what Megatron's returns.

        views       the parameters in the store that is written, in the order of the
                    stores
        correction  of the W' that the store gets; with NO_CORRECTION it gets W
        """
        self._correction = correction
        for part in self._copy:
            self._before[part] = [main.detach().clone() for main in mains_of(part)]
        self._write_own(views)
        result = megatron_step()
        if result[0]:
            self._correct_own(views)
        else:
            self._write_true(views)
        return result

    def complete(self, batch: int, result: Any) -> None:
        self._in_store = bool(result.correction)

    def swap_in_true_weights(self) -> None:
        """Write the true W(newest) to its store, until `restore`. Between batches, when
        no step is pending.

        The working copy is kept in the memory of the gradients, which is free then.
        """
        if not self._in_store or self._stashed is not None:
            return
        version = self._stores.newest
        views = self._stores.values(version)
        target = self._stores.slot(version)
        with torch.no_grad():
            self._stashed = self._slots.stash(self._stores.params, views)
            self._proxies.point_to(views)
            with self._proxies.in_optimizer(target):
                self._write_true(views)

    def restore(self) -> None:
        """Undo `swap_in_true_weights`, before the next batch."""
        if self._stashed is None:
            return
        views = self._stores.values(self._stores.newest)
        for view, working in zip(views, self._stashed):
            view.copy_(working)
        self._stashed = None

    def values(self) -> dict[Parameter, Tensor]:
        """The newest version's working copy, by parameter; between
        `swap_in_true_weights` and `restore`.

        Where nothing is corrected yet it equals the true weights: all checkpoints of a
        run have the same entries.
        """
        copies = self._stashed
        if copies is None:
            copies = self._stores.values(self._stores.newest)
        return dict(zip(self._stores.params, copies))

    def _write_own(self, views: Sequence[Tensor]) -> None:
        for param, view in zip(self._stores.params, views):
            if param in self._proxies.mains:
                view.copy_(self._proxies.mains[param])

    def _correct_own(self, views: Sequence[Tensor]) -> None:
        """Correct what `_write_own` has written; the step has corrected the others."""
        before, now, stepped = [], [], []
        for param, view in zip(self._stores.params, views):
            if param in self._proxies.mains:
                before.append(view)
                now.append(self._proxies.mains[param])
                stepped.append(self._proxies.of[param])
        if before:
            self._correct(before, now, stepped)

    def _write_true(self, views: Sequence[Tensor]) -> None:
        """Write W to a store. Ends a skipped step."""
        self._before.clear()
        for copy in self._copy.values():
            copy()
        self._write_own(views)
        if self._stores.buffer_data:
            self._proxies.gather()

    def _copy_working(self, part: Any) -> None:
        """Megatron's copy from main to model parameters, with W' as the main
        parameters."""
        working = self._before.pop(part, None)
        if working is None:
            self._copy[part]()
            return
        mains = mains_of(part)
        self._correct(working, [main.data for main in mains], mains)
        self._copy_values(part, working)

    def _copy_values(self, part: Any, values: list[Tensor]) -> None:
        """Megatron's copy from main to model parameters, with these as the main
        parameters."""
        with contextlib.ExitStack() as undo:
            for main, tensor in zip(mains_of(part), values):
                undo.enter_context(replaced(main, data=tensor))
            self._copy[part]()

    def _correct(
        self,
        before: list[Tensor],
        now: list[Tensor],
        stepped: Sequence[Tensor],
    ) -> None:
        """Turn `before` into W'; exactly `now` without a correction.

        stepped  the tensors by which the optimizers know `now`, with the gradients of
                 the step
        """
        # The same kernels and the same memory with every correction: the first W' uses
        # none for the first time.
        if before:
            torch._foreach_lerp_(before, now, 1 + self._correction.factor)
        if not self._takes_gradients:
            return
        working = {id(tensor): ahead for tensor, ahead in zip(stepped, before)}
        for part in self._parts:
            if part.optimizer is None:
                continue
            for group in part.optimizer.param_groups:
                self._add_gradients(part.optimizer, group, working)

    def _add_gradients(
        self, optimizer: Any, group: dict[str, Any], working: dict[int, Tensor]
    ) -> None:
        """working: W' by the id of the tensor that the optimizer stepped"""
        tensors = []
        for tensor in group["params"]:
            if id(tensor) in working and tensor.grad is not None:
                tensors.append(tensor)
        for some in portions(tensors, Tensor.numel, AT_A_TIME):
            ahead = [working[id(tensor)] for tensor in some]
            add_gradients(optimizer, group, some, ahead, self._correction.gradient)


def add_gradients(
    optimizer: Any,
    group: dict[str, Any],
    stepped: list[Tensor],
    working: list[Tensor],
    times: float,
) -> None:
    """Add to `working`, `times` over, the last gradients' part D of the last update of
    `stepped` (correction.py).

    Adam: -(1 - beta1) rate g / (sqrt(v / (1 - beta2^t)) + eps); SGD: -rate g. Nothing
    for other optimizers.
    """
    kind = type(optimizer).__name__
    rate = float(group["lr"])
    gradients = [tensor.grad for tensor in stepped]
    if kind in SGD:
        torch._foreach_add_(working, gradients, alpha=-times * rate)
    elif kind in ADAM:
        beta1, beta2 = group["betas"]
        states = [optimizer.state[tensor] for tensor in stepped]
        # torch counts in the state. Megatron leaves the saved count of a resumed run in
        # the group, where Apex counts.
        count = float(states[0]["step"] if "step" in states[0] else group["step"])
        below = torch._foreach_sqrt([state["exp_avg_sq"] for state in states])
        torch._foreach_div_(below, (1 - beta2**count) ** 0.5)
        torch._foreach_add_(below, group["eps"])
        torch._foreach_addcdiv_(
            working, gradients, below, value=-times * (1 - beta1) * rate
        )


def mains_of(part: Any) -> list[Tensor]:
    """The main parameters of an optimizer of Megatron."""
    return [main for _, main in with_mains(part)]


def with_mains(part: Any) -> list[tuple[Tensor, Tensor]]:
    """Parameters of the model, and their main parameters."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for params, mains in MAIN_GROUPS.items():
        own = chain(*getattr(part, params, ()))
        pairs += zip(own, chain(*getattr(part, mains, ())))
    return pairs


def resume_note(before: Correction, after: Correction) -> str:
    """A resumed run's log note if its checkpoint's working copies have another
    correction; else empty."""
    if before == after:
        return ""
    then, now = [
        f"corrected by {correction}" if correction else "not corrected"
        for correction in (before, after)
    ]
    return f": {then} at first, {now} from then on"
