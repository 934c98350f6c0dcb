"""Texts to token ids, for GPT (documents) and BERT (sentences), and the ids to
Megatron's .bin and .idx.

Invariant: the end of a document is the only special token; text that spells out a
special token stays text. The ids of a document depend only on its text, not on its
neighbours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy
from tokenizers import Tokenizer

# all its tokens, and the length of each of its sequences
Document = tuple[numpy.ndarray, list[int]]


@dataclass(frozen=True)
class Encoder:
    """Converts text to ids.

    tokenizer  the JSON of the tokenizers library
    eod        ends each document of GPT; None for BERT, whose documents are sentences
    language   of the sentences, for BERT
    """

    tokenizer: str
    eod: int | None = None
    language: str = "en"

    @cached_property
    def dtype(self) -> type[numpy.number]:
        from megatron.core.datasets.indexed_dataset import DType

        vocabulary = Tokenizer.from_str(self.tokenizer).get_vocab()
        return DType.optimal_dtype(max(vocabulary.values()) + 1)

    @cached_property
    # made in the process that uses it: pickled, it forgets encode_special_tokens
    def _tokenizer(self) -> Tokenizer:
        tokenizer = Tokenizer.from_str(self.tokenizer)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        return tokenizer

    @staticmethod
    def take(text: object) -> tuple[int, str]:
        """The bytes of `text`, and itself. ValueError for what is no text, or half of a
        surrogate pair."""
        if not isinstance(text, str):
            raise ValueError(f"the text is {type(text).__name__}, not a string")
        return len(text.encode()), text

    def encode(self, texts: list[str]) -> list[Document]:
        """A sequence that ends with eod for each text of GPT, the sentences of each
        text for BERT.

        A document without a token has no sequence.
        """
        parts = [self._parts(text) if text.strip() else [] for text in texts]
        encoded = self._tokenizer.encode_batch_fast(
            [part for each in parts for part in each], add_special_tokens=False
        )
        found, end = iter(encoded), [] if self.eod is None else [self.eod]
        documents = []
        for document in parts:
            sequences = [[*ids, *end] for _ in document if (ids := next(found).ids)]
            documents.append(
                (
                    numpy.array([*chain(*sequences)], self.dtype),
                    list(map(len, sequences)),
                )
            )
        return documents

    def _parts(self, text: str) -> list[str]:
        if self.eod is not None:
            return [text]
        import sentencex

        return [
            part
            for part in map(str.strip, sentencex.segment(self.language, text))
            if part
        ]


def write(
    prefix: Path, dtype: type[numpy.number], documents: Iterable[Document]
) -> Counter[str]:
    """Write the documents to `prefix`.bin and .idx by Megatron's builder, which holds
    45 bytes for each sequence.

    Returns how many documents, sequences, tokens, targets of --task sft, and empty
    documents (left out) there are.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    counts: Counter[str] = Counter()
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for tokens, lengths in documents:
        if not lengths:
            counts["empty"] += 1
            continue
        builder.add_document(tokens, lengths)
        counts.update(
            documents=1,
            sequences=len(lengths),
            tokens=len(tokens),
            targets=int((tokens >= 0).sum()),
        )
    builder.finalize(f"{prefix}.idx")
    return counts
