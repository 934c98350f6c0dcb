"""Texts to token ids, for GPT (documents) and BERT (sentences), and the ids to
Megatron's .bin and .idx.

Invariant: the end of a document is the only special token; text that spells out a
special token stays text. The ids of a document depend only on its text, not on its
neighbours.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path

import numpy
from tokenizers import Tokenizer

EMPTY = "empty documents left out"

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
    def _tokenizer(self) -> Tokenizer:
        # Made in the process that uses it: pickled, it forgets encode_special_tokens.
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
        parts = list(map(self._parts, texts))
        encode = self._tokenizer.encode_batch_fast
        encoded = iter(encode(list(chain(*parts)), add_special_tokens=False))
        end = [] if self.eod is None else [self.eod]
        documents = []
        for document in parts:
            tokens = []
            lengths = []
            for part in islice(encoded, len(document)):
                if part.ids:
                    sequence = part.ids + end
                    tokens += sequence
                    lengths.append(len(sequence))
            documents.append((numpy.array(tokens, self.dtype), lengths))
        return documents

    def _parts(self, text: str) -> list[str]:
        """What is encoded by itself: the text for GPT, its sentences for BERT."""
        if not text.strip():
            return []
        if self.eod is not None:
            return [text]
        import sentencex

        sentences = map(str.strip, sentencex.segment(self.language, text))
        return list(filter(None, sentences))


def write(
    prefix: Path, dtype: type[numpy.number], documents: Iterable[Document]
) -> Counter[str]:
    """Write the documents to `prefix`.bin and .idx by Megatron's builder, which holds
    45 bytes for each sequence.

    Returns how many documents, sequences, tokens, targets of --task sft, and empty
    documents (left out) there are.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    counts = Counter()
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for tokens, lengths in documents:
        if not lengths:
            counts[EMPTY] += 1
            continue
        builder.add_document(tokens, lengths)
        counts["documents"] += 1
        counts["sequences"] += len(lengths)
        counts["tokens"] += len(tokens)
        counts["targets"] += int((tokens >= 0).sum())
    builder.finalize(f"{prefix}.idx")
    return counts
