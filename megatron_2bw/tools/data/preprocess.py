"""Data preparation: `datasets` reads the documents and maps the tokenizer, Megatron's
builder writes .bin and .idx.

Invariant: the result depends only on the inputs and the options, not on the number of
workers or of interruptions. The work lies in PREFIX.unfinished until it is whole; the
next call continues it. PREFIX.idx comes last.
"""

import functools
import hashlib
import itertools
import json
import math
import os
import shutil
import signal
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import filelock
import multiprocess
import pyarrow

from megatron_2bw.base.errors import UserError
from megatron_2bw.base.processes import end_with_parent
from megatron_2bw.tools.data import hub, vocabulary
from megatron_2bw.tools.data.conversations import Conversations
from megatron_2bw.tools.data.encoder import EMPTY, Document, Encoder, write
from megatron_2bw.tools.data.sources import Source, open_sources

# of text: tokenized by all workers together; a later call continues after the last one
PART_BYTES = 256_000_000
BATCH_BYTES = 1_000_000  # of text, on average: tokenized in one call
# whose versions may change the result
LIBRARIES = ("tokenizers", "sentencex", "transformers")
# of the results, in the order in which they are moved
ENDINGS = ("-tokenizer", ".bin", ".idx")
BAD = "bad documents left out"
# In this order in the last line; a sequence of BERT is a sentence.
_COUNTED = ("documents", "sequences", "tokens", "targets", EMPTY, BAD)
_FORMAT = 6  # raise it when the same inputs give other files


def say(text: str) -> None:
    print(f"megatron-2bw preprocess: {text}", file=sys.stderr, flush=True)


def preprocess(options: Namespace, prefix: Path) -> str:
    """Do the work, or the rest of an earlier call's. Returns the tokenizer's name.

    options: as preprocess_command.py checks them. Raises UserError, and OSError if the
    work is interrupted.
    """
    folder = Path(f"{prefix}.unfinished")
    endings = ENDINGS[1:] if options.tokenizer_model else ENDINGS
    places = {ending: Path(f"{prefix}{ending}") for ending in endings}
    for ending, place in places.items():
        # a call was killed while it moved its results
        moved = folder.exists() and ending != ".idx"
        if place.exists() and not moved:
            raise UserError(
                f"--output-prefix {prefix}: {place} exists; remove it or give another prefix"
            )
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(folder / "lock", timeout=0):
            try:
                _work(options, folder)
            except UserError:
                if not any(folder.glob("tokens-*")):  # nothing is lost
                    shutil.rmtree(folder)
                raise
            # Megatron's, of data that was there: it would be read again
            for index in prefix.glob("cache/*_indices"):
                shutil.rmtree(index)
            for ending, place in places.items():
                if place.is_dir():
                    shutil.rmtree(place)
                os.replace(folder / f"data{ending}", place)
            shutil.rmtree(folder)
    except filelock.Timeout:
        raise UserError(
            f"--output-prefix {prefix}: another call is writing it: wait, or give another prefix"
        ) from None
    return options.tokenizer_model or f"{prefix}-tokenizer"


