"""Texts to token ids, for GPT (documents) and BERT (sentences).

Invariant: the end of a document is the only special token; text that spells out a special token never becomes one. The
ids of a document depend only on its text, not on its neighbours. Imports neither torch nor transformers, so that a
worker process starts quickly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy
from tokenizers import Tokenizer

from megatron_2bw.data.indexed import LONGEST_SENTENCE
from megatron_2bw.data.sources import checked
from megatron_2bw.portions import portions

BATCH_CHARACTERS = 1_000_000  # tokenized in one call
COUNTS = "documents sequences tokens bytes empty bad spelled single long targets".split()  # bytes: of UTF-8 text


@dataclass(frozen=True)
class Encoder:
    """Converts text to ids.

    encode     texts → the ids of each, without special tokens
    forbidden  ids that are never text: if the tokenizer makes one of a text, it is removed and counted
    eod        ends each document of GPT; None for BERT, whose documents are sentences
    language   of the sentences, for BERT
    """

    encode: Callable[[list[str]], list[list[int]]]
    forbidden: frozenset[int]
    dtype: type[numpy.number]
    eod: int | None = None
    language: str = "en"
    document = staticmethod(checked)  # of what the source holds

    def shard(self, texts: Iterable[str], counts: Counter[str]) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
        """Encode the documents: their tokens, the length of each sequence, the sequence after each document."""
        parts, lengths, ends = [numpy.zeros(0, self.dtype)], [], []
        for batch in portions(texts, len, BATCH_CHARACTERS):
            written = [text for text in batch if text.strip()]
            counts["empty"] += len(batch) - len(written)
            for sequences in self.documents(written, counts):
                if not sequences:
                    counts["empty"] += 1
                    continue
                parts += sequences
                lengths += map(len, sequences)
                ends.append(len(lengths))
                if self.eod is None:
                    _judge(sequences, counts)
            parts = [numpy.concatenate(parts)]
        counts.update(documents=len(ends), sequences=len(lengths), tokens=len(parts[0]))
        return parts[0], numpy.array(lengths, numpy.int32), numpy.array(ends, numpy.int64)

    def documents(self, texts: list[str], counts: Counter[str]) -> Iterator[list[numpy.ndarray]]:
        """The sequences of each document: one that ends with eod for GPT, the sentences for BERT.

        Empty for a document without a token.
        """
        documents = self._sentences(texts) if self.eod is None else [[text] for text in texts]
        encoded = iter(self.encode([text for document in documents for text in document]))
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


def _judge(sentences: list[numpy.ndarray], counts: Counter[str]) -> None:
    """Count the documents that Megatron's BERT dataset skips."""
    if len(sentences) == 1:
        counts["single"] += 1  # with the binary head
    elif max(map(len, sentences)) > LONGEST_SENTENCE:
        counts["long"] += 1


def plain(tokenizer: Tokenizer) -> Callable[[list[str]], list[list[int]]]:
    """`encode` of a tokenizer of the tokenizers library: whole texts, without special tokens."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return lambda texts: [each.ids for each in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def slow(tokenizer) -> Callable[[list[str]], list[list[int]]]:
    """`encode` of a transformers tokenizer written in Python."""

    def encode(texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        return tokenizer(texts, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]

    return encode
