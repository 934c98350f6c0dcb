"""BERT: masked words, the binary head, a padding mask on every stage. What GPT's tests
hold, for pretrain_bert_2bw.py.

Bitwise where the additions keep their order (see test_update_rule.py and
test_equivalence.py for where they do not).
"""

from functools import partial

import pytest

from tests.distributed import test_equivalence
from tests.distributed.compare import (
    UNTIED,
    assert_same_losses,
    assert_same_runs,
    check_rule,
    run_pipeline,
)
from tests.distributed.test_equivalence import DROPOUT, FULL, NO_BIAS
from tests.distributed.training import BERT, command

NO_HEAD = "--bert-no-binary-head"
bert = partial(command, script=BERT)
two_stages = partial(test_equivalence.two_stages, script=BERT)


@pytest.mark.proof
@pytest.mark.parametrize("flags, losses", [("", 12), (NO_HEAD, 6)])
def test_the_update_rule(flags, losses):
    """Against the single-process reference, with clipping. Both losses, if there is a
    binary head."""
    runs, _ = check_rule(2, 4, UNTIED, flags, script=BERT)
    assert len(runs[-1].losses) == losses


@pytest.mark.proof
def test_tied_embeddings():
    """The output layer's bias, the head and the pooler are on the last stage alone;
    words are on both ends."""
    check_rule(4, 4, NO_BIAS, script=BERT, tolerance=1e-6)


@pytest.mark.proof
def test_a_flush_is_megatrons():
    """Tied embeddings, bf16, dropout, clipping, full recompute: losses, weights and
    norms of Megatron's schedule."""
    runs = two_stages("--bf16", schedule="pipedream-flush", **DROPOUT, **FULL)
    expected = two_stages("--bf16", schedule="megatron", **DROPOUT, **FULL)
    assert_same_runs(runs, expected)
    assert runs[0].grad_norms == expected[0].grad_norms


def test_megatrons_interleaved_stages():
    """Two chunks a stage: the second chunk of the first stage needs no words, but the
    padding mask."""
    changes = dict(schedule="megatron", clip_grad=0)
    runs = two_stages(UNTIED, num_virtual_stages_per_pipeline_rank=2, **changes)
    assert_same_runs(runs, two_stages(UNTIED, **changes))


def test_tensor_parallel():
    """A batch reaches the second tensor rank as one message. Partial sums are added
    over ranks: equal to rounding."""
    flags = (UNTIED, NO_BIAS)
    runs = run_pipeline(bert(2, 4, "2bw", *flags, tensor_model_parallel_size=2), 4)
    expected = two_stages(*flags)
    assert_same_losses(runs, expected, tolerance=1e-6)
    assert runs[0].grad_norms == pytest.approx(expected[0].grad_norms, rel=1e-5)


def test_width_with_the_distributed_optimizer():
    """Replicas have masked words of different numbers, and their microbatches weigh the
    same."""
    flags = (UNTIED, NO_BIAS)
    argv = bert(2, 2, "2bw", *flags, "--use-distributed-optimizer", width=2)
    assert_same_runs(run_pipeline(argv, 4)[0::2], two_stages(*flags), tolerance=1e-6)