def _work(options: Namespace, folder: Path) -> None:
    """Make the results in the folder: data.bin, data.idx, and perhaps data-tokenizer."""
    if any(folder.glob("tokens-*")):
        say(f"continuing the work in {folder}")
    sources = list(open_sources(options, folder / "cache"))
    name = options.tokenizer_model or _new_tokenizer(options, sources, folder)
    tokenizer, eod = hub.load_tokenizer(name, options.task)
    text = tokenizer.backend_tokenizer.to_str()
    start = time.monotonic()
    if options.task == "sft":
        encoder = Conversations(tokenizer, name)
    else:
        encoder = Encoder(text, eod, options.language)
    depends = [_FORMAT, *map(version, LIBRARIES), text, tokenizer.chat_template]
    depends += [encoder.dtype.__name__, options.task, options.language]
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process for each core is enough
    parts = []
    try:
        for source in sources:
            parts += _tokenized(source, encoder, depends, options.workers, folder)
    # which `datasets` raises in the place of a signal's
    except multiprocess.TimeoutError as error:
        raise error.__context__ or error from None
    counts = Counter()
    documents = _drained(parts, counts)
    counts.update(write(folder / "data", encoder.dtype, documents))
    if not counts["documents"]:
        for part in folder.glob("tokens-*"):
            part.unlink()
        raise UserError(
            "the input holds no documents, or --skip-bad-documents hides them: give other input"
        )
    if options.task != "sft":
        del counts["targets"]
    shown = [f"{counts[name]:,} {name}" for name in _COUNTED if counts[name]]
    seconds = time.monotonic() - start
    size = counts["bytes"] / 1e6
    say(f"{', '.join(shown)}; {size:,.1f} MB of text, {seconds:.1f} s")
    # a power failure must not cut what is moved to its place
    for path in folder.glob("data.*"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def _new_tokenizer(options: Namespace, sources: list[Source], folder: Path) -> str:
    """The place of a tokenizer that is trained, or built from files; another call makes
    the same one."""
    place = folder / "data-tokenizer"
    shutil.rmtree(place, ignore_errors=True)
    cased = options.cased
    if options.vocab_file:
        vocabulary.from_file(place, options.vocab_file, cased)
        return str(place)
    size = sum(source.rows.data.nbytes for source in sources)
    limit = options.train_tokenizer_mb * 1e6
    say(f"training the tokenizer on {min(limit, size) / 1e6:,.1f} MB")
    texts = functools.partial(_sample, sources, max(1, round(size / limit)))
    special = vocabulary.special_tokens(options.task, options.train_tokenizer)
    wanted = options.vocab_size
    if options.train_tokenizer == "bpe":
        trained = vocabulary.train_bpe(texts(), wanted, special)
    else:
        trained = vocabulary.train_wordpiece(texts, wanted, special, cased)
    count = trained.get_vocab_size()
    if count != wanted:
        raise UserError(
            f"--vocab-size {wanted}: a tokenizer of this text has {count} tokens"
        )
    vocabulary.save(place, trained, special)
    return str(place)


def _sample(sources: list[Source], step: int) -> Iterator[str]:
    """The documents of each `step`-th row of a source."""
    for source in sources:
        rows = source.rows.select(range(0, len(source.rows), step))
        numbers = itertools.count(0, step)
        for batch in rows.iter(100):
            for _, text in source.documents(batch, numbers, Encoder.take):
                if text:
                    yield text


def _tokenized(
    source: Source, encoder: Any, depends: list[Any], workers: int, folder: Path
) -> Iterator[Any]:
    """The parts of a source as tokens, in datasets that lie in the folder; what an
    earlier call has done is taken."""
    rows = len(source.rows)
    size = max(source.rows.data.nbytes, 1)
    count = min(math.ceil(size / PART_BYTES), rows)
    form = [source.rows._fingerprint, source.form, source.key, source.skip_bad]
    text = json.dumps([*depends, *form, PART_BYTES])
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    if workers > 1:
        _bind_children()
    for number in range(count):
        first = rows * number // count
        end = rows * (number + 1) // count
        part = source.rows.select(range(first, end))
        yield part.map(
            functools.partial(_tokenize, source, encoder, first),
            with_indices=True,
            batched=True,
            batch_size=max(1, BATCH_BYTES * rows // size),
            remove_columns=part.column_names,
            num_proc=workers if workers > 1 else None,
            cache_file_name=str(folder / f"tokens-{digest}-{number}.arrow"),
            load_from_cache_file=True,
            new_fingerprint=f"{digest}-{number}",
            desc=f"tokenizing part {number + 1} of {count}",
        )


def _tokenize(
    source: Source, encoder: Any, first: int, batch: dict[str, list], numbers: list[int]
) -> pyarrow.Table:
    """A row for each document of a batch of rows, which are numbered from the row
    `first` of the source on."""
    places = itertools.count(first + numbers[0])
    taken = list(source.documents(batch, places, encoder.take))
    good = [document for _, document in taken if document is not None]
    encoded = iter(encoder.encode(good))
    rows = []
    for size, document in taken:
        row = {"bytes": size}
        if document is not None:
            row["tokens"], row["lengths"] = next(encoded)
        rows.append(row)
    columns = {
        "tokens": pyarrow.list_(pyarrow.from_numpy_dtype(encoder.dtype)),
        "lengths": pyarrow.list_(pyarrow.int32()),
        "bytes": pyarrow.int64(),
    }
    return pyarrow.Table.from_pylist(rows, pyarrow.schema(columns))


def _drained(parts: list[Any], counts: Counter[str]) -> Iterator[Document]:
    """The documents of the parts, each of which leaves the memory when it has been
    read; counts bytes and bad ones."""
    while parts:
        for table in parts.pop(0).with_format("arrow").iter(1000):
            for tokens, lengths, size in zip(*table.columns):
                counts["bytes"] += size.as_py()
                if tokens.is_valid:
                    yield tokens.values.to_numpy(), lengths.values.to_pylist()
                else:
                    counts[BAD] += 1


@functools.cache
def _bind_children() -> None:
    """From now on a forked process ends with this one, and by SIGTERM; Ctrl-C is left
    to this one."""
    os.register_at_fork(after_in_child=_bind_to_parent)


def _bind_to_parent() -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
