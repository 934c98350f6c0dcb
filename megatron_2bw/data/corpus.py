"""The built-in corpus: the host's Python standard library, written as Megatron training data.

Invariant: a corpus folder is whole or absent. It is written in a temporary folder next to its place and then renamed;
its name contains a digest of all that its content depends on.

Each source file is one document and ends with the end-of-document token. From a shell:

    python pretrain_gpt_2bw.py $(python -m megatron_2bw.data.corpus) ...
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import sys
import sysconfig
import tempfile
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from filelock import FileLock

from megatron_2bw.data.encoder import Encoder, write
from megatron_2bw.data.vocabulary import EOD, GPT, save, smallest, train_bpe
from megatron_2bw.errors import Parser, UserError, file_errors

DEFAULT_VOCAB_SIZE = 4096
DEFAULT_MAX_BYTES = 8_000_000
MIN_VOCAB_SIZE = smallest("bpe", GPT)
MAX_VOCAB_SIZE = 65_499  # the most that Megatron stores in 16 bits

_FORMAT = 1  # raise it when the same inputs give other files
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """A corpus on disk: the places of its parts, and its size."""

    prefix: Path  # of the .bin and .idx files, for --data-path
    tokenizer: Path  # folder, for --tokenizer-model
    vocab_size: int
    documents: int
    tokens: int

    def flags(self) -> list[str]:
        """The Megatron flags that train on this corpus."""
        tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model"]
        return ["--data-path", str(self.prefix), *tokenizer, str(self.tokenizer)]


def build_corpus(
    cache_dir: Path | None = None, vocab_size: int = DEFAULT_VOCAB_SIZE, max_bytes: int = DEFAULT_MAX_BYTES
) -> Corpus:
    """Return the corpus below `cache_dir`; the first call for its key builds it.

    `cache_dir` defaults to $MEGATRON_2BW_CACHE, else ~/.cache/megatron_2bw. At most `max_bytes` of source are taken.
    UserError names the flag of a request that cannot be met.
    """
    if not MIN_VOCAB_SIZE <= vocab_size <= MAX_VOCAB_SIZE:
        raise UserError(f"--vocab-size {vocab_size}: must be {MIN_VOCAB_SIZE} to {MAX_VOCAB_SIZE}")
    texts = read_library(max_bytes)
    default = os.environ.get("MEGATRON_2BW_CACHE") or "~/.cache/megatron_2bw"
    cache = Path(cache_dir or default).expanduser().absolute()
    digest = hashlib.sha256(json.dumps([_FORMAT, EOD, tokenizers.__version__, texts]).encode()).hexdigest()[:16]
    folder = cache / f"stdlib-{platform.python_version()}-v{vocab_size}-b{max_bytes}-{digest}"
    if not folder.exists():  # else the cache may be read-only
        with file_errors(f"--cache-dir {cache}"):
            cache.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{folder}.lock"):  # another process may build it at this moment
                if not folder.exists():
                    _build(folder, texts, vocab_size, max_bytes)
    numbers = json.loads((folder / "corpus.json").read_text())["numbers"]
    return Corpus(folder / "corpus", folder / "tokenizer", **numbers)


def read_library(max_bytes: int) -> list[str]:
    """The documents: whole source files of at most `max_bytes` in total.

    In the order of the digests of their names: it is fixed, and any part of it, such as what fits `max_bytes` or
    Megatron's validation split, is a mix of the library.
    """
    root = Path(sysconfig.get_path("stdlib"))
    names = []
    for folder, subfolders, files in root.walk():
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED]
        names += [(folder / name).relative_to(root).as_posix() for name in files if name.endswith(".py")]
    names.sort(key=lambda name: hashlib.sha256(os.fsencode(name)).digest())
    texts, room = [], max_bytes
    for name in names:
        try:
            data = (root / name).read_bytes()
            text = data.decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if 0 < len(data) <= room:
            texts.append(text)
            room -= len(data)
    if not texts:
        raise UserError(f"--max-bytes {max_bytes}: too small, no source file in {root} fits")
    return texts


def _build(folder: Path, texts: list[str], vocab_size: int, max_bytes: int) -> None:
    """Write the whole corpus next to `folder`, then rename it."""
    say = lambda text: print(f"corpus: {text}", file=sys.stderr, flush=True)
    with warnings.catch_warnings(), tempfile.TemporaryDirectory(dir=folder.parent, prefix=".building-") as scratch:
        warnings.simplefilter("ignore")  # Megatron's import lists what is not installed
        from megatron_2bw import cpu

        cpu.without_triton()
        from megatron.core.datasets.indexed_dataset import DType

        work = Path(scratch) / folder.name
        work.mkdir()
        say(f"training the tokenizer on {len(texts)} files of the standard library")
        tokenizer = train_bpe(texts, vocab_size, [EOD])
        if (size := tokenizer.get_vocab_size()) < vocab_size:
            few = f"too small, its text gives only {size} of the {vocab_size} tokens of --vocab-size"
            raise UserError(f"--max-bytes {max_bytes}: {few}")
        save(work / "tokenizer", tokenizer, GPT)
        say("writing the tokens")
        eod, dtype, counts = tokenizer.token_to_id(EOD), DType.optimal_dtype(vocab_size), Counter()
        encoder = Encoder(tokenizer.to_str(), frozenset([eod]), dtype, eod)
        batches = (encoder.arrays(texts[at : at + 100], counts) for at in range(0, len(texts), 100))
        write(work / "corpus", dtype, batches)
        numbers = {"vocab_size": vocab_size, "documents": len(texts), "tokens": counts["tokens"]}
        (work / "corpus.json").write_text(json.dumps({"numbers": numbers}, indent=2))
        os.rename(work, folder)
    say(f"{len(texts)} documents, {counts['tokens']} tokens in {folder}")


def main(argv: list[str] | None = None) -> None:
    """Print the flags of the corpus as one line on stdout, everything else on stderr."""
    parser = Parser(
        prog="megatron_2bw.data.corpus",
        description="Build or reuse the built-in corpus and print the Megatron flags that load it.",
    )
    option = parser.add_argument
    option("--cache-dir", type=Path, help="default: $MEGATRON_2BW_CACHE or ~/.cache/megatron_2bw")
    option("--vocab-size", type=int, default=DEFAULT_VOCAB_SIZE, help="default: %(default)s")
    option("--max-bytes", type=int, default=DEFAULT_MAX_BYTES, help="default: %(default)s")
    args = parser.parse_args(argv)
    try:
        corpus = build_corpus(args.cache_dir, args.vocab_size, args.max_bytes)
    except UserError as error:
        parser.error(str(error))
    print(shlex.join(corpus.flags()))


if __name__ == "__main__":
    main()
