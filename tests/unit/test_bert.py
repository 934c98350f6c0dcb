"""BERT's loss by hand, and its mock data."""

from __future__ import annotations

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


LOSSES, MASKED_WORDS = (
    torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]]),
    torch.tensor([[0, 1, 1], [1, 0, 0]]),
)


def test_the_loss_is_that_of_the_masked_words():
    total, tokens, reports = bert.loss(
        MASKED_WORDS, torch.tensor([0, 1]), (LOSSES, None)
    )
    assert (float(total), int(tokens)) == (14.0, 3)
    assert {name: value.tolist() for name, value in reports.items()} == {
        "lm loss": [14.0, 3.0]
    }


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


def mock(
    sequence: int = 32,
    vocabulary: int = 100,
    head: bool = True,
    seed: int = 7,
    split=Split.train,
):
    tokenizer = SimpleNamespace(
        vocab_size=vocabulary, unique_identifiers={}, pad=0, eod=1
    )
    sizes = dict(
        random_seed=seed,
        sequence_length=sequence,
        split="98,1,1",
        short_sequence_probability=0.1,
    )
    masking = dict(
        probability=0.15,
        max_ngram=3,
        do_full_word=True,
        do_permutation=False,
        use_longer_ngrams=False,
    )
    masking["use_geometric_distribution"] = False
    sizes |= {f"masking_{name}": value for name, value in masking.items()}
    config = BERTMaskedWordPieceDatasetConfig(
        tokenizer=tokenizer, classification_head=head, **sizes
    )
    return MockBertDataset(range(1000), None, numpy.arange(1000), 500, split, config)


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("sequence", [5, 8, 32, 512])
def test_a_mock_sample_is_what_megatrons_dataset_would_give(sequence, head):
    data = mock(sequence, head=head)
    assert len(data) == 500
    for sample in (data[i] for i in range(200)):
        text, length = sample["text"], int(sample["padding_mask"].sum())
        assert all(
            sample[name].shape == (sequence,) and sample[name].dtype == numpy.int64
            for name in bert.FIELDS
        )
        assert (
            text[0] == CLS
            and text[length - 1] == SEP
            and (text[length:] == PAD).all()
            and text.max() < 100
        )
        assert (sample["padding_mask"][:length] == 1).all() and length > (
            sequence - 3
        ) // 2
        masked = sample["loss_mask"] == 1
        assert (
            masked.any()
            and (text[masked] == MASK).all()
            and (text[~masked] != MASK).all()
        )
        assert (sample["labels"][masked] >= WORDS).all() and (
            sample["labels"][~masked] == -1
        ).all()
        whole = numpy.where(masked, sample["labels"], text)[:length]
        if not head:
            assert (
                sample["is_random"] == 0
                and (sample["types"] == 0).all()
                and (whole == SEP).sum() == 1
            )
            continue
        (middle,) = numpy.flatnonzero(whole[:-1] == SEP)
        first, second = whole[1:middle], whole[middle + 1 : -1]
        assert (sample["types"][: middle + 1] == 0).all() and (
            sample["types"][middle + 1 : length] == 1
        ).all()
        early, late = (second, first) if sample["is_random"] else (first, second)
        assert len(early) and len(late)
        assert (
            numpy.diff(numpy.concatenate([early, late])) % (100 - WORDS) == 1
        ).all(), "it counts upwards"


def test_mock_samples_depend_on_seed_split_and_number_alone():
    def text(index: int, **changes) -> list[int]:
        return mock(**changes)[index]["text"].tolist()

    assert text(3) == text(3)
    others = text(4), text(3, seed=8), text(3, split=Split.valid)
    assert len({tuple(each) for each in (text(3), *others)}) == 4
    assert 0.3 < sum(mock()[i]["is_random"] for i in range(300)) / 300 < 0.7
