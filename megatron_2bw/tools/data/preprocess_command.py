"""megatron-2bw preprocess: the flags of data preparation.

Invariant: bad input ends with status 2 and one line that names the flag. Stdout has the
flags of a training alone.
"""

import contextlib
import glob
import logging
import os
import shlex
import sys
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from megatron_2bw.base.errors import Parser, UserError, run_program, whole
from megatron_2bw.base.processes import exit_on_signals

PROG = "megatron-2bw preprocess"


def parser(prog: str = PROG) -> ArgumentParser:
    cli = Parser(
        prog, allow_abbrev=False, description="Text to Megatron's .bin and .idx."
    )
    option = cli.add_argument
    option(
        "--task",
        choices=("gpt", "bert", "sft"),
        required=True,
        help="documents, sentences, or conversations",
    )
    option(
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="of the .bin and .idx; --data-path takes it",
    )
    option(
        "--workers",
        type=int,
        metavar="N",
        help="processes (default: the cores that the job may use)",
    )

    group = cli.add_argument_group("input")
    option = group.add_argument
    either = group.add_mutually_exclusive_group(required=True).add_argument
    either(
        "--input",
        nargs="+",
        metavar="FILE|FOLDER",
        help="text or JSON lines, also .gz, .bz2, .xz",
    )
    either(
        "--dataset",
        metavar="FOLDER|NAME",
        help="of save_to_disk, of data files (parquet, csv, …), or on the Hub",
    )
    option(
        "--input-format",
        choices=("auto", "text", "jsonl"),
        default="auto",
        help="auto (default): by the ending",
    )
    option(
        "--text-documents",
        choices=("file", "blank-lines", "lines"),
        default="file",
        help="a document of a text file (default: file)",
    )
    option("--dataset-config", help="as in load_dataset")
    option("--dataset-split", default="train", help="default: train")
    option(
        "--json-keys",
        "--text-column",
        dest="key",
        default="text",
        help="of text (default: text)",
    )
    option(
        "--skip-bad-documents",
        action="store_true",
        help="leave documents out that are not text, and count them",
    )
    option(
        "--language",
        default="en",
        help="of the sentences, for bert: en (default), de, zh, …",
    )

    group = cli.add_argument_group("tokenizer")
    option = group.add_argument
    either = group.add_mutually_exclusive_group(required=True).add_argument
    either(
        "--tokenizer-model", metavar="FOLDER|NAME", help="any Hugging Face tokenizer"
    )
    either(
        "--vocab-file",
        type=Path,
        metavar="FILE",
        help="BERT's vocab.txt; vocab.json with --merge-file",
    )
    either(
        "--train-tokenizer",
        choices=("bpe", "wordpiece"),
        help="on the input; bpe is byte-level",
    )
    option("--merge-file", type=Path, metavar="FILE", help="GPT-2's merges.txt")
    option(
        "--vocab-size",
        type=int,
        metavar="N",
        help="of the trained tokenizer, with its special tokens",
    )
    option(
        "--train-tokenizer-mb",
        type=whole(1),
        default=200,
        metavar="MB",
        help="text sampled evenly from the input (default: %(default)s)",
    )
    option(
        "--cased",
        action="store_true",
        help="WordPiece keeps capital letters and accents",
    )
    return cli


def check(options: Namespace) -> Path:
    """Refuse what cannot work; sets `files` and `workers`. Returns the prefix. Raises
    UserError."""
    if options.task == "sft" and not options.tokenizer_model:
        raise UserError(
            "--task sft: it needs --tokenizer-model, the tokenizer of the model that is finetuned"
        )
    if options.train_tokenizer and options.vocab_size is None:
        raise UserError("--train-tokenizer: give --vocab-size, for example 32000")
    options.workers = options.workers or len(os.sched_getaffinity(0))
    prefix = Path(options.output_prefix).expanduser().absolute()
    options.files = []
    for name in options.input or ():
        options.files += input_files(name, prefix)
    folder = Path(options.tokenizer_model or "").expanduser().absolute()
    if options.tokenizer_model and folder.is_dir():
        options.tokenizer_model = str(folder)
    return prefix


def input_files(name: str, prefix: Path) -> list[str]:
    """The file, or the files below a folder in the order of their names, through links
    too, without hidden ones."""
    path = Path(name).expanduser()
    if path.is_file():
        return [str(path)]
    if path.is_dir() and prefix.parent.resolve().is_relative_to(path.resolve()):
        raise UserError(
            f"--output-prefix {prefix}: lies in --input {name}, and would be read as text"
        )
    below = map(Path, glob.glob(f"{glob.escape(str(path))}/**", recursive=True))
    files = [str(file) for file in sorted(below) if file.is_file()]
    if not files:
        raise UserError(f"--input {name}: no such file, or no files in it")
    return files


def main(argv: Sequence[str] | None = None, prog: str = PROG) -> int:
    """The exit status: 0, 2 for wrong input, 1 for interrupted work, 128 + n for signal
    n."""
    cli = parser(prog)
    options = cli.parse_args(argv)
    exit_on_signals()
    # says that there is no GPU
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)

    def work() -> None:
        try:
            with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
                # Megatron's import lists what is not installed
                warnings.simplefilter("ignore")
                prefix = check(options)
                import datasets

                from megatron_2bw.tools.data.preprocess import run

                if not sys.stderr.isatty():
                    datasets.disable_progress_bars()
                tokenizer = run(options, prefix)
        except UserError as error:
            cli.error(str(error))
        flags = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model".split()
        flags = ["--data-path", str(prefix), *flags, tokenizer]
        if options.task == "sft":
            flags.append("--sft-data")
        print(shlex.join(flags))

    return run_program(PROG, work, "the same command continues from here")
