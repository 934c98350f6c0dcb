"""BERT's loss by hand, and its mock data."""

import math
from types import SimpleNamespace

import numpy
import pytest
import torch
from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDatasetConfig
from megatron.core.datasets.utils import Split

from megatron_2bw.run.tasks import bert
from megatron_2bw.run.tasks.mock_bert import CLS, MASK, PAD, SEP, WORDS, MockBertDataset


@pytest.fixture(autouse=True)
def no_check(monkeypatch):
    monkeypatch.setattr(bert._LOSS, "check", lambda total: None)


LOSSES = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
MASKED_WORDS = torch.tensor([[0, 1, 1], [1, 0, 0]])


def test_the_loss_is_that_of_the_masked_words():
    total, tokens, reports = bert.loss(
        MASKED_WORDS, torch.tensor([0, 1]), (LOSSES, None)
    )
    assert (float(total), int(tokens)) == (14.0, 3)
    assert reports.keys() == {"lm loss"}
    assert reports["lm loss"].tolist() == [14.0, 3.0]


@pytest.mark.parametrize(
    ("mask", "words"), [(MASKED_WORDS, 14 / 3), (torch.zeros(2, 3), 0)]
)
def test_the_binary_head_adds_its_mean_to_the_mean_of_the_words(mask, words):
    """Also in a microbatch without masked words."""
    # probabilities 1/2 of sample 0's class, 1/4 of sample 1's
    logits = torch.tensor([[0.0, 0.0], [math.log(3), 0.0]])
    total, tokens, reports = bert.loss(mask, torch.tensor([0, 1]), (LOSSES, logits))
    order = (math.log(2) + math.log(4)) / 2
    assert float(total) / max(int(tokens), 1) == pytest.approx(words + order)
    assert reports["sop loss"].tolist() == pytest.approx([2 * order, 2.0])


# --- mock data
# --------------------------------------------------------------------------------------


def mock(sequence=32, head=True, seed=7, split=Split.train):
    tokenizer = SimpleNamespace(vocab_size=100, unique_identifiers={}, pad=0, eod=1)
    config = BERTMaskedWordPieceDatasetConfig(
        tokenizer=tokenizer,
        classification_head=head,
        random_seed=seed,
        sequence_length=sequence,
        split="98,1,1",
        short_sequence_probability=0.1,
        masking_probability=0.15,
        masking_max_ngram=3,
        masking_do_full_word=True,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=False,
    )
    return MockBertDataset(range(1000), None, numpy.arange(1000), 500, split, config)


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("sequence", [5, 512])
def test_a_mock_sample_is_what_megatrons_dataset_would_give(sequence, head):
    data = mock(sequence, head=head)
    for number in range(200):
        sample = data[number]
        for name in bert.FIELDS:
            assert sample[name].shape == (sequence,)
            assert sample[name].dtype == numpy.int64
        text = sample["text"]
        labels = sample["labels"]
        length = sample["padding_mask"].sum()
        assert text[0] == CLS
        assert (text[length:] == PAD).all()
        masked = sample["loss_mask"] == 1
        assert masked.any() and ((text == MASK) == masked).all()
        assert (labels[masked] >= WORDS).all()
        assert (labels[~masked] == -1).all()
        words = numpy.where(masked, labels, text)[1:length]
        ends = numpy.flatnonzero(words == SEP)
        first, *second = numpy.split(words, ends)
        if not head:
            assert sample["is_random"] == 0 and not sample["types"].any()
            continue
        second = second[0][1:]
        assert sample["types"].sum() == len(second) + 1
        parts = [second, first] if sample["is_random"] else [first, second]
        steps = numpy.diff(numpy.concatenate(parts)) % (100 - WORDS)
        assert (steps == 1).all(), "it counts upwards"


def test_mock_samples_depend_on_seed_split_and_number_alone():
    def text(index: int, **changes) -> tuple[int, ...]:
        return tuple(mock(**changes)[index]["text"].tolist())

    first = text(3)
    assert first == text(3)
    assert first != text(4)
    assert first != text(3, seed=8)
    assert first != text(3, split=Split.valid)
    data = mock()
    shares = [data[i]["is_random"] for i in range(300)]
    assert 90 < sum(shares) < 210
