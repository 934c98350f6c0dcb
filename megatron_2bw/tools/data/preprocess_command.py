"""megatron-2bw preprocess: checks the flags of data preparation
(preprocess_command.yaml), which `preprocess.py` does.

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
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from megatron_2bw.base.command_line import parser_of
from megatron_2bw.base.errors import UserError, run_program
from megatron_2bw.base.processes import exit_on_signals

PROG = "megatron-2bw preprocess"


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
    pattern = f"{glob.escape(str(path))}/**"
    below = map(Path, glob.glob(pattern, recursive=True))
    files = [str(file) for file in sorted(below) if file.is_file()]
    if not files:
        raise UserError(f"--input {name}: no such file, or no files in it")
    return files


def main(argv: Sequence[str], prog: str = PROG) -> int:
    """The exit status: 0, 2 for wrong input, 1 for interrupted work, 128 + n for signal
    n."""
    cli = parser_of(prog, __file__)
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

                from megatron_2bw.tools.data.corpus import Corpus
                from megatron_2bw.tools.data.preprocess import preprocess

                if not sys.stderr.isatty():
                    datasets.disable_progress_bars()
                tokenizer = preprocess(options, prefix)
        except UserError as error:
            cli.error(str(error))
        flags = Corpus(prefix, tokenizer).flags()
        if options.task == "sft":
            flags.append("--sft-data")
        print(shlex.join(flags))

    return run_program(PROG, work, "the same command continues from here")
