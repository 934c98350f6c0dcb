"""State of torch's and the emerging optimizers in Megatron's checkpoints, on hosts
without Apex and Transformer Engine.

Megatron 0.19 was written for the optimizers of those libraries. Invariant: a run that
saves or loads has the bits of a run that does neither.
"""

from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject

# torch's optimizers, whose state Megatron's checkpoints do not expect
TORCH = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
MAIN = "fp32_from_fp16_params"  # the main parameters, a list of groups


def optimizer_parts(optimizer: Any) -> list[Any]:
    """Megatron's optimizers of a stage; none with --skip-train."""
    if optimizer is None:
        return []
    return getattr(optimizer, "chained_optimizers", [optimizer])


def is_emerging(inner: Any) -> bool:
    """Whether it is an optimizer of the package emerging_optimizers, or of a derived
    class."""
    modules = [base.__module__ for base in type(inner).__mro__]
    return any(module.startswith("emerging_optimizers") for module in modules)


def complete_optimizer(optimizer: Any) -> None:
    """Give Adam, SGD and the emerging optimizers the state of before their first step,
    if they have none.

    Megatron reads the state when it saves and when it plans a load, and fails before
    the first step: its distributed optimizer asserts one common `step`
    (distrib_optimizer.py 839), the others write a checkpoint that cannot be loaded. A
    first step from this state gives the bits of a first step from none.
    """
    for part in optimizer_parts(optimizer):
        if getattr(part, "init_state_fn", part) is None:
            part.init_state_fn = _no_state
        inner = part.optimizer
        if is_emerging(inner):
            part.init_state_fn(inner, part.config)  # only where it is missing
        if type(inner) in TORCH:
            for group in inner.param_groups:
                for param in group["params"]:
                    _complete_state(inner, group, param)


def _no_state(*args) -> None:
    pass


def _complete_state(
    inner: torch.optim.Optimizer, group: dict[str, Any], param: torch.Tensor
) -> None:
    state = inner.state[param]
    if isinstance(inner, torch.optim.SGD):
        if group["momentum"] and state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(param)
    elif not state:
        on_device = group.get("fused") or group.get("capturable")
        device = param.device if on_device else "cpu"
        state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        state["exp_avg"] = torch.zeros_like(param)
        state["exp_avg_sq"] = torch.zeros_like(param)


def name_step_zero(content: Any, optimizer: Any) -> None:
    """Put the common step of Adam and SOAP into a sharded optimizer state if it is 0,
    which Megatron leaves out."""
    parts = optimizer_parts(optimizer)
    for index, part in enumerate(parts):
        zero = _step_zero(part.optimizer)
        if zero is None or not isinstance(content, dict):
            continue
        part_state = content if len(parts) == 1 else content.get(index)
        for place in _nested(part_state):
            state = place.get("state")
            counts = any("step" in each for each in _nested(state))
            if isinstance(state, dict) and state and not counts:
                state.setdefault("common_step", zero)


def _step_zero(inner: Any) -> torch.Tensor | int | None:
    """The step counter before the first step; None if the optimizer has none."""
    if isinstance(inner, torch.optim.Adam):
        return torch.zeros((), dtype=torch.float32, device="cpu")
    if is_emerging(inner):
        for state in inner.state.values():
            if "step" in state:
                return 0
    return None


def number_groups(content: Any) -> None:
    """Give each group of main parameters its number as key in a sharded optimizer
    state, instead of a place in a list.

    Megatron drops empty groups from a list before it loads: on a stage without a
    parameter of one group the next ones move up, and where it then looks for SwiGLU's
    weights there are none (mapping.py 550).
    """
    for part in _nested(content):
        if isinstance(part.get(MAIN), list):
            groups = enumerate(part[MAIN])
            part[MAIN] = {
                i: group or LocalNonpersistentObject([]) for i, group in groups
            }


def list_groups(content: Any) -> None:
    """Undo `number_groups` in what was loaded."""
    for part in _nested(content):
        if isinstance(part.get(MAIN), dict):
            part[MAIN] = [group for _, group in sorted(part[MAIN].items())]


def _nested(content: Any) -> list[dict]:
    """A state and the states in it: those of the parts of an optimizer, for example."""
    if not isinstance(content, dict):
        return []
    return [content] + [each for each in content.values() if isinstance(each, dict)]


def unshare_steps(optimizer: Any) -> None:
    """After a load, give each parameter its own step counter.

    Megatron's distributed optimizer gives all parameters one tensor, which Adam would
    increment once per parameter. The Adam of Apex and Transformer Engine counts in the
    group, whose other entries a checkpoint of torch's Adam lacks.
    """
    for part in optimizer_parts(optimizer):
        inner = part.optimizer
        if inner is not None and "bias_correction" in inner.defaults:
            _count_in_groups(inner)
        if type(inner) in TORCH:
            for state in inner.state.values():
                if "step" in state:
                    state["step"] = state["step"].clone()


def _count_in_groups(inner: torch.optim.Optimizer) -> None:
    expected = dict(inner.defaults)
    for state in inner.state.values():
        if "step" in state:
            expected.setdefault("step", int(state.pop("step")))
    for group in inner.param_groups:
        for name, value in expected.items():
            group.setdefault(name, value)
