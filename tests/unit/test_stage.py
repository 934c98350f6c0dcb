"""What a stage hands to the reduction at the end of a batch."""

from types import SimpleNamespace
from unittest import mock

import torch


def test_the_number_of_tokens_is_not_copied_from_the_host(cpu_layer, monkeypatch):
    """On a GPU the copy of a number would wait for all that the stage has launched; on
    NCCL the host has no backend."""
    from megatron_2bw.mcore.stage import MegatronStage

    stage = MegatronStage(stages=2, index=0)
    config = SimpleNamespace(calculate_per_token_loss=True, grad_sync_func=None)
    stage._call = SimpleNamespace(config=config)
    # as Megatron's forward step returns it where there is no loss
    stage._batches[0].tokens = torch.tensor(0)
    copy = mock.Mock()
    monkeypatch.setattr(torch.Tensor, "to", copy)
    tokens = stage._start_reduction(0)
    copy.assert_not_called()
    assert torch.equal(tokens, torch.zeros((), dtype=torch.int))
