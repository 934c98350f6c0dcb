"""BERT samples without data: pairs of counting sequences, with masked words and
sometimes swapped order.

Invariant: a sample depends only on the seed, the split, its number and the sizes. Its
fields are those of Megatron's BERTMaskedWordPieceDataset that bert.py reads. Both tasks
can be learned: masked words from their neighbours, the order from the numbers.
"""

import numpy
from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDatasetConfig
from megatron.core.datasets.megatron_dataset import MegatronDataset

PAD, CLS, SEP, MASK, WORDS = range(5)  # words are the numbers from WORDS on
SPECIAL = 3  # one CLS and two SEP a sample


class MockBertDataset(MegatronDataset):
    """--mock-data for BERT; built by Megatron's BlendedMegatronDatasetBuilder."""

    size = 100_000  # samples that --split deals out

    def __init__(self, *place):
        super().__init__(*place)
        self._words = self.config.tokenizer.vocab_size - WORDS

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
        config = self.config
        seed = [config.random_seed, self.index_split.value, int(idx)]
        random = numpy.random.default_rng(seed)
        most = config.sequence_length - SPECIAL
        words = int(random.integers(max(most // 2, 2), most + 1))
        text = (random.integers(self._words) + numpy.arange(words)) % self._words
        text += WORDS
        swapped = 0
        if config.classification_head:
            first, second = numpy.split(text, [random.integers(1, words)])
            swapped = int(random.random() < 0.5)
            if swapped:
                first, second = second, first
            text = numpy.concatenate([[CLS], first, [SEP], second, [SEP]])
            types = (numpy.arange(len(text)) > len(first) + 1).astype(numpy.int64)
        else:
            text = numpy.concatenate([[CLS], text, [SEP]])
            types = numpy.zeros_like(text)
        is_word = text >= WORDS
        chosen = is_word & (random.random(len(text)) < config.masking_probability)
        chosen[1] |= not chosen.any()
        return {
            "text": self._padded(numpy.where(chosen, MASK, text), PAD),
            "types": self._padded(types),
            "labels": self._padded(numpy.where(chosen, text, -1), -1),
            "is_random": swapped,
            "padding_mask": self._padded(numpy.ones_like(text)),
            "loss_mask": self._padded(chosen.astype(numpy.int64)),
        }

    def _padded(self, values: numpy.ndarray, fill: int = 0) -> numpy.ndarray:
        width = (0, self.config.sequence_length - len(values))
        return numpy.pad(values, width, constant_values=fill)
