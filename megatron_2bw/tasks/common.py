"""What the tasks (gpt.py, bert.py) share: looking at the data while it is on the host, and at the loss.

Invariant: the data are looked at before they go to the GPU. The check of the loss waits for it, once a microbatch on
the last stage (--no-check-for-nan-in-loss-and-grad leaves it out).
"""

from __future__ import annotations

from functools import partial

import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.training import get_args

from megatron_2bw.errors import UserError

MASKED = 3  # batches on end without a token that counts, after which a pipeline gives up; one alone may be chance
SPIKE = 10  # with --check-for-spiky-loss: a loss this many times the largest so far is reported


class DataCheck:
    """Looks at each microbatch while it is on the host, where that costs no wait for the GPU.

    cause  what makes a whole batch count nothing in this task, and what to do
    """

    def __init__(self, cause: str) -> None:
        self._cause = cause
        self._seen = 0  # microbatches of the present batch
        self._counts = False  # whether one of them had a token that counts
        self._masked = 0  # batches on end without one

    def check(self, tokens: torch.Tensor, labels: torch.Tensor, loss_mask: torch.Tensor, args) -> None:
        """A UserError at tokens that the model does not have, and if MASKED batches on end have no token for the loss.

        All three tensors are [microbatch, sequence], on the host.
        """
        for words in (tokens, labels):
            low, high = (int(value) for value in torch.aminmax(words))
            if low < 0 or high >= args.padded_vocab_size:
                raise UserError(
                    f"--data-path: the data holds the token {low if low < 0 else high}, but the vocabulary of "
                    f"--tokenizer-type {args.tokenizer_type} ends at {args.padded_vocab_size - 1}: give the tokenizer "
                    "that the data was prepared with"
                )
        self._counts |= bool(loss_mask.any())
        self._seen += 1
        if self._seen >= get_num_microbatches():
            self._masked = 0 if self._counts else self._masked + 1
            self._seen, self._counts = 0, False
        if self._masked >= MASKED:
            raise UserError(f"--data-path: no token of the last {MASKED} batches counts for the loss: {self._cause}")


def check_loss(total: torch.Tensor) -> None:
    """Stop on NaN or inf, report spikes: what Megatron's flags promise."""
    args, machine = get_args(), get_rerun_state_machine()
    # Without Megatron's machine that runs iterations again, which keeps a record, a finite loss is the end of it.
    if args.check_for_nan_in_loss_and_grad and not (args.rerun_mode == "disabled" and bool(torch.isfinite(total))):
        for rejected, name in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            machine.validate_result(
                result=total,
                rejection_func=rejected,
                message=f"found {name} in local forward loss calculation",
                tolerance=0.0,
                fatal=True,
            )
    if args.check_for_spiky_loss:
        machine.validate_result(
            result=total,
            message="Spiky loss",
            tolerance=0.0,
            fatal=False,
            rejection_func=partial(machine.is_unexpectedly_large, threshold=SPIKE, context="loss"),
        )


def masked_sum(losses: torch.Tensor, loss_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the losses [microbatch, sequence] where the mask is 1, and how many those are."""
    mask = loss_mask.view(-1).float()
    return torch.sum(losses.view(-1).float() * mask), mask.sum().detach().to(torch.int)


def report(total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """A sum and its number of summands as Megatron's logging wants them: it adds up both before it divides."""
    return torch.cat([total.detach().view(1), count.view(1)])


def micro_batch_size(args, training: bool) -> int:
    """Samples of a microbatch, which may differ in an evaluation."""
    return args.micro_batch_size if training else args.eval_micro_batch_size or args.micro_batch_size
