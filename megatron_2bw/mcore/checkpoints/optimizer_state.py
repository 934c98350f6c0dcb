"""State of torch's and the emerging optimizers in Megatron's checkpoints, on hosts
without Apex and Transformer Engine.

Megatron 0.19 was written for the optimizers of those libraries. Invariant: a run that
saves or loads has the bits of a run that does neither.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject


def _torch_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    inner = [getattr(part, "optimizer", None) for part in parts]
    return [
        each
        for each in inner
        if type(each) in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
    ]


def is_emerging(inner: Any) -> bool:
    """Whether it is an optimizer of the package emerging_optimizers, or of a derived
    class."""
    return any(
        base.__module__.startswith("emerging_optimizers")
        for base in type(inner).__mro__
    )


def complete_optimizer(optimizer: Any) -> None:
    """Give Adam, SGD and the emerging optimizers the state of before their first step,
    if they have none.

    Megatron reads the state when it saves and when it plans a load, and fails before
    the first step: its distributed optimizer asserts one common `step`
    (distrib_optimizer.py 839), the others write a checkpoint that cannot be loaded. A
    first step from this state gives the bits of a first step from none.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part is not None and getattr(part, "init_state_fn", part) is None:
            part.init_state_fn = lambda *args: None
        if is_emerging(getattr(part, "optimizer", None)):
            part.init_state_fn(part.optimizer, part.config)  # only where it is missing
    for inner in _torch_optimizers(optimizer):
        for group in inner.param_groups:
            for param in group["params"]:
                state = inner.state[param]
                if isinstance(inner, torch.optim.SGD):
                    if group["momentum"] and state.get("momentum_buffer") is None:
                        state["momentum_buffer"] = torch.zeros_like(param)
                elif not state:
                    on_device = group.get("fused") or group.get("capturable")
                    state["step"] = torch.zeros(
                        (),
                        dtype=torch.float32,
                        device=param.device if on_device else torch.device("cpu"),
                    )
                    state["exp_avg"], state["exp_avg_sq"] = (
                        torch.zeros_like(param),
                        torch.zeros_like(param),
                    )


def name_step_zero(content: Any, optimizer: Any) -> None:
    """Put the common step of Adam and SOAP into a sharded optimizer state if it is 0,
    which Megatron leaves out."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    for index, part in enumerate(parts):
        own = (
            content
            if len(parts) == 1
            else content.get(index)
            if isinstance(content, dict)
            else None
        )
        zero = _step_zero(getattr(part, "optimizer", None))
        for place in (
            [own, *own.values()] if zero is not None and isinstance(own, dict) else ()
        ):
            state = place.get("state") if isinstance(place, dict) else None
            if isinstance(state, dict) and state and "common_step" not in state:
                if not any(
                    "step" in each for each in state.values() if isinstance(each, dict)
                ):
                    state["common_step"] = zero


def _step_zero(inner: Any) -> torch.Tensor | int | None:
    """The step counter before the first step; None if the optimizer has none."""
    if isinstance(inner, torch.optim.Adam):
        return torch.zeros((), dtype=torch.float32, device="cpu")
    return (
        0
        if is_emerging(inner) and any("step" in state for state in inner.state.values())
        else None
    )


_MAIN = "fp32_from_fp16_params"  # the main parameters, a list of groups


def number_groups(content: Any) -> None:
    """Give each group of main parameters its number as key in a sharded optimizer
    state, instead of a place in a list.

    Megatron drops empty groups from a list before it loads: on a stage without a
    parameter of one group the next ones move up, and where it then looks for SwiGLU's
    weights there are none (mapping.py 550).
    """
    for part in _parts(content):
        if isinstance(part[_MAIN], list):
            groups = enumerate(part[_MAIN])
            part[_MAIN] = {
                i: group or LocalNonpersistentObject(group) for i, group in groups
            }


def list_groups(content: Any) -> None:
    """Undo `number_groups` in what was loaded."""
    for part in _parts(content):
        if isinstance(part[_MAIN], dict):
            part[_MAIN] = [group for _, group in sorted(part[_MAIN].items())]


def _parts(content: Any) -> list[dict]:
    """The parts of an optimizer's state that have main parameters."""
    parts = [content, *content.values()] if isinstance(content, dict) else []
    return [part for part in parts if isinstance(part, dict) and _MAIN in part]


def unshare_steps(optimizer: Any) -> None:
    """After a load, give each parameter its own step counter.

    Megatron's distributed optimizer gives all parameters one tensor, which Adam would
    increment once per parameter. The Adam of Apex and Transformer Engine counts in the
    group, whose other entries a checkpoint of torch's Adam lacks.
    """
    for inner in (
        getattr(part, "optimizer", None)
        for part in getattr(optimizer, "chained_optimizers", [optimizer])
    ):
        if inner is not None and "bias_correction" in inner.defaults:
            counts = [
                int(state.pop("step"))
                for state in inner.state.values()
                if "step" in state
            ]
            missing = inner.defaults | ({"step": counts[0]} if counts else {})
            for group in inner.param_groups:
                group |= {
                    name: value for name, value in missing.items() if name not in group
                }
    for inner in _torch_optimizers(optimizer):
        for state in inner.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()
