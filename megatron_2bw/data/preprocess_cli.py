"""scripts/preprocess_data.py: the flags of data preparation.

Invariant: bad input ends with status 2 and one line that names the flag. Stdout has only the Megatron flags that train
on the result.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import logging
import os
import shlex
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megatron_2bw.data import vocabulary
from megatron_2bw.data.encoder import LONGEST_SENTENCE
from megatron_2bw.errors import Parser, UserError, run_program
from megatron_2bw.processes import exit_on_signals

PROG = "preprocess_data.py"
LEFT_OUT = {  # by the name of its count
    "empty": "empty documents left out",
    "bad": "bad documents left out",
    "spelled": "tokens left out where the text spells out a special token",
    "single": "documents of one sentence: passed over with the binary head, trained on with --bert-no-binary-head",
    "long": f"documents with a sentence of more than {LONGEST_SENTENCE} tokens: "
    "Megatron's BERT dataset passes over them",
}


def parser(prog: str = PROG) -> argparse.ArgumentParser:
    cli = Parser(prog, allow_abbrev=False, description="Text to Megatron's .bin and .idx.")
    add = cli.add_argument_group("output").add_argument
    tasks = "gpt: documents; bert: sentences; sft: conversations"
    add("--task", choices=("gpt", "bert", "sft"), required=True, help=tasks)
    add("--output-prefix", required=True, metavar="PREFIX", help="of the .bin and .idx; --data-path takes it")
    group = cli.add_argument_group("input")
    add = group.add_mutually_exclusive_group(required=True).add_argument
    add("--input", nargs="+", metavar="FILE|FOLDER", help="text or JSON lines, also .gz, .bz2, .xz")
    dataset = "of save_to_disk, of data files (parquet, csv, …), or a name on the Hub"
    add("--dataset", metavar="FOLDER|NAME", help=dataset)
    add = group.add_argument
    form = "auto (default): jsonl by .jsonl, .json, .ndjson"
    add("--input-format", choices=("auto", "text", "jsonl"), default="auto", help=form)
    units = "a document of a text file (default: file)"
    add("--text-documents", choices=("file", "blank-lines", "lines"), default="file", help=units)
    add("--dataset-config", metavar="NAME", help="as in load_dataset")
    add("--dataset-split", metavar="NAME", default="train", help="default: train")
    key = "key or column of the text (default: text)"
    add("--json-keys", "--text-column", dest="key", default="text", metavar="NAME", help=key)
    skip = "count and skip documents that are not text, which are errors otherwise"
    add("--skip-bad-documents", action="store_true", help=skip)
    group = cli.add_argument_group("tokenizer")
    add = group.add_mutually_exclusive_group(required=True).add_argument
    add("--tokenizer-model", metavar="FOLDER|NAME", help="any Hugging Face tokenizer")
    add("--vocab-file", type=Path, metavar="FILE", help="BERT's vocab.txt; vocab.json with --merge-file")
    add("--train-tokenizer", choices=("bpe", "wordpiece"), help="on the input; bpe is byte-level")
    add = group.add_argument
    add("--merge-file", type=Path, metavar="FILE", help="GPT-2's merges.txt")
    add("--vocab-size", type=int, metavar="N", help="of the trained tokenizer, with its special tokens")
    sample = "text sampled evenly from the input (default: %(default)g)"
    add("--train-tokenizer-mb", type=float, default=200.0, metavar="MB", help=sample)
    add("--cased", action="store_true", help="WordPiece keeps capital letters and accents")
    add = cli.add_argument
    add("--language", metavar="CODE", default="en", help="of the sentences, for bert: en (default), de, zh, …")
    add("--workers", type=int, metavar="N", help="processes (default: the cores that the job may use)")
    return cli


def check(options: argparse.Namespace) -> Path:
    """Refuse what cannot work; sets `files` and `workers`. Returns the prefix. Raises UserError."""
    if options.task == "sft" and not options.tokenizer_model:
        raise UserError("--task sft: it needs --tokenizer-model, the tokenizer of the model that is finetuned")
    if kind := options.train_tokenizer:
        least = vocabulary.smallest(kind, vocabulary.special_tokens(options.task, kind))
        if options.vocab_size is None:
            raise UserError("--train-tokenizer: give --vocab-size, for example 32000")
        if options.vocab_size < least:
            raise UserError(f"--vocab-size {options.vocab_size}: must be at least {least}")
    options.workers = options.workers or len(os.sched_getaffinity(0))
    prefix = Path(options.output_prefix).expanduser().absolute()
    if prefix.is_dir():
        raise UserError(f"--output-prefix {options.output_prefix}: a folder; add the name that the files begin with")
    options.files = [file for name in options.input or () for file in input_files(name, prefix)]
    name = options.tokenizer_model
    if name and Path(name).expanduser().is_dir():
        options.tokenizer_model = str(Path(name).expanduser().absolute())
    return prefix


def input_files(name: str, prefix: Path) -> list[str]:
    """The file, or the files below a folder in the order of their names, through links too, without hidden ones."""
    path = Path(name).expanduser()
    if path.is_file():
        return [str(path)]
    if path.is_dir() and prefix.parent.resolve().is_relative_to(path.resolve()):
        raise UserError(f"--output-prefix {prefix}: lies in --input {name}, and would be read as text")
    below = map(Path, glob.glob(f"{glob.escape(str(path))}/**", recursive=True))
    found = [str(file) for file in sorted(below) if file.is_file()]
    if not found:
        raise UserError(f"--input {name}: " + ("no files in it" if path.is_dir() else "no such file or folder"))
    return found


def report(task: str, counts: Counter[str], seconds: float | None) -> None:
    """Print counts and speed on stderr."""
    say = lambda text: print(f"{PROG}: {text}", file=sys.stderr)
    for name, text in LEFT_OUT.items():
        if counts[name]:
            say(f"{counts[name]:,} {text}")
    if task == "bert" and counts["single"] + counts["long"] >= counts["documents"]:
        say("warning: no document is left for training with the binary head")
    if task == "sft":
        say(f"{counts['targets']:,} tokens are targets")
    sentences = f"{counts['sequences']:,} sentences, " if task == "bert" else ""
    speed = f", {seconds:.1f} s, {counts['bytes'] / 1e6 / max(seconds, 1e-3):.2f} MB/s" if seconds else ""
    counted = f"{counts['documents']:,} documents, {sentences}{counts['tokens']:,} tokens"
    say(f"{counted}, {counts['bytes'] / 1e6:,.1f} MB of text{speed}")


def main(argv: Sequence[str] | None = None, prog: str = PROG) -> int:
    """The exit status: 0, 2 for wrong input, 1 for interrupted work, 128 + n for signal n."""
    cli = parser(prog)
    options = cli.parse_args(argv)
    exit_on_signals()
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # says that there is no GPU

    def work() -> None:
        try:
            with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Megatron's import lists what is not installed
                prefix = check(options)
                import datasets

                from megatron_2bw.data.preprocess import run

                if not sys.stderr.isatty():
                    datasets.disable_progress_bars()
                tokenizer, counts, seconds = run(options, prefix)
                report(options.task, counts, seconds)
        except UserError as error:
            cli.error(str(error))
        words = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tokenizer]
        print(shlex.join(["--data-path", str(prefix), *words, *["--sft-data"] * (options.task == "sft")]))

    return run_program(PROG, work, "the same command continues from here")
