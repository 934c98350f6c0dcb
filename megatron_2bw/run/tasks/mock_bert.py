"""BERT samples without data: pairs of counting sequences, with masked words and
sometimes swapped order.

Invariant: a sample depends only on the seed, the split, its number and the sizes. The
fields are those of Megatron's BERTMaskedWordPieceDataset. Both tasks can be learned:
masked words from their neighbours, the order from the numbers.
"""

from __future__ import annotations

import numpy
from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDatasetConfig
from megatron.core.datasets.megatron_dataset import MegatronDataset

PAD, CLS, SEP, MASK, WORDS = range(5)  # words are the numbers from WORDS on
SPECIAL = 3  # one CLS and two SEP a sample


class MockBertDataset(MegatronDataset):
    """--mock-data for BERT; built by Megatron's BlendedMegatronDatasetBuilder."""

    size = 100_000  # samples that --split deals out

    def __init__(
        self, dataset: range, dataset_path, indices, num_samples, index_split, config
    ):
        super().__init__(
            dataset, dataset_path, indices, num_samples, index_split, config
        )
        self._words = config.tokenizer.vocab_size - WORDS

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: range) -> int:
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(
        dataset_path: None, config: BERTMaskedWordPieceDatasetConfig
    ) -> range:
        return range(MockBertDataset.size)

    def __len__(self) -> int:
        return len(self.indices) if self.num_samples is None else self.num_samples

    def __getitem__(self, idx: int) -> dict[str, int | numpy.ndarray]:
        config, length = self.config, self.config.sequence_length
        random = numpy.random.default_rng(
            [config.random_seed, self.index_split.value, int(idx)]
        )
        words = int(
            random.integers(max((length - SPECIAL) // 2, 2), length - SPECIAL + 1)
        )
        text = (
            WORDS + (random.integers(self._words) + numpy.arange(words)) % self._words
        )
        swapped, types = 0, None
        if config.classification_head:
            first, second = numpy.split(text, [random.integers(1, words)])
            swapped = int(random.random() < 0.5)
            if swapped:
                first, second = second, first
            text = numpy.concatenate([[CLS], first, [SEP], second, [SEP]])
            types = (numpy.arange(len(text)) > len(first) + 1).astype(numpy.int64)
        else:
            text = numpy.concatenate([[CLS], text, [SEP]])
        chosen = (text >= WORDS) & (
            random.random(len(text)) < config.masking_probability
        )
        chosen[1] |= not chosen.any()
        fill = (0, length - len(text))
        return {
            "text": numpy.pad(
                numpy.where(chosen, MASK, text), fill, constant_values=PAD
            ),
            "types": numpy.pad(
                numpy.zeros_like(text) if types is None else types, fill
            ),
            "labels": numpy.pad(
                numpy.where(chosen, text, -1), fill, constant_values=-1
            ),
            "is_random": swapped,
            "padding_mask": numpy.pad(numpy.ones_like(text), fill),
            "loss_mask": numpy.pad(chosen.astype(numpy.int64), fill),
            "truncated": 0,
        }
