"""Data preparation: `datasets` reads the documents and maps the tokenizer, Megatron's builder writes .bin and .idx.

Invariant: the result depends only on the inputs and the options, not on the number of workers or of interruptions. The
work lies in PREFIX.unfinished until it is whole; the next call continues it. PREFIX.idx comes last, so it exists only
if all does.
"""

from __future__ import annotations

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

from megatron_2bw.data import hub, vocabulary
from megatron_2bw.data.conversations import Conversations
from megatron_2bw.data.encoder import COUNTS, Arrays, Encoder, write
from megatron_2bw.errors import UserError
from megatron_2bw.processes import end_with_parent

PROG = "preprocess_data.py"
PART_BYTES = 256_000_000  # of text: tokenized by all workers together; a later call continues after the last one
BATCH_BYTES = 1_000_000  # of text, on average: tokenized in one call
NO_DOCUMENTS = "the input holds no documents: give other --input or --dataset, or see what --skip-bad-documents hides"
_FORMAT = 4  # raise it when the same inputs give other files
_JSON = {".jsonl", ".json", ".ndjson"}
_ROWS = {"jsonl": "line", "lines": "line", "blank-lines": "paragraph", "file": "document"}  # as `datasets` names them


def say(text: str) -> None:
    print(f"{PROG}: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Source:
    """Rows of a dataset, or, of text files, those that _ROWS names. key: of the text; None for the whole object."""

    rows: Any  # a Dataset of the datasets library
    form: str | None
    key: str | None
    skip_bad: bool

    def documents(self, batch: dict[str, list], numbers: Iterable[int], take: Callable, counts: Counter) -> Iterator:
        """What `take` makes of each document. A bad one raises UserError, or is counted with `skip_bad`."""
        column = "text" if self.form else self.key
        rows = batch[column] if column else [dict(zip(batch, row)) for row in zip(*batch.values())]
        for row, number in zip(rows, numbers):
            try:
                yield from [take(document, counts) for document in (self._read(row) if self.form else [row])]
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                counts["bad"] += 1
                if not self.skip_bad:
                    begin = f"row {number + 1:,} of the input, {str(row)[:40]!r}: {str(error).splitlines()[0]}"
                    raise UserError(f"{begin} (--skip-bad-documents leaves such documents out)") from error

    def _read(self, row: str) -> list[Any]:
        """The documents of a line, a block between empty lines, or a file."""
        text = row.removeprefix("\ufeff")
        if self.skip_bad and "\ufffd" in text:
            raise ValueError("not valid UTF-8")
        if self.form == "blank-lines":  # they may hold spaces
            blocks = itertools.groupby(text.split("\n"), lambda line: bool(line.strip()))
            return ["\n".join(block) for written, block in blocks if written]
        if self.form != "jsonl" or not text.strip():
            return [text] if text.strip() else []
        record = json.loads(text)
        if self.key is not None and self.key not in record:
            raise ValueError(f"no key {self.key!r}, only {', '.join(record)}: give --json-keys")
        return [record if self.key is None else record[self.key]]

    def digest(self, *more: Any) -> str:
        """Of the source, of `more` that a result depends on, and of the libraries."""
        versions = map(version, ("tokenizers", "sentencex", "transformers"))
        parts = [_FORMAT, *versions, self.rows._fingerprint, self.form, self.key, *more]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Tokenize:
    """The function that is mapped: a batch of rows → one row with their Arrays and counts."""

    source: Source
    encoder: Encoder | Conversations
    first: int  # row of the source

    def __call__(self, batch: dict[str, list], numbers: list[int]) -> pyarrow.Table:
        counts: Counter[str] = Counter()
        numbers = [self.first + number for number in numbers]
        taken = list(self.source.documents(batch, numbers, self.encoder.take, counts))
        made = [*self.encoder.arrays(taken, counts), numpy.array([counts[name] for name in COUNTS])]
        lists = [pyarrow.ListArray.from_arrays([0, len(values)], values) for values in map(pyarrow.array, made)]
        return pyarrow.table(lists, [*Arrays._fields, "counts"])


def run(options: Namespace, prefix: Path) -> tuple[str, Counter[str], float | None]:
    """Do the work, or the rest of an earlier call's. Returns the tokenizer's name, the counts and the seconds.

    options: as preprocess_cli.py checks them. The seconds are those of tokenizing and writing; None if an earlier call
    has done a part. Raises UserError, and OSError if the work is interrupted.
    """
    folder = prefix.with_name(prefix.name + ".unfinished")
    places = [prefix.with_name(prefix.name + end) for end in ("-tokenizer", ".bin", ".idx")]
    places = places[options.tokenizer_model is not None :]
    # With the folder, .bin and the tokenizer are of a call that was killed while it moved them.
    for place in filter(Path.exists, places[-1:] if folder.exists() else places):
        raise UserError(f"--output-prefix {prefix}: {place} exists; remove it or give another prefix")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder / "lock", timeout=0):
            try:
                made, counts, seconds = _work(options, folder)
            except UserError:
                if not any(folder.glob("tokens-*")):  # nothing is lost
                    shutil.rmtree(folder)
                raise
            for result, place in zip(made[-len(places) :], places, strict=True):
                if place.is_dir():
                    shutil.rmtree(place)
                os.replace(result, place)
            shutil.rmtree(folder)
    except filelock.Timeout:
        raise UserError(f"--output-prefix {prefix}: another call is writing it: wait, or give another prefix") from None
    return options.tokenizer_model or str(places[0]), counts, seconds


