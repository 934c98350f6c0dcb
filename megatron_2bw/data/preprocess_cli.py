"""scripts/preprocess_data.py: the flags of data preparation.

Invariant: bad input ends with status 2 and one line that names the flag, before anything is written; a flag without an
effect is refused. Stdout has only the Megatron flags that train on the result.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import shlex
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy

from megatron_2bw.data import indexed, vocabulary
from megatron_2bw.data.encoder import LONGEST_SENTENCE
from megatron_2bw.data.hub import open_dataset
from megatron_2bw.data.preprocess import NewTokenizer, Result, Source, Task, run
from megatron_2bw.data.progress import PROG, say
from megatron_2bw.data.sources import UNREADABLE, FileSource
from megatron_2bw.errors import Parser, UserError
from megatron_2bw.errors import report as report_error

SAMPLE_MB = 200.0
SHARD_MB = 16.0
LEFT_OUT = {  # by the name of its count
    "empty": "empty documents left out",
    "bad": "bad documents left out",
    "spelled": "tokens left out where the text spells out a special token",
    "single": "documents of one sentence: passed over with the binary head, trained on with --bert-no-binary-head",
    "long": f"documents with a sentence of more than {LONGEST_SENTENCE} tokens: "
    "Megatron's BERT dataset passes over them",
}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """A signal stops the work."""


def parser(prog: str = PROG) -> argparse.ArgumentParser:
    cli = Parser(prog, allow_abbrev=False, description="Text to Megatron's .bin and .idx.")
    add = cli.add_argument_group("output").add_argument
    tasks = "gpt: documents; bert: sentences; sft: conversations"
    add("--task", choices=("gpt", "bert", "sft"), required=True, help=tasks)
    add("--output-prefix", required=True, metavar="PREFIX", help="of the .bin and .idx; --data-path takes it")
    add = cli.add_argument_group("input: --input or --dataset").add_argument
    add("--input", nargs="+", metavar="FILE|FOLDER", help="text or JSON lines, also .gz, .bz2, .xz")
    add("--input-format", choices=("auto", "text", "jsonl"), help="auto (default): jsonl by .jsonl, .json, .ndjson")
    add("--text-documents", choices=("file", "blank-lines", "lines"), help="a document of a text file (default: file)")
    dataset = "of save_to_disk, of data files (parquet, csv, …), or a name on the Hub"
    add("--dataset", metavar="FOLDER|NAME", help=dataset)
    add("--dataset-config", metavar="NAME", help="as in load_dataset")
    add("--dataset-split", metavar="NAME", help="default: train")
    add("--json-keys", "--text-column", dest="key", metavar="NAME", help="key or column of the text (default: text)")
    skip = "count and skip documents that are not text, which are errors otherwise"
    add("--skip-bad-documents", action="store_true", help=skip)
    add = cli.add_argument_group("tokenizer: one of the first three").add_argument
    add("--tokenizer-model", metavar="FOLDER|NAME", help="any Hugging Face tokenizer")
    add("--vocab-file", type=Path, metavar="FILE", help="BERT's vocab.txt; vocab.json with --merge-file")
    add("--train-tokenizer", choices=("bpe", "wordpiece"), help="on the input; bpe is byte-level")
    add("--merge-file", type=Path, metavar="FILE", help="GPT-2's merges.txt")
    add("--vocab-size", type=int, metavar="N", help="of the trained tokenizer, with its special tokens")
    sample = f"text sampled evenly from the input (default: {SAMPLE_MB:.0f})"
    add("--train-tokenizer-mb", type=float, metavar="MB", help=sample)
    add("--cased", action="store_true", help="WordPiece keeps capital letters and accents")
    add = cli.add_argument
    add("--language", metavar="CODE", help="of the sentences, for bert: en (default), de, zh, …")
    add("--workers", type=int, metavar="N", help="processes (default: the cores that the job may use)")
    shard = "input of one unit of work (default: %(default)g)"
    add("--shard-mb", type=float, default=SHARD_MB, metavar="MB", help=shard)
    return cli


def task_of(options: argparse.Namespace) -> Task:
    """The task of the flags. Raises UserError."""
    check(options)
    prefix = Path(options.output_prefix).expanduser().absolute()
    if os.path.basename(options.output_prefix) in ("", ".", "..") or prefix.is_dir():
        raise UserError(f"--output-prefix {options.output_prefix}: a folder; add the name that the files begin with")
    for name in options.input or ():
        if any(prefix.parent.resolve().is_relative_to(folder.resolve()) for folder, _ in walk(name)):
            raise UserError(
                f"--output-prefix {options.output_prefix}: lies in --input {name}, and would be read as "
                "text; give another folder"
            )
    source = source_of(options)
    tokenizer, language = tokenizer_of(options), options.language or "en"
    workers = len(os.sched_getaffinity(0)) if options.workers is None else options.workers
    return Task(options.task, source, prefix, tokenizer, language, workers, max(1, int(options.shard_mb * 1e6)))


def check(options: argparse.Namespace) -> None:
    """Refuse flags that are empty, contradict each other or have no effect."""
    for name, value in vars(options).items():
        if value == "" or value == [""]:
            raise UserError(f"{_flag(name)}: an empty word; leave it out")
    for names in (("input", "dataset"), ("tokenizer_model", "vocab_file", "train_tokenizer")):
        given = [name for name in names if getattr(options, name) is not None]
        if len(given) != 1:
            flags = ", ".join(map(_flag, names))
            raise UserError(f"give one of {flags}" + (f", not {len(given)}" if given else ""))
    wordpiece = options.train_tokenizer == "wordpiece" or (options.vocab_file and not options.merge_file)
    text, of_text = options.task != "sft", ("input_format", "text_documents", "key", "vocab_file", "train_tokenizer")
    for name, needs, met in (
        *((name, "--task gpt or bert", text) for name in of_text),
        ("input_format", "--input", options.input),
        ("text_documents", "--input", options.input),
        ("dataset_config", "--dataset", options.dataset),
        ("dataset_split", "--dataset", options.dataset),
        ("merge_file", "--vocab-file", options.vocab_file),
        ("vocab_size", "--train-tokenizer", options.train_tokenizer),
        ("train_tokenizer_mb", "--train-tokenizer", options.train_tokenizer),
        ("cased", "a new WordPiece tokenizer (--train-tokenizer wordpiece, --vocab-file)", wordpiece),
        ("language", "--task bert", options.task == "bert"),
    ):
        if getattr(options, name) and not met:
            raise UserError(f"{_flag(name)}: only with {needs}; leave it out")
    if options.language and not re.fullmatch(r"[a-z]{2,3}(-[a-z0-9]+)*", options.language):
        raise UserError(f"--language {options.language}: give a code of two or three letters such as en, de or zh")
    if options.workers is not None and options.workers < 1:
        raise UserError(f"--workers {options.workers}: must be at least 1")
    for name in ("shard_mb", "train_tokenizer_mb"):
        value = getattr(options, name)
        if value is not None and not 0 < value < 1e6:
            raise UserError(f"{_flag(name)} {value:g}: must be more than 0")


def _flag(name: str) -> str:
    return "--json-keys" if name == "key" else f"--{name.replace('_', '-')}"


def source_of(options: argparse.Namespace) -> Source:
    key = None if options.task == "sft" else options.key or "text"
    if options.dataset:
        split = options.dataset_split
        return open_dataset(options.dataset, options.dataset_config, split, key, options.skip_bad_documents)
    form = "jsonl" if options.task == "sft" else options.input_format or "auto"
    files = tuple(file for name in options.input for file in input_files(name, options.input_format or "auto"))
    source = FileSource(files, form, options.text_documents or "file", key, options.skip_bad_documents)
    json = [source.is_json(file) for file in files]
    if options.key and not any(json):
        raise UserError(f"--json-keys {key}: none of the input is JSON lines; leave it out, or --input-format jsonl")
    if options.text_documents and all(json):
        raise UserError(f"--text-documents {options.text_documents}: all of the input is JSON lines; leave it out")
    return source


def input_files(name: str, form: str) -> list[str]:
    """The file, or the files below a folder in the order of their names, without hidden files."""
    path = Path(name).expanduser()
    below = (folder / each for folder, names in walk(name) for each in names)
    found = [path] if path.is_file() else sorted(file for file in below if file.is_file() or file.is_symlink())
    if not found:
        raise UserError(f"--input {name}: " + ("no files in it" if path.is_dir() else "no such file or folder"))
    for file in found:
        if not file.is_file():
            raise UserError(f"--input {file}: a link to what is no file")
        if file.suffix.lower() in UNREADABLE and form == "auto":
            how = "--dataset reads its folder" if file.suffix in (".parquet", ".arrow") else "unpack it first"
            raise UserError(f"--input {file}: neither text nor JSON lines; {how}")
        if not os.access(file, os.R_OK):
            raise UserError(f"--input {file}: may not be read")
    return [str(file) for file in found]


def walk(name: str) -> Iterator[tuple[Path, list[str]]]:
    """(folder, names of its files) of all folders below one, through links too, without what is hidden.

    Raises UserError for one that may not be read.
    """

    def refuse(error: OSError) -> None:
        raise UserError(f"--input {error.filename}: cannot be read, {error.strerror}")

    top = Path(name).expanduser()
    for place, folders, names in os.walk(top, onerror=refuse, followlinks=True) if top.is_dir() else ():
        folder = Path(place)
        depth = len(folder.relative_to(top).parts)
        around = {each.resolve() for each in (folder, *folder.parents[:depth])}  # a link to one of them would never end
        folders[:] = [each for each in folders if each[0] != "." and (folder / each).resolve() not in around]
        yield folder, [each for each in names if each[0] != "."]


def tokenizer_of(options: argparse.Namespace) -> str | NewTokenizer:
    if options.tokenizer_model:
        return options.tokenizer_model
    if options.vocab_file:
        for flag, path in (("--vocab-file", options.vocab_file), ("--merge-file", options.merge_file)):
            if path and not path.is_file():
                raise UserError(f"{flag} {path}: no such file")
        merges = options.merge_file and options.merge_file.absolute()
        return NewTokenizer("files", options.cased, vocab_file=options.vocab_file.absolute(), merge_file=merges)
    kind, size = options.train_tokenizer, options.vocab_size
    least = vocabulary.smallest(kind, vocabulary.special_tokens(options.task, kind))
    if size is None:
        raise UserError("--train-tokenizer: give --vocab-size, for example 32000")
    if size < least:
        raise UserError(f"--vocab-size {size}: must be at least {least}")
    return NewTokenizer(kind, options.cased, size, int((options.train_tokenizer_mb or SAMPLE_MB) * 1e6))


def report(task: Task, result: Result) -> None:
    """Print counts and speed on stderr."""
    counts = result.counts
    for name, text in LEFT_OUT.items():
        if counts[name]:
            say(f"{counts[name]:,} {text}")
    if task.task == "bert" and counts["single"] + counts["long"] >= counts["documents"]:
        say("warning: no document is left for training with the binary head")
    if task.task == "sft":
        half, most, all_of_them = numpy.quantile(indexed.lengths(str(task.prefix)), (0.5, 0.99, 1), method="higher")
        say(
            f"{counts['targets']:,} tokens are targets; of the conversations 50 % have {half:,} tokens or fewer, 99 % "
            f"{most:,}, all {all_of_them:,}: training cuts those of more than --seq-length + 1"
        )
    sentences = f"{counts['sequences']:,} sentences, " if task.task == "bert" else ""
    speed = f"{result.seconds:.1f} s, {result.fresh / 1e6 / max(result.seconds, 1e-3):.2f} MB/s"
    if result.fresh < counts["bytes"]:
        speed += f" (for {result.fresh / 1e6:,.1f} MB; an earlier call has done the rest)"
    say(
        f"{counts['documents']:,} documents, {sentences}{counts['tokens']:,} tokens, {counts['bytes'] / 1e6:,.1f} MB "
        f"of text, {speed}"
    )


def _stop(number: int, _frame) -> None:
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)  # once is enough: the pool stops the workers
    raise Stopped(number)


def main(argv: Sequence[str] | None = None, prog: str = PROG) -> int:
    """The exit status: 0, 2 for wrong input, 1 for interrupted work, 128 + n for signal n."""
    cli = parser(prog)
    options = cli.parse_args(argv)
    handlers = {number: signal.signal(number, _stop) for number in SIGNALS}
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # says that there is no GPU
    again = "the same command continues from here"
    try:
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron's import lists what is not installed
            task = task_of(options)
            result = run(task)
            report(task, result)
    except UserError as error:
        cli.error(str(error))
    except OSError as error:
        report_error(PROG, error, again)
        return 1
    except Stopped as stopped:
        print(f"{PROG}: stopped by {signal.Signals(stopped.args[0]).name}; {again}", file=sys.stderr)
        return 128 + stopped.args[0]
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    print(shlex.join(result.flags()))
    return 0
