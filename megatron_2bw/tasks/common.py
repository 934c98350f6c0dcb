"""What the tasks (gpt.py, bert.py) share: the check of the loss, options of the datasets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.training import get_args, get_tokenizer, print_rank_0
from megatron.training.utils import get_blend_and_blend_per_split

SPIKE = 10  # --check-for-spiky-loss reports a loss that is this many times the largest so far
TANH_GELU = partial(torch.nn.functional.gelu, approximate="tanh")


def apply_dropped_flags(config: Any, args: Any) -> Any:
    """Megatron 0.19 drops two flags on the way to `config`: --openai-gelu (GeLU in its tanh form, which Megatron's
    fused GeLU always has) and --rope-scaling-factor."""
    if args.openai_gelu and not config.bias_activation_fusion:
        config.activation_func = TANH_GELU
    if hasattr(config, "rope_scaling_factor"):
        config.rope_scaling_factor = args.rope_scaling_factor
    return config


def check_loss(total: torch.Tensor) -> None:
    """Stop on NaN or inf, report spikes, as Megatron's flags ask and its own entry scripts do.

    `total` is the loss of a microbatch, a scalar. RuntimeError of Megatron's, which names the iteration.
    """
    args, machine = get_args(), get_rerun_state_machine()
    # Megatron 0.19's number is one more than that of the log's next line; messages add one to either.
    if args.rerun_mode == "disabled" and hasattr(args, "curr_iteration"):  # not with --skip-train
        machine.current_iteration = args.curr_iteration
    checks: list[tuple[Callable, str, bool]] = []
    if args.check_for_nan_in_loss_and_grad:
        wrong = (torch.isnan, "NaN"), (torch.isinf, "Inf")
        checks += [(test, f"found {name} in local forward loss calculation", True) for test, name in wrong]
    if args.check_for_spiky_loss:
        checks.append((partial(machine.is_unexpectedly_large, threshold=SPIKE, context="loss"), "Spiky loss", False))
    for test, message, fatal in checks:
        machine.validate_result(total, rejection_func=test, message=message, tolerance=0.0, fatal=fatal)


def masked_sum(losses: torch.Tensor, loss_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the losses [microbatch, sequence] where the mask is 1, and their number."""
    mask = loss_mask.view(-1).float()
    return torch.sum(losses.view(-1).float() * mask), mask.sum().detach().to(torch.int)


def report(total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """A sum and its number of terms for Megatron's logging, which adds up both before it divides."""
    return torch.cat([total.detach().view(1), count.view(1)])


def micro_batch_size(args, training: bool) -> int:
    """Samples per microbatch; an evaluation may have another number."""
    return args.micro_batch_size if training else args.eval_micro_batch_size or args.micro_batch_size


def dataset_config(kind: type, args: Any, **more: Any) -> Any:
    """Megatron's configuration of a `kind` of datasets, whose fields have the names of its flags, or are in `more`."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    same = {field.name: getattr(args, field.name) for field in fields(kind) if hasattr(args, field.name)}
    own = dict(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        path_to_cache=args.data_cache_path,
        tokenizer=get_tokenizer(),
    )
    return kind(**same | own | more)


def build_datasets(kind: type, samples: list[int], builds: Callable[[], bool], config: Any) -> list[Any]:
    """Training, validation and test datasets of a `kind`, on the ranks where `builds` is true."""
    print_rank_0(f"> building {kind.__name__} for training, validation and test ...")
    return BlendedMegatronDatasetBuilder(kind, samples, builds, config).build()
