"""Texts to token ids, for GPT (documents) and BERT (sentences), and the ids to Megatron's .bin and .idx.

Invariant: the end of a document is the only special token; text that spells out a special token never becomes one. The
ids of a document depend only on its text, not on its neighbours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy

LONGEST_SENTENCE = 512  # tokens; Megatron's BERT skips a document with a longer sentence
COUNTS = "documents sequences tokens bytes empty bad spelled single long targets".split()  # bytes: of UTF-8 text


class Arrays(NamedTuple):
    """Some documents: all tokens, the length of each sequence, the number of sequences up to each document's end."""

    tokens: numpy.ndarray
    lengths: numpy.ndarray
    ends: numpy.ndarray


@dataclass(frozen=True)
class Encoder:
    """Converts text to ids.

    tokenizer  the JSON of the tokenizers library
    forbidden  ids that are never text: if the tokenizer makes one of a text, it is removed and counted
    eod        ends each document of GPT; None for BERT, whose documents are sentences
    language   of the sentences, for BERT
    """

    tokenizer: str
    forbidden: frozenset[int]
    dtype: type[numpy.number]
    eod: int | None = None
    language: str = "en"

    @cached_property
    def _encode(self) -> Callable[[list[str]], list[list[int]]]:
        """Texts → the ids of each, without special tokens."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(self.tokenizer)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        return lambda texts: [each.ids for each in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    @staticmethod
    def take(text: object, counts: Counter[str]) -> str:
        """`text` if it is one; its bytes are counted. ValueError also for half of a surrogate pair, as JSON spells."""
        if not isinstance(text, str):
            raise ValueError(f"the text is {type(text).__name__}, not a string")
        counts["bytes"] += len(text.encode())
        return text

    def arrays(self, texts: list[str], counts: Counter[str]) -> Arrays:
        """Encode the documents, and count."""
        written = [text for text in texts if text.strip()]
        parts, lengths, ends = [numpy.zeros(0, self.dtype)], [], []
        for sequences in self._documents(written, counts):
            if sequences:
                parts += sequences
                lengths += map(len, sequences)
                ends.append(len(lengths))
                if self.eod is None:  # count the documents that Megatron's BERT dataset skips
                    counts["single"] += len(sequences) == 1  # with the binary head
                    counts["long"] += len(sequences) > 1 and max(map(len, sequences)) > LONGEST_SENTENCE
        tokens = numpy.concatenate(parts)
        counts.update(empty=len(texts) - len(ends), documents=len(ends), sequences=len(lengths), tokens=len(tokens))
        return Arrays(tokens, numpy.array(lengths, numpy.int32), numpy.array(ends, numpy.int32))

    def _documents(self, texts: list[str], counts: Counter[str]) -> Iterator[list[numpy.ndarray]]:
        """The sequences of each document: one that ends with eod for GPT, the sentences for BERT.

        Empty for a document without a token.
        """
        documents = self._sentences(texts) if self.eod is None else [[text] for text in texts]
        encoded = iter(self._encode([text for document in documents for text in document]))
        end = [] if self.eod is None else [self.eod]
        for document in documents:
            found = (self._clean(next(encoded), counts) for _ in document)
            yield [numpy.array([*ids, *end], self.dtype) for ids in found if ids]

    def _sentences(self, texts: list[str]) -> list[list[str]]:
        import sentencex

        split = (sentencex.segment(self.language, text) for text in texts)
        return [[part for part in map(str.strip, document) if part] for document in split]

    def _clean(self, ids: list[int], counts: Counter[str]) -> list[int]:
        if self.forbidden.isdisjoint(ids):
            return ids
        kept = [number for number in ids if number not in self.forbidden]
        counts["spelled"] += len(ids) - len(kept)
        return kept


def write(prefix: Path, dtype: type[numpy.number], batches: Iterable[Arrays]) -> None:
    """Write the documents to `prefix`.bin and .idx by Megatron's builder, which holds 45 bytes for each sequence."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for tokens, lengths, ends in batches:
        start = first = 0
        for end in ends:
            own = lengths[first:end]
            stop = start + int(own.sum())
            builder.add_document(tokens[start:stop], own.tolist())
            start, first = stop, end
    builder.finalize(f"{prefix}.idx")
