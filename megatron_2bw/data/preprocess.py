"""Data preparation: a source of documents → shards by several processes → Megatron's .bin and .idx.

Invariant: the result depends only on the inputs and the options, not on the number of workers or of interruptions. The
next call continues the work of an interrupted one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

from megatron_2bw.data import vocabulary
from megatron_2bw.data.conversations import Conversations
from megatron_2bw.data.encoder import Encoder, plain, slow
from megatron_2bw.data.hub import load_tokenizer
from megatron_2bw.data.pool import Pool
from megatron_2bw.data.progress import Progress, say
from megatron_2bw.data.shards import merge, read_counts, total_counts, write_shard
from megatron_2bw.data.sources import DatasetSource, FileSource, Shard
from megatron_2bw.data.unfinished import Unfinished
from megatron_2bw.errors import UserError

NO_DOCUMENTS = "the input holds no documents: give other --input or --dataset, or see what --skip-bad-documents hides"
_FORMAT = 3  # raise it when the same inputs give other files
Source = FileSource | DatasetSource


@dataclass(frozen=True)
class NewTokenizer:
    """A new tokenizer: trained on about `sample` bytes of the text, or built from files."""

    kind: str  # bpe, wordpiece, files
    cased: bool = False
    vocab_size: int = 0
    sample: int = 0
    vocab_file: Path | None = None
    merge_file: Path | None = None


@dataclass(frozen=True)
class Task:
    """A request. `tokenizer` is a folder, a name on the Hub, or a new one."""

    task: str  # gpt, bert, sft
    source: Source
    prefix: Path
    tokenizer: str | NewTokenizer
    language: str = "en"
    workers: int = 1
    shard_bytes: int = 16_000_000


@dataclass(frozen=True)
class Result:
    """The outputs. This call tokenized `fresh` bytes of text in `seconds`, earlier calls the rest."""

    task: str
    prefix: Path
    tokenizer: str  # for --tokenizer-model
    counts: Counter[str]
    fresh: int
    seconds: float

    def flags(self) -> list[str]:
        """The Megatron flags that train on it."""
        tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", self.tokenizer]
        return ["--data-path", str(self.prefix), *tokenizer, *["--sft-data"] * (self.task == "sft")]


@dataclass(frozen=True)
class Job:
    """A worker's function of a shard; it loads the tokenizer at the first one."""

    folder: Path
    source: Source
    settings: dict | str  # of the Encoder, without `encode`; for sft the tokenizer's name
    tokenizer: Path  # a file of the tokenizers library, or a folder of transformers

    def __call__(self, shard: Shard) -> tuple[int, Counter[str]]:
        return write_shard(self.folder, shard, self.source, self._encoder)

    @cached_property
    def _encoder(self) -> Encoder | Conversations:
        if self.tokenizer.is_file():
            from tokenizers import Tokenizer

            return Encoder(plain(Tokenizer.from_file(str(self.tokenizer))), **self.settings)
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(self.tokenizer))
        if isinstance(self.settings, str):
            return Conversations(tokenizer, self.settings)
        return Encoder(slow(tokenizer), **self.settings)


def run(task: Task) -> Result:
    """Do the task, or the rest of an earlier call's. Raises UserError, and OSError if the work is interrupted."""
    unfinished = Unfinished(task.prefix)
    makes = isinstance(task.tokenizer, NewTokenizer)
    unfinished.check_free(makes)
    loaded = None if makes else load_tokenizer(task.tokenizer, task.task)
    with unfinished.locked():
        unfinished.check_free(makes)  # another call may have ended meanwhile
        manifest = _manifest(task, loaded)
        if unfinished.agree(manifest, "--skip-bad-documents"):  # the finished shards have no bad documents
            say(f"continuing the work in {unfinished.folder}")
        try:
            counts, fresh, seconds = unfinished.merged(), 0, 0.0
            if counts is None:
                counts, fresh, seconds = _work(task, unfinished, loaded)
                if _manifest(task, loaded) != manifest:
                    raise UserError(f"the input changed meanwhile: remove {unfinished.folder}, and call again")
                unfinished.set_merged(counts)
            unfinished.place()
        except UserError:
            unfinished.drop_if_unused()
            raise
    tokenizer = str(unfinished.placed_tokenizer) if makes else _absolute(task.tokenizer)
    return Result(task.task, task.prefix, tokenizer, counts, fresh, seconds)


def _absolute(name: str) -> str:
    path = Path(name).expanduser()
    return str(path.absolute()) if path.is_dir() else name