def _work(options: Namespace, folder: Path) -> tuple[list[Path], Counter[str], float | None]:
    """Write the tokenizer's folder, .bin and .idx below `folder`. Returns their paths, and as `run`."""
    again = any(folder.glob("tokens-*"))
    if again:
        say(f"continuing the work in {folder}")
    sources = list(_sources(options, folder))
    tokenizer = Path(options.tokenizer_model or _new_tokenizer(options, sources, folder))
    loaded = hub.load_tokenizer(options.tokenizer_model or str(tokenizer), options.task)
    start = time.monotonic()
    if options.task == "sft":
        encoder = Conversations(loaded.tokenizer, options.tokenizer_model)
    else:
        from megatron.core.datasets.indexed_dataset import DType

        dtype = DType.optimal_dtype(loaded.vocab_size)
        encoder = Encoder(loaded.json, loaded.forbidden, dtype, loaded.eod, options.language)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process for each core is enough
    try:
        parts = [part for source in sources for part in _tokenized(source, encoder, loaded.digest(), options, folder)]
    except multiprocess.TimeoutError as error:  # which `datasets` raises in the place of a signal's
        raise error.__context__ or error from None
    except UserError:
        raise
    except (RuntimeError, EOFError) as error:
        raise ChildProcessError("a worker process was killed, perhaps for memory: fewer --workers need less") from error
    counts: Counter[str] = Counter()
    write(folder / "data", encoder.dtype, _drained(parts, counts))
    if not counts["documents"]:
        raise UserError(NO_DOCUMENTS)
    if counts["bad"] and not options.skip_bad_documents:
        raise UserError(f"{folder} holds work of a call with --skip-bad-documents: give the flag, or remove the folder")
    made = [tokenizer, folder / "data.bin", folder / "data.idx"]
    for path in made[1:]:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    return made, counts, None if again else time.monotonic() - start


def _sources(options: Namespace, folder: Path) -> Iterator[Source]:
    """The dataset; or the input, one source for neighbours of the same format."""
    skip, key = options.skip_bad_documents, None if options.task == "sft" else options.key
    if options.dataset:
        rows = hub.open_dataset(options.dataset, options.dataset_config, options.dataset_split, key)
        yield Source(rows, None, key, skip)

    def form(file: str) -> str:
        json_by_name = not _JSON.isdisjoint(suffix.lower() for suffix in Path(file).suffixes[-2:])
        is_json = json_by_name if options.input_format == "auto" else options.input_format == "jsonl"
        return "jsonl" if is_json or options.task == "sft" else options.text_documents

    for unit, files in itertools.groupby(options.files, form):
        words = dict(sample_by=_ROWS[unit], cache_dir=str(folder / "cache"), split="train")
        load = functools.partial(hub.load, "text", data_files=list(map(glob.escape, files)), **words)
        try:
            rows = load()
        except UserError as error:
            if not (skip and isinstance(error.__cause__.__cause__, UnicodeError)):
                raise
            rows = load(encoding_errors="replace")  # by U+FFFD
        yield Source(rows, unit, key, skip)


