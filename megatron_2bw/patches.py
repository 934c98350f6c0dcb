"""The only file that rebinds Megatron's names.

Invariant: every rebinding states module, name, the signature it was written against and why; if Megatron has
drifted from any of them, nothing is rebound and the program stops with one line.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_2bw import cpu

SUPPORTED = "0.19"


class DriftError(RuntimeError):
    """The installed Megatron is not the one that the patches were written for."""


@dataclass(frozen=True)
class Patch:
    """One rebinding: `module.name`, whose parameters must be `signature`, becomes `replace(original)`."""

    module: str
    name: str
    signature: tuple[str, ...]
    reason: str
    replace: Callable[[Callable], Callable]

    def original(self) -> Callable:
        """The function that Megatron holds now. Raises DriftError if it is missing or has other parameters."""
        where = f"{self.module}.{self.name}"
        try:
            found = getattr(importlib.import_module(self.module), self.name)
        except (ImportError, AttributeError) as error:
            raise DriftError(f"{where} is missing: megatron_2bw needs megatron-core {SUPPORTED} ({error})") from error
        parameters = tuple(inspect.signature(found).parameters)
        if parameters != self.signature:
            raise DriftError(
                f"{where} takes ({', '.join(parameters)}), expected ({', '.join(self.signature)}): "
                f"megatron_2bw needs megatron-core {SUPPORTED}"
            )
        return found


def apply(patches: list[Patch]) -> Callable[[], None]:
    """Check all patches, then make all of them. Returns a function that takes them back."""
    _check_version()
    originals = [patch.original() for patch in patches]
    for patch, original in zip(patches, originals):
        setattr(importlib.import_module(patch.module), patch.name, patch.replace(original))

    def undo() -> None:
        for patch, original in reversed(list(zip(patches, originals))):
            setattr(importlib.import_module(patch.module), patch.name, original)

    return undo


def _check_version() -> None:
    # `__version__` carries the git revision of whatever checkout holds the environment; VERSION does not.
    from megatron.core.package_info import VERSION

    if ".".join(map(str, VERSION[:2])) != SUPPORTED:
        installed = ".".join(map(str, VERSION[:3]))
        raise DriftError(f"megatron-core {installed} is installed, megatron_2bw needs {SUPPORTED}")


def repairs() -> list[Patch]:
    """Faults of the wheel that hit every user."""
    return [
        Patch(
            "megatron.core.datasets.utils", "compile_helpers", (),
            "the wheel ships the compiled helper without the Makefile that this function runs, and exits",
            _skip_when_compiled,
        )
    ]


def _skip_when_compiled(original: Callable) -> Callable:
    @functools.wraps(original)
    def compile_helpers() -> None:
        try:
            import megatron.core.datasets.helpers_cpp  # noqa: F401
        except ImportError:
            original()

    return compile_helpers


def for_cpu() -> list[Patch]:
    """What Megatron itself, beside torch, needs on a host without CUDA."""
    initialize = (
        "allow_no_cuda", "skip_mpu_initialization", "get_embedding_ranks", "get_position_embedding_ranks", "store",
        "skip_model_parallel_init", "seed_pp_group", "seed_dp_group", "seed_tp_group", "seed_ep_group",
        "seed_etp_group", "skip_random_seed",
    )
    return [
        Patch(
            "megatron.training.training", "initialize_megatron", initialize,
            "pretrain does not pass allow_no_cuda on",
            lambda original: functools.partial(original, allow_no_cuda=True),
        ),
        Patch(
            "megatron.core.tensor_parallel.random", "_set_cuda_rng_state", ("new_state", "device", "graph_safe"),
            "it writes a CUDA generator that does not exist",
            lambda original: cpu.set_tracker_rng_state,
        ),
    ]


def for_schedule(runtime: Any) -> list[Patch]:
    """Hand the schedule and the optimizer's step to `runtime` (a runtime.PipelineRuntime)."""

    def adopt(original: Callable) -> Callable:
        @functools.wraps(original)
        def get_megatron_optimizer(config, model_chunks, *args, **kwargs):
            optimizer = original(config, model_chunks, *args, **kwargs)
            runtime.adopt(model_chunks, optimizer)
            return optimizer

        return get_megatron_optimizer

    return [
        Patch(
            "megatron.training.training", "get_forward_backward_func",
            ("pp_size", "vp_size", "schedule_pg_collection"),
            "the training loop looks its schedule up here",
            lambda original: lambda *args, **kwargs: runtime.forward_backward,
        ),
        Patch(
            "megatron.training.training", "get_megatron_optimizer",
            (
                "config", "model_chunks", "config_overrides", "use_gloo_process_groups", "pg_collection",
                "dump_param_to_param_group_map",
            ),
            "the optimizer's step writes the weight version that the schedule names",
            adopt,
        ),
    ]
