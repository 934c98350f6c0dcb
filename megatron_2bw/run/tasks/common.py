"""What the tasks (gpt.py, bert.py) share: the check of the loss, options of the
datasets.

Invariant: the check of the loss leaves the GPU a microbatch of work while the host
waits, but for the last one of a batch (--no-check-for-nan-in-loss-and-grad disables
it).
"""

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import (
    BlendedMegatronDatasetBuilder,
)
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.training import get_args, get_tokenizer, print_rank_0
from megatron.training.utils import get_blend_and_blend_per_split
from torch import Tensor

from megatron_2bw.mcore.batch_sizes import planned

# --check-for-spiky-loss reports a loss that is this many times the largest so far
SPIKE = 10
TANH_GELU = partial(torch.nn.functional.gelu, approximate="tanh")


def apply_dropped_flags(config: Any, args: Any) -> None:
    """Megatron 0.19 drops two flags on the way to `config`: --openai-gelu (GeLU in its
    tanh form, which Megatron's fused GeLU always has) and --rope-scaling-factor."""
    if args.openai_gelu and not config.bias_activation_fusion:
        config.activation_func = TANH_GELU
    if hasattr(config, "rope_scaling_factor"):
        config.rope_scaling_factor = args.rope_scaling_factor


class LossCheck:
    """Stops on NaN or inf, reports spikes, as Megatron's flags ask.

    A loss is looked at when the next microbatch's forward is launched, so that the GPU
    has work while the host waits. That of a batch's last microbatch is looked at once:
    Megatron checks the gradients next, and would name them.
    """

    _seen = 0  # microbatches of the present batch
    _unread = None

    def check(self, total: Tensor) -> None:
        """`total` is the loss of a microbatch, a scalar. RuntimeError of Megatron's,
        which names the iteration."""
        args = get_args()
        machine = get_rerun_state_machine()
        if args.check_for_nan_in_loss_and_grad and args.rerun_mode == "disabled":
            # Megatron 0.19's number is one more than that of the log's next line;
            # messages add one to either.
            if hasattr(args, "curr_iteration"):  # not with --skip-train
                machine.current_iteration = args.curr_iteration
            self._read()
            # into pinned memory
            finite = torch.isfinite(total.detach()).to("cpu", non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
            self._unread = (total.detach(), finite, copied)
            self._seen = (self._seen + total.requires_grad) % get_num_microbatches()
            # in an evaluation, or the last one
            if not total.requires_grad or self._seen == 0:
                self._read()
        # the rerun machine keeps a record of each loss
        elif args.check_for_nan_in_loss_and_grad:
            _stop_at_nan(total)
        if args.check_for_spiky_loss:
            spiky = partial(
                machine.is_unexpectedly_large, threshold=SPIKE, context="loss"
            )
            _validate(total, spiky, "Spiky loss", fatal=False)

    def _read(self) -> None:
        if self._unread is None:
            return
        total, finite, copied = self._unread
        self._unread = None
        copied.synchronize()
        if not finite:
            _stop_at_nan(total)


def _stop_at_nan(total: Tensor) -> None:
    where = "in local forward loss calculation"
    _validate(total, torch.isnan, f"found NaN {where}", fatal=True)
    _validate(total, torch.isinf, f"found Inf {where}", fatal=True)


def _validate(total: Tensor, rejects: Callable, text: str, fatal: bool) -> None:
    get_rerun_state_machine().validate_result(
        total, rejection_func=rejects, message=text, tolerance=0.0, fatal=fatal
    )


def masked_sum(losses: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the losses [microbatch, sequence] where the mask is 1, and their
    number."""
    mask = loss_mask.view(-1).float()
    return torch.sum(losses.view(-1).float() * mask), mask.sum().detach().to(torch.int)


def loss_report(total: Tensor, count: Tensor) -> Tensor:
    """A sum and its number of terms for Megatron's logging, which adds up both before
    it divides."""
    return torch.cat([total.detach().view(1), count.view(1)])


def micro_batch_size(args, training: bool) -> int:
    """Samples per microbatch; an evaluation may have another number."""
    if training:
        return args.micro_batch_size
    return args.eval_micro_batch_size or args.micro_batch_size


def dataset_config(kind: type, args: Any, **options: Any) -> Any:
    """Megatron's configuration of a `kind` of datasets, whose fields have the names of
    its flags, or are in `options`."""
    for field in fields(kind):
        if hasattr(args, field.name):
            options.setdefault(field.name, getattr(args, field.name))
    options["blend"], options["blend_per_split"] = get_blend_and_blend_per_split(args)
    options["random_seed"] = args.seed
    options["sequence_length"] = args.seq_length
    options["tokenizer"] = get_tokenizer()
    options["path_to_cache"] = args.data_cache_path
    return kind(**options)


def build_datasets(
    kind: type, samples: list[int], builds: Callable[[], bool], config: Any
) -> list[Any]:
    """Training, validation and test datasets of a `kind`, on the ranks where `builds`
    is true.

    Megatron counts all training batches with one size. With a batch schedule the run
    uses another number.
    """
    args = get_args()
    if args.step_batch_size_schedule is not None:
        _, needed = planned(args, args.iteration, args.consumed_train_samples)
        samples = [needed, *samples[1:]]
    print_rank_0(f"> building {kind.__name__} for training, validation and test ...")
    return BlendedMegatronDatasetBuilder(kind, samples, builds, config).build()