def _manifest(task: Task, loaded) -> dict:
    """All that the result depends on, by its flags."""
    entries = {
        "--task": task.task,
        "input files": hashlib.sha256(json.dumps(task.source.identity()).encode()).hexdigest()[:16],
        "--shard-mb": task.shard_bytes,
        "--language": task.language,
        "versions": [_FORMAT, *map(version, ("tokenizers", "sentencex", "transformers"))],
    }
    if isinstance(task.source, FileSource):
        entries |= {"--input-format": task.source.format, "--text-documents": task.source.documents}
    entries |= {"--json-keys": task.source.key, "--skip-bad-documents": task.source.skip_bad}
    if loaded is not None:
        return entries | {"tokenizer": loaded.digest()}
    new = dataclasses.asdict(task.tokenizer)
    if task.tokenizer.kind == "files":
        new["files"] = [path and path.stat().st_mtime_ns for path in (new["vocab_file"], new["merge_file"])]
    return entries | {"tokenizer": {name: str(value) for name, value in new.items()}}


def _work(task: Task, unfinished: Unfinished, loaded) -> tuple[Counter[str], int, float]:
    """Tokenize the missing shards, and merge. Returns the counts of the result, and this call's bytes of text and
    seconds, without the training of a tokenizer."""
    if loaded is None:
        unfinished.make_tokenizer(lambda folder: _make_tokenizer(task, folder))
        loaded = load_tokenizer(str(unfinished.tokenizer), task.task)
    start = time.monotonic()
    job = Job(unfinished.folder, task.source, _settings(task, loaded), _for_workers(task, unfinished, loaded))
    count, before = _tokenize(task, unfinished, job)
    counts = total_counts(unfinished.folder, count)
    if not counts["documents"]:
        unfinished.remove()
        raise UserError(NO_DOCUMENTS)
    say(f"writing {task.prefix}.bin and .idx")
    merge(unfinished.folder, count, unfinished.folder / "data")
    return counts, counts["bytes"] - before, time.monotonic() - start


def _settings(task: Task, loaded) -> dict | str:
    if task.task == "sft":
        return task.tokenizer
    from megatron.core.datasets.indexed_dataset import DType

    dtype = DType.optimal_dtype(loaded.vocab_size)
    return {"forbidden": loaded.forbidden, "dtype": dtype, "eod": loaded.eod, "language": task.language}


def _for_workers(task: Task, unfinished: Unfinished, loaded) -> Path:
    """Save the tokenizer for the workers, which import transformers only for chat templates and slow tokenizers."""
    alone = loaded.json and task.task != "sft"
    path = unfinished.folder / ("workers.json" if alone else "workers")
    if alone:
        path.write_text(loaded.json, encoding="utf-8")
    else:
        loaded.tokenizer.save_pretrained(str(path))
    return path


def _tokenize(task: Task, unfinished: Unfinished, job: Job) -> tuple[int, int]:
    """Write all shards. Returns their number, and the bytes of text in the shards of earlier calls."""
    count = before = 0

    def missing() -> Iterator[Shard]:
        nonlocal count, before
        for shard in task.source.shards(task.shard_bytes):
            count += 1
            if not unfinished.done(shard.number):
                yield shard
                continue
            before += read_counts(unfinished.folder, shard.number)["bytes"]
            progress.skip(shard.size)

    workers = task.workers
    if not task.source.expands():  # else the number of shards is unknown
        workers = min(workers, max(1, -(-task.source.size() // task.shard_bytes)))
    with Progress(task.source.size()) as progress, Pool(workers, job) as pool:
        for size, _ in pool.map(missing()):
            progress.advance(size)
    return count, before


def _make_tokenizer(task: Task, folder: Path) -> None:
    new = task.tokenizer
    if new.kind == "files":
        vocabulary.save(folder, *vocabulary.from_files(new.vocab_file, new.merge_file, task.task, new.cased))
        return
    if not task.source.size():
        raise UserError(NO_DOCUMENTS)
    special = vocabulary.special_tokens(task.task, new.kind)
    read = _sample(task, new.sample)
    trained = vocabulary.train(new.kind, read, new.vocab_size, special, new.cased)
    if trained.get_vocab_size() < new.vocab_size:
        if not any(map(str.strip, read())):
            raise UserError(NO_DOCUMENTS)
        raise UserError(
            f"--vocab-size {new.vocab_size}: the text gives only {trained.get_vocab_size()} tokens: ask for fewer"
        )
    vocabulary.save(folder, trained, special)


def _sample(task: Task, limit: int) -> Callable[[], Iterator[str]]:
    """Reads about `limit` bytes of text: all, or an equal share of the beginning of each shard.

    The amount of text in compressed input is unknown: it is always cut at its share.
    """
    size, expands = task.source.size(), task.source.expands()
    everything = limit >= size and not expands

    def read() -> Iterator[str]:
        counts, share = Counter(), 0.0  # bytes read, and to be read of the shards so far
        with Progress(size) as progress:
            for shard in task.source.shards(task.shard_bytes):
                share += limit * shard.size / size
                for text in task.source.texts(shard, counts) if everything or counts["bytes"] < share else ():
                    yield text
                    if counts["bytes"] >= share and not everything:
                        break
                progress.advance(shard.size)

    amount = f"at most {limit / 1e6:,.1f}" if expands else f"{min(limit, size) / 1e6:,.1f}"
    say(f"training the tokenizer on {amount} MB")
    return read
