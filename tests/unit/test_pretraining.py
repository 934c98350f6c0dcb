"""The data that a task is given: what cannot be trained on ends the run with one line."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_2bw.errors import UserError
from megatron_2bw.tasks import common as pretraining
from megatron_2bw.tasks import gpt

ARGS = SimpleNamespace(padded_vocab_size=128, tokenizer_type="NullTokenizer")


def fields(tokens: list[int], mask: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, labels and loss mask of one sample."""
    return torch.tensor([tokens[:-1]]), torch.tensor([tokens[1:]]), torch.tensor([mask], dtype=torch.float32)


@pytest.fixture
def data(monkeypatch):
    monkeypatch.setattr(pretraining, "get_num_microbatches", lambda: 3)
    return pretraining.DataCheck(gpt._DATA._cause)


@pytest.mark.parametrize("token", [128, 50_000, -1])
def test_tokens_that_the_model_does_not_have(token, data):
    expected = f"the data holds the token {token}, but the vocabulary of --tokenizer-type NullTokenizer ends"
    with pytest.raises(UserError, match=expected):
        data.check(*fields([5, token, 7], [1, 1]), ARGS)
    with pytest.raises(UserError, match=expected):
        data.check(*fields([5, 6, token], [1, 1]), ARGS)


def test_the_first_and_the_last_token_are_fine(data):
    data.check(*fields([0, 127, 127], [1, 1]), ARGS)


def feed(data, *masks: int) -> None:
    for mask in masks:
        data.check(*fields([5, 6, 7], [0, mask]), ARGS)


def test_batches_without_a_token_that_counts(data):
    feed(data, *(0,) * (3 * pretraining.MASKED - 1))
    with pytest.raises(
        UserError, match="no token of the last 3 batches counts for the loss: leave --eod-mask-loss out"
    ):
        feed(data, 0)


def test_one_token_in_a_batch_is_enough_wherever_it_is(data):
    feed(data, *(1, 0, 0, 0, 0, 1) * 5)
    feed(data, 0, 0, 0, 0, 0, 0, 0, 1, 0)
