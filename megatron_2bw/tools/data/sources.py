"""The input of data preparation: rows of a dataset or of text files, and the documents
in them.

Invariant: a source can be pickled, and its documents depend only on its rows. A bad
document is named by its file and its row there, or left out.
"""

import contextlib
import glob
import itertools
import json
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_2bw.base.errors import UserError
from megatron_2bw.tools.data import hub

_JSON = {".jsonl", ".json", ".ndjson"}
# What `datasets` makes a row of, by the form of the rows.
_ROWS = {
    "jsonl": "line",
    "array": "document",
    "lines": "line",
    "blank-lines": "paragraph",
    "file": "document",
}


@dataclass(frozen=True)
class Source:
    """Rows of a dataset, whose form is None, or of text files.

    rows: a Dataset of the library datasets. form: a key of _ROWS. key: of the text, or
    None for the whole object. names: of the dataset, or of the files, which `read`
    reads one by one.
    """

    rows: Any
    form: str | None
    key: str | None
    skip_bad: bool
    names: list[str]
    read: Callable | None = None

    def documents(
        self, batch: dict[str, list], numbers: Iterable[int], take: Callable
    ) -> Iterator[tuple]:
        """What `take` makes of each document of a batch of rows with these numbers. A
        bad one raises UserError, or with `skip_bad` is (0, None)."""
        for row, number in zip(self._rows(batch), numbers):
            try:
                yield from [take(document) for document in self._documents(row)]
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                if not self.skip_bad:
                    reason = str(error).partition("\n")[0] or type(error).__name__
                    raise UserError(
                        f"{self._place(number)}, {str(row)[:40]!r}: {reason} "
                        "(--skip-bad-documents leaves such documents out)"
                    ) from error
                yield 0, None

    def _rows(self, batch: dict[str, list]) -> list[Any]:
        column = "text" if self.form else self.key
        if column:
            return batch[column]
        return [dict(zip(batch, values)) for values in zip(*batch.values())]

    def _place(self, number: int) -> str:
        """The file, and the row in it from 1 on, of a row of this source."""
        for name in self.names[:-1]:
            with contextlib.suppress(UserError):  # a file without a row cannot be read
                rows = len(self.read([name]))
                if number < rows:
                    break
                number -= rows
        else:
            name = self.names[-1]
        flag = "--input" if self.form else "--dataset"
        return f"{flag} {name}, row {number + 1:,}"

    def _documents(self, row: Any) -> list[Any]:
        """The documents of a line, a block between empty lines, or a file."""
        if self.form is None:
            return [row]
        text = row.removeprefix("\ufeff")
        if self.skip_bad and "\ufffd" in text:
            raise ValueError("not valid UTF-8")
        if not text.strip():
            return []
        if self.form in ("jsonl", "array"):
            return [self._entry(text)]
        if self.form == "blank-lines":  # they may hold spaces
            lines = text.split("\n")
            blocks = itertools.groupby(lines, lambda line: bool(line.strip()))
            return ["\n".join(block) for written, block in blocks if written]
        return [text]

    def _entry(self, text: str) -> Any:
        try:
            record = json.loads(text)
        except ValueError as error:
            raise ValueError(f"it is no JSON, {error}") from None
        if not isinstance(record, dict):
            raise ValueError(f"it is {type(record).__name__}, not an object with keys")
        if self.key is None:
            return record
        if self.key not in record:
            keys = ", ".join(record)
            raise ValueError(f"no key {self.key!r}, only {keys}: give --json-keys")
        return record[self.key]


def open_sources(options: Namespace, cache: Path) -> Iterator[Source]:
    """The dataset; or the input, one source for neighbours of the same format."""
    skip_bad = options.skip_bad_documents
    key = None if options.task == "sft" else options.key
    name, split = options.dataset, options.dataset_split
    if name:
        where = f"--dataset {name}, --dataset-split {split}, --text-column {key}"
        rows = hub.load(where, name, split, key, name=options.dataset_config)
        yield Source(rows, None, key, skip_bad, [name])
    form = partial(_form, options)
    errors = "replace" if skip_bad else "strict"  # by U+FFFD
    for (unit, _), files in itertools.groupby(options.files, form):
        read = partial(_load_files, unit, str(cache), errors)
        names = list(files)
        yield Source(read(names), unit, key, skip_bad, names, read)


def _form(options: Namespace, file: str) -> tuple[str, str]:
    """The form of the rows of a file, and its name if it is a source by itself."""
    endings = Path(file.lower()).suffixes[-2:]  # the last may be that of a compression
    if options.task != "sft" and _JSON.isdisjoint(endings):
        return options.text_documents, ""
    return ("array", file) if hub.holds_array(file) else ("jsonl", "")


def _load_files(form: str, cache: str, errors: str, names: list[str]) -> Any:
    """The rows of files; of a JSON array its elements, each as a line of JSON."""
    return hub.load(
        f"--input {' '.join(names)[:200]}",
        "text",
        "train",
        arrays=form == "array",
        data_files=[glob.escape(name) for name in names],
        sample_by=_ROWS[form],
        cache_dir=cache,
        encoding_errors=errors,
    )
