"""Data preparation: `datasets` reads the documents and maps the tokenizer, Megatron's
builder writes .bin and .idx.

Invariant: the result depends only on the inputs and the options, not on the number of
workers or of interruptions. The work lies in PREFIX.unfinished until it is whole; the
next call continues it. PREFIX.idx comes last.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import itertools
import json
import os
import shutil
import signal
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import filelock
import multiprocess
import numpy
import pyarrow

from megatron_2bw.base.errors import UserError
from megatron_2bw.base.processes import end_with_parent
from megatron_2bw.tools.data import hub, vocabulary
from megatron_2bw.tools.data.conversations import Conversations
from megatron_2bw.tools.data.encoder import Document, Encoder, write

# of text: tokenized by all workers together; a later call continues after the last one
PART_BYTES = 256_000_000
BATCH_BYTES = 1_000_000  # of text, on average: tokenized in one call
# whose versions may change the result
LIBRARIES = ("tokenizers", "sentencex", "transformers")
COLUMNS = ("tokens", "lengths")  # of a Document
_FORMAT = 6  # raise it when the same inputs give other files
_JSON = {".jsonl", ".json", ".ndjson"}
# The rows of a form, as `datasets` names them.
_ROWS = {
    "jsonl": "line",
    "array": "document",
    "lines": "line",
    "blank-lines": "paragraph",
    "file": "document",
}


def say(text: str) -> None:
    print(f"megatron-2bw preprocess: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Source:
    """Rows of a dataset, or, of text files, those that _ROWS names. key: of the text;
    None for the whole object.

    names: of the dataset, or of the files, which `read` reads one by one
    """

    rows: Any  # a Dataset of the datasets library
    form: str | None
    key: str | None
    skip_bad: bool
    names: list[str]
    read: Callable | None = None

    def documents(
        self, batch: dict[str, list], numbers: Iterable[int], take: Callable
    ) -> Iterator:
        """What `take` makes of each document. A bad one raises UserError, or with
        `skip_bad` is (0, None)."""
        column = "text" if self.form else self.key
        rows = (
            batch[column]
            if column
            else [dict(zip(batch, row)) for row in zip(*batch.values())]
        )
        for row, number in zip(rows, numbers):
            try:
                yield from [
                    take(document)
                    for document in (self._read(row) if self.form else [row])
                ]
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                if not self.skip_bad:
                    reason = str(error).partition("\n")[0] or type(error).__name__
                    begin = f"{self._place(number)}, {str(row)[:40]!r}: {reason}"
                    raise UserError(
                        f"{begin} (--skip-bad-documents leaves such documents out)"
                    ) from error
                yield 0, None

    def _place(self, number: int) -> str:
        """The file, and the row in it from 1 on, of a row of this source."""
        flag = "--input" if self.form else "--dataset"
        for name in self.names:
            rows = number + 1 if len(self.names) == 1 else 0
            with contextlib.suppress(UserError):  # a file without a row cannot be read
                rows = rows or len(self.read([name]))
            if number < rows:
                return f"{flag} {name}, row {number + 1:,}"
            number -= rows

    def _read(self, row: str) -> list[Any]:
        """The documents of a line, a block between empty lines, or a file."""
        text = row.removeprefix("\ufeff")
        if self.skip_bad and "\ufffd" in text:
            raise ValueError("not valid UTF-8")
        if self.form == "blank-lines":  # they may hold spaces
            blocks = itertools.groupby(
                text.split("\n"), lambda line: bool(line.strip())
            )
            return ["\n".join(block) for written, block in blocks if written]
        if self.form not in ("jsonl", "array") or not text.strip():
            return [text] if text.strip() else []
        try:
            record = json.loads(text)
        except ValueError as error:
            raise ValueError(f"it is no JSON, {error}") from None
        if not isinstance(record, dict):
            raise ValueError(f"it is {type(record).__name__}, not an object with keys")
        if self.key is not None and self.key not in record:
            raise ValueError(
                f"no key {self.key!r}, only {', '.join(record)}: give --json-keys"
            )
        return [record if self.key is None else record[self.key]]


def run(options: Namespace, prefix: Path) -> str:
    """Do the work, or the rest of an earlier call's. Returns the tokenizer's name.

    options: as preprocess_cli.py checks them. Raises UserError, and OSError if the work
    is interrupted.
    """
    folder = prefix.with_name(prefix.name + ".unfinished")
    places = [
        prefix.with_name(prefix.name + end) for end in ("-tokenizer", ".bin", ".idx")
    ]
    places = places[options.tokenizer_model is not None :]
    # With the folder, .bin and the tokenizer are of a call that was killed while it
    # moved them.
    for place in filter(Path.exists, places[-1:] if folder.exists() else places):
        raise UserError(
            f"--output-prefix {prefix}: {place} exists; remove it or give another prefix"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder / "lock", timeout=0):
            try:
                made = _work(options, folder)
            except UserError:
                if not any(folder.glob("tokens-*")):  # nothing is lost
                    shutil.rmtree(folder)
                raise
            # Megatron's, of data that was there: it would be read again
            for index in prefix.glob("cache/*_indices"):
                shutil.rmtree(index)
            for result, place in zip(made[-len(places) :], places, strict=True):
                if place.is_dir():
                    shutil.rmtree(place)
                os.replace(result, place)
            shutil.rmtree(folder)
    except filelock.Timeout:
        raise UserError(
            f"--output-prefix {prefix}: another call is writing it: wait, or give another prefix"
        ) from None
    return options.tokenizer_model or str(places[0])


def _work(options: Namespace, folder: Path) -> list[Path]:
    """Write the tokenizer's folder, .bin and .idx below `folder`. Returns their
    paths."""
    if any(folder.glob("tokens-*")):
        say(f"continuing the work in {folder}")
    sources = list(_sources(options, folder))
    tokenizer = Path(
        options.tokenizer_model or _new_tokenizer(options, sources, folder)
    )
    loaded, eod = hub.load_tokenizer(
        options.tokenizer_model or str(tokenizer), options.task
    )
    start, text = time.monotonic(), loaded.backend_tokenizer.to_str()
    if options.task == "sft":
        encoder = Conversations(loaded, options.tokenizer_model)
    else:
        encoder = Encoder(text, eod, options.language)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process for each core is enough
    counts: Counter[str] = Counter()
    depends = [
        _FORMAT,
        *map(version, LIBRARIES),
        text,
        loaded.chat_template,
        encoder.dtype.__name__,
    ]
    depends += [options.task, options.language]
    try:
        parts = [
            part
            for source in sources
            for part in _tokenized(source, encoder, depends, options.workers, folder)
        ]
    # which `datasets` raises in the place of a signal's
    except multiprocess.TimeoutError as error:
        raise error.__context__ or error from None
    counts.update(write(folder / "data", encoder.dtype, _drained(parts, counts)))
    if not counts["documents"]:
        for part in folder.glob("tokens-*"):
            part.unlink()
        raise UserError(
            "the input holds no documents, or --skip-bad-documents hides them: give other input"
        )
    # sentences of BERT
    names = ["documents", "sequences", "tokens", *["targets"] * (options.task == "sft")]
    shown = [f"{counts[name]:,} {name}" for name in names]
    shown += [
        f"{counts[name]:,} {name} documents left out"
        for name in ("empty", "bad")
        if counts[name]
    ]
    say(
        f"{', '.join(shown)}; {counts['bytes'] / 1e6:,.1f} MB of text, "
        f"{time.monotonic() - start:.1f} s"
    )
    made = [folder / "data.bin", folder / "data.idx"]
    for path in made:  # a power failure must not cut what is moved to its place
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    return [tokenizer, *made]


def _sources(options: Namespace, folder: Path) -> Iterator[Source]:
    """The dataset; or the input, one source for neighbours of the same format."""
    skip, key = (
        options.skip_bad_documents,
        None if options.task == "sft" else options.key,
    )
    if name := options.dataset:
        where = f"--dataset {name}, --dataset-split {options.dataset_split}, --text-column {key}"
        rows = hub.load(
            where, name, options.dataset_split, key, name=options.dataset_config
        )
        yield Source(rows, None, key, skip, [name])

    def form(file: str) -> tuple[str, str]:
        """What the rows are, and the name of a file that is a source by itself."""
        json_by_name = not _JSON.isdisjoint(
            suffix.lower() for suffix in Path(file).suffixes[-2:]
        )
        is_json = (
            json_by_name
            if options.input_format == "auto"
            else options.input_format == "jsonl"
        )
        if not is_json and options.task != "sft":
            return options.text_documents, ""
        return ("array", file) if hub.holds_array(file) else ("jsonl", "")

    for (unit, _), files in itertools.groupby(options.files, form):
        # by U+FFFD
        read = functools.partial(
            _read, unit, str(folder / "cache"), "replace" if skip else "strict"
        )
        names = list(files)
        yield Source(read(names), unit, key, skip, names, read)


def _read(form: str, cache: str, errors: str, names: list[str]) -> Any:
    """The rows of files; of a JSON array its elements, each as a line of JSON."""
    words = dict(
        data_files=[*map(glob.escape, names)],
        sample_by=_ROWS[form],
        cache_dir=cache,
        encoding_errors=errors,
    )
    return hub.load(
        f"--input {' '.join(names)[:200]}",
        "text",
        "train",
        arrays=form == "array",
        **words,
    )


def _new_tokenizer(options: Namespace, sources: list[Source], folder: Path) -> Path:
    """The folder of a tokenizer that is trained, or built from files; another call
    makes the same one."""
    place = folder / "tokenizer"
    shutil.rmtree(place, ignore_errors=True)
    if options.vocab_file:
        vocabulary.from_files(
            place, options.vocab_file, options.merge_file, options.cased
        )
    else:
        vocabulary.save(place, *_trained(options, sources))
    return place


def _trained(options: Namespace, sources: list[Source]) -> tuple[Any, dict[str, str]]:
    size, limit = (
        sum(source.rows.data.nbytes for source in sources),
        options.train_tokenizer_mb * 1e6,
    )
    say(f"training the tokenizer on {min(limit, size) / 1e6:,.1f} MB")
    special = vocabulary.special_tokens(options.task, options.train_tokenizer)
    read = lambda: _sample(sources, max(1, round(size / limit)))
    if options.train_tokenizer == "bpe":
        trained = vocabulary.train_bpe(
            read(), options.vocab_size, list(special.values())
        )
    else:
        trained = vocabulary.train_wordpiece(
            read, options.vocab_size, special, options.cased
        )
    if (count := trained.get_vocab_size()) != options.vocab_size:
        raise UserError(
            f"--vocab-size {options.vocab_size}: a tokenizer of this text has {count} tokens"
        )
    return trained, special


def _sample(sources: list[Source], step: int) -> Iterator[str]:
    """The documents of each `step`-th row of a source."""
    for source in sources:
        rows = source.rows.select(range(0, len(source.rows), step))
        numbers = itertools.count(0, step)
        for batch in rows.iter(100):
            yield from (
                text
                for _, text in source.documents(batch, numbers, Encoder.take)
                if text
            )


def _tokenized(
    source: Source, encoder: Any, depends: list[Any], workers: int, folder: Path
) -> Iterator[Any]:
    """The parts of a source as tokens, in datasets that lie in the folder; what an
    earlier call has done is taken."""
    rows, size = len(source.rows), max(source.rows.data.nbytes, 1)
    count = min(-(-size // PART_BYTES), rows)
    parts = [
        *depends,
        source.rows._fingerprint,
        source.form,
        source.key,
        source.skip_bad,
        PART_BYTES,
    ]
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    if workers > 1:
        _settle_children()
    for number in range(count):
        first, end = (rows * each // count for each in (number, number + 1))
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
    found = list(
        source.documents(batch, (first + number for number in numbers), encoder.take)
    )
    made = iter(encoder.encode([each for _, each in found if each is not None]))
    documents = [(None, None) if each is None else next(made) for _, each in found]
    lists = [
        pyarrow.list_(pyarrow.from_numpy_dtype(kind))
        for kind in (encoder.dtype, numpy.int32)
    ]
    columns = {
        name: pyarrow.array([each[at] for each in documents], lists[at])
        for at, name in enumerate(COLUMNS)
    }
    return pyarrow.table(
        columns | {"bytes": pyarrow.array([size for size, _ in found], pyarrow.int64())}
    )


def _drained(parts: list[Any], counts: Counter[str]) -> Iterator[Document]:
    """The documents of the parts, each of which leaves the memory when it has been
    read; counts bytes and bad ones."""
    while parts:
        for table in parts.pop(0).with_format("arrow").iter(1000):
            for tokens, lengths, size in zip(*table.columns):
                counts.update(bytes=size.as_py(), bad=int(not tokens.is_valid))
                if tokens.is_valid:
                    yield tokens.values.to_numpy(), lengths.values.to_pylist()


@functools.cache
def _settle_children() -> None:
    """From now on a forked process ends with this one, and by SIGTERM; Ctrl-C is left
    to this one."""

    def settle() -> None:
        end_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    os.register_at_fork(after_in_child=settle)
