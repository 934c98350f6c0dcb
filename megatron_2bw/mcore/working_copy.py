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

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from megatron_2bw.base.portions import portions
from megatron_2bw.engine.weights import WeightStores
from megatron_2bw.mcore.correction import Correction
from megatron_2bw.mcore.grad_buffers import GradientSlots
from megatron_2bw.mcore.proxies import Proxies

# Where Megatron's optimizers hold the fp32 main parameters (or shards of them) that
# they copy to the model's.
MAIN_GROUPS = (
    "fp32_from_float16_groups",
    "shard_fp32_from_float16_groups",
    "shard_fp32_groups",
)
# Classes of torch, Apex and Transformer Engine whose last gradient's part of an update
# can be computed on its own.
ADAM, SGD = ("Adam", "AdamW", "FusedAdam"), ("SGD", "FusedSGD")
AT_A_TIME = 1 << 26  # elements whose denominators exist at the same time


def own_mains(
    stores: WeightStores, new: Callable = torch.empty_like
) -> dict[torch.nn.Parameter, torch.Tensor]:
    """Main parameters for those that an optimizer would step in their weight store:
    fp32 parameters of the model.

    new: makes their memory.

    4 bytes a parameter; the distributed optimizer has main parameters of its own.
    """
    in_place = (
        []
        if stores.buffer_data
        else [param for param in stores.params if param.dtype == torch.float32]
    )
    return {param: new(param.detach()).copy_(param.detach()) for param in in_place}


class WorkingCopy:
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
        saved: Mapping[torch.nn.Parameter, torch.Tensor] | None = None,
    ):
        self._parts, self._stores, self._slots, self._proxies = (
            parts,
            stores,
            slots,
            proxies,
        )
        self._takes_gradients, self._correction = takes_gradients, Correction()
        # the newest version's store holds its working copy, not the true weights
        self.in_store = bool(saved)
        # that copy, while the store holds the true weights
        self._stashed: list[torch.Tensor] | None = None
        # by part, Megatron's method that writes its main parameters to the model's
        self._copy = {}
        # by part, its main parameters before the step
        self._before: dict[Any, list[torch.Tensor]] = {}
        for part in parts:
            if part.optimizer is not None and hasattr(
                part, "_copy_main_params_to_model_params"
            ):
                self._copy[part] = part._copy_main_params_to_model_params
                part._copy_main_params_to_model_params = partial(
                    self._copy_working, part
                )
        for param, view in zip(
            stores.params, stores.values(stores.newest) if saved else ()
        ):
            view.copy_(saved[param])

    def step(
        self,
        megatron_step: Callable[[], tuple],
        views: Sequence[torch.Tensor],
        correction: Correction,
    ) -> tuple:
        """Megatron's step, which writes the parameters' `views` in a weight store;
        returns what Megatron's returns.

        views       the parameters in the store that is written, in the order of the
                    stores
        correction  of the W' that the store gets; with Correction() it gets W
        """
        self._correction = correction
        self._before = {
            part: [main.detach().clone() for main in _mains(part)]
            for part in self._copy
        }
        self._write_own(views)
        result = megatron_step()
        mains = self._proxies.mains
        if not result[0]:
            self._write_true(views)
        elif mine := [
            (param, view)
            for param, view in zip(self._stores.params, views)
            if param in mains
        ]:
            # The step has written the others.
            stepped = [self._proxies.of[param] for param, _ in mine]
            self._correct(
                [view for _, view in mine], [mains[param] for param, _ in mine], stepped
            )
        return result

    def swap_in_true_weights(self) -> None:
        """Write the true W(newest) to its store, until `restore`. Between batches, when
        no step is pending.

        The working copy is kept in the memory of the gradients, which is free then.
        """
        if not self.in_store or self._stashed is not None:
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
            for view, copy in zip(
                self._stores.values(self._stores.newest), self._stashed
            ):
                view.copy_(copy)
            self._stashed = None

    def values(self) -> dict[torch.nn.Parameter, torch.Tensor]:
        """The newest version's working copy, by parameter; between
        `swap_in_true_weights` and `restore`.

        Where nothing is corrected yet it equals the true weights: all checkpoints of a
        run have the same entries.
        """
        copies = (
            self._stores.values(self._stores.newest)
            if self._stashed is None
            else self._stashed
        )
        return dict(zip(self._stores.params, copies))

    def _write_own(self, views: Sequence[torch.Tensor]) -> None:
        for param, view in zip(self._stores.params, views):
            if param in self._proxies.mains:
                view.copy_(self._proxies.mains[param])

    def _write_true(self, views: Sequence[torch.Tensor]) -> None:
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
        mains = _mains(part)
        true = [main.data for main in mains]
        self._correct(working, true, mains)
        for main, tensor in zip(mains, working):
            main.data = tensor
        try:
            self._copy[part]()
        finally:
            for main, tensor in zip(mains, true):
                main.data = tensor

    def _correct(
        self,
        before: list[torch.Tensor],
        now: list[torch.Tensor],
        stepped: Sequence[torch.Tensor],
    ) -> None:
        """Turn `before` into W'; exactly `now` without a correction.

        stepped  the tensors by which the optimizers know `now`, with the gradients of
                 the step
        """
        # The same kernels and the same memory with every correction: the first W' uses
        # none for the first time.
        if before:
            torch._foreach_lerp_(before, now, 1 + self._correction.factor)
        working = {id(tensor): ahead for tensor, ahead in zip(stepped, before)}
        for part in self._parts if self._takes_gradients else ():
            for group in (
                part.optimizer.param_groups if part.optimizer is not None else ()
            ):
                tensors = [
                    tensor
                    for tensor in group["params"]
                    if id(tensor) in working and tensor.grad is not None
                ]
                for some in portions(tensors, torch.Tensor.numel, AT_A_TIME):
                    ahead = [working[id(tensor)] for tensor in some]
                    add_gradients(
                        part.optimizer, group, some, ahead, self._correction.gradient
                    )


def add_gradients(
    optimizer: Any,
    group: dict[str, Any],
    stepped: list[torch.Tensor],
    working: list[torch.Tensor],
    times: float,
) -> None:
    """Add to `working`, `times` over, the last gradients' part D of the last update of
    `stepped` (correction.py).

    Adam: -(1 - beta1) rate g / (sqrt(v / (1 - beta2^t)) + eps); SGD: -rate g. Nothing
    for other optimizers.
    """
    kind, rate = type(optimizer).__name__, float(group["lr"])
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


def _mains(part: Any) -> list[torch.Tensor]:
    return [
        main
        for name in MAIN_GROUPS
        for group in getattr(part, name, ())
        for main in group
    ]


def resume_note(before: Correction | None, after: Correction | None) -> str:
    """A resumed run's log note if its checkpoint's working copies have another
    correction; else empty."""
    if str(before) == str(after):
        return ""
    then, now = (
        "not corrected" if each is None else f"corrected by {each}"
        for each in (before, after)
    )
    return f": {then} at first, {now} from then on"