def _new_tokenizer(options: Namespace, sources: list[Source], folder: Path) -> Path:
    """The folder of a tokenizer that is trained, or built from files, unless an earlier call has done it."""
    asked = [options.train_tokenizer, options.vocab_size, options.train_tokenizer_mb, options.cased, options.task]
    files = [(str(path), path.stat().st_mtime_ns) for path in (options.vocab_file, options.merge_file) if path]
    place = folder / f"tokenizer-{sources[0].digest(asked, files, [source.digest() for source in sources])}"
    part = folder / "tokenizer.part"
    if not place.exists():
        shutil.rmtree(part, ignore_errors=True)  # of a call that was killed
        if options.vocab_file:
            vocabulary.from_files(part, options.vocab_file, options.merge_file, options.cased)
        else:
            vocabulary.save(part, *_trained(options, sources))
        os.rename(part, place)
    return place


def _trained(options: Namespace, sources: list[Source]) -> tuple[Any, dict[str, str]]:
    limit = options.train_tokenizer_mb * 1e6
    size = sum(source.rows.data.nbytes for source in sources)
    say(f"training the tokenizer on {min(limit, size) / 1e6:,.1f} MB")
    special = vocabulary.special_tokens(options.task, options.train_tokenizer)
    read = lambda: _sample(sources, limit / max(size, 1))
    if options.train_tokenizer == "bpe":
        trained = vocabulary.train_bpe(read(), options.vocab_size, list(special.values()))
    else:
        trained = vocabulary.train_wordpiece(read, options.vocab_size, special, options.cased)
    if (count := trained.get_vocab_size()) < options.vocab_size:
        raise UserError(
            f"--vocab-size {options.vocab_size}: the text gives only {count} tokens: ask for fewer"
            if any(map(str.strip, read()))
            else NO_DOCUMENTS
        )
    return trained, special


def _sample(sources: list[Source], share: float) -> Iterator[str]:
    """All documents, or about a share of them, from the beginning of each hundredth of a source."""
    for source in sources:
        count = len(source.rows)
        wanted = max(1, int(share * count))
        pieces = min(100, wanted) if wanted < count else 1
        for piece in range(pieces):
            start = count * piece // pieces
            numbers = itertools.count(start)
            for batch in source.rows.select(range(start, min(start + wanted // pieces, count))).iter(100):
                yield from source.documents(batch, numbers, Encoder.take, Counter())


def _tokenized(source: Source, encoder: Any, tokenizer: str, options: Namespace, folder: Path) -> Iterator[Any]:
    """The parts of a source as tokens, in datasets that lie in the folder; what an earlier call has done is taken."""
    rows, size = len(source.rows), max(source.rows.data.nbytes, 1)
    count = min(-(-size // PART_BYTES), rows)
    digest = source.digest(tokenizer, options.task, options.language, PART_BYTES)
    if options.workers > 1:
        _settle_children()
    for number in range(count):
        first, end = (rows * each // count for each in (number, number + 1))
        part = source.rows.select(range(first, end))
        if count > 1:
            say(f"tokenizing part {number + 1} of {count}")
        yield part.map(
            Tokenize(source, encoder, first),
            with_indices=True,
            batched=True,
            batch_size=max(1, BATCH_BYTES * rows // size),
            remove_columns=part.column_names,
            num_proc=options.workers if options.workers > 1 else None,
            cache_file_name=str(folder / f"tokens-{digest}-{number}.arrow"),
            load_from_cache_file=True,
            new_fingerprint=f"{digest}-{number}",
            desc="tokenizing",
        )


def _drained(parts: list[Any], counts: Counter[str]) -> Iterator[Arrays]:
    """The batches of the parts, each of which leaves the memory when it has been read."""
    while parts:
        for row in parts.pop(0).with_format("arrow").iter(1):
            tokens, lengths, ends, counted = (column.chunk(0).flatten().to_numpy() for column in row.columns)
            counts.update(dict(zip(COUNTS, counted.tolist())))
            yield Arrays(tokens, lengths, ends)


@functools.cache
def _settle_children() -> None:
    """From now on a forked process ends with this one, and by SIGTERM; Ctrl-C is left to this one."""

    def settle() -> None:
        end_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    os.register_at_fork(after_in_child=settle)
