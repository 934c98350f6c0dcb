"""BERT: masked words, the binary head, a padding mask on every stage. What GPT's tests
hold, for pretrain_bert_2bw.py.

Bitwise where the additions keep their order (see test_update_rule.py and
test_equivalence.py for where they do not).
"""

from __future__ import annotations

import pytest
import torch

from tests.distributed.compare import (
    UNTIED,
    assert_same,
    assert_same_runs,
    run_pipeline,
    run_reference,
)
from tests.distributed.test_equivalence import DROPOUT, FULL, NO_BIAS
from tests.distributed.training import BERT, command
from tests.session import once_a_session

NO_HEAD = "--bert-no-binary-head"


def bert(*args, **changes) -> list[str]:
    return [BERT, *command(*args, **changes)]


@once_a_session
def two_stages(*flags: str, schedule: str = "2bw", **changes):
    """A run on two stages, made once for all tests that compare with it."""
    return run_pipeline(bert(2, 4, schedule, *flags, **changes), 2)


@pytest.mark.proof("", NO_HEAD)
@pytest.mark.parametrize("flags", [(), (NO_HEAD,)], ids=" ".join)
def test_the_update_rule(flags):
    """Against the single-process reference, with clipping. Both losses, if there is a
    binary head."""
    flags = (UNTIED, *flags)
    runs = two_stages(*flags)
    assert len(runs[-1].losses) == 6 * (1 if NO_HEAD in flags else 2)
    assert_same(runs, run_reference(runs, bert(1, 4, "2bw", *flags), 4), exact=True)


@pytest.mark.proof
def test_tied_embeddings():
    """The output layer's bias, the head and the pooler are on the last stage alone;
    words are on both ends."""
    runs = run_pipeline(bert(4, 4, "2bw", NO_BIAS), 4)
    expected = run_reference(runs, bert(1, 4, "2bw", NO_BIAS), 4)
    assert_same(runs, expected, exact=False)


@pytest.mark.proof
def test_a_flush_is_megatrons():
    """Tied embeddings, bf16, dropout, clipping, full recompute: losses, weights and
    norms of Megatron's schedule."""
    runs, expected = (
        run_pipeline(bert(2, 4, schedule, "--bf16", **DROPOUT, **FULL), 2)
        for schedule in ("pipedream-flush", "megatron")
    )
    assert_same_runs(runs, expected, exact=True)
    assert runs[0].grad_norms == expected[0].grad_norms


def test_megatrons_interleaved_stages():
    """Two chunks a stage: the second chunk of the first stage needs no words, but the
    padding mask."""
    runs = two_stages(
        UNTIED, schedule="megatron", clip_grad=0, num_virtual_stages_per_pipeline_rank=2
    )
    assert_same_runs(
        runs, two_stages(UNTIED, schedule="megatron", clip_grad=0), exact=True
    )


def test_tensor_parallel():
    """A batch reaches the second tensor rank as one message. Partial sums are added
    over ranks: equal to rounding."""
    runs = run_pipeline(
        bert(2, 4, "2bw", UNTIED, NO_BIAS, tensor_model_parallel_size=2), 4
    )
    expected = two_stages(UNTIED, NO_BIAS)
    assert torch.allclose(
        torch.stack(runs[-1].losses), torch.stack(expected[-1].losses), rtol=1e-6
    )
    assert runs[0].grad_norms == pytest.approx(expected[0].grad_norms, rel=1e-5)


def test_width_with_the_distributed_optimizer():
    """Replicas have masked words of different numbers, and their microbatches weigh the
    same."""
    sharded = run_pipeline(
        bert(2, 2, "2bw", UNTIED, NO_BIAS, "--use-distributed-optimizer", width=2), 4
    )
    assert_same_runs(sharded[0::2], two_stages(UNTIED, NO_BIAS), exact=False)
