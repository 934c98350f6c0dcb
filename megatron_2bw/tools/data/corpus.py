"""The built-in corpus: the host's Python standard library, written as Megatron training
data.

Invariant: a corpus folder is whole or absent. It is written in a temporary folder next
to its place and then renamed; its name contains a digest of all that its content
depends on.

Each source file is one document and ends with the end-of-document token.
"""

import hashlib
import json
import os
import platform
import sys
import sysconfig
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from filelock import FileLock

from megatron_2bw.base.errors import file_errors
from megatron_2bw.tools.data.encoder import Encoder, write
from megatron_2bw.tools.data.vocabulary import EOD, GPT, save, train_bpe

DEFAULT_VOCAB_SIZE = 4096
DEFAULT_MAX_BYTES = 8_000_000

_FORMAT = 1  # raise it when the same inputs give other files
_SKIPPED = set(
    "site-packages dist-packages test tests idlelib lib2to3 __pycache__".split()
)


@dataclass(frozen=True)
class Corpus:
    """A corpus on disk: the prefix of its .bin and .idx files, and the folder of its
    tokenizer."""

    prefix: Path
    tokenizer: Path | str

    def flags(self) -> list[str]:
        """The Megatron flags that train on this corpus."""
        tokenizer = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model".split()
        return ["--data-path", str(self.prefix), *tokenizer, str(self.tokenizer)]


def build_corpus(
    cache_dir: Path | None = None,
    vocab_size: int = DEFAULT_VOCAB_SIZE,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> Corpus:
    """Return the corpus below `cache_dir`; the first call for its key builds it.

    `cache_dir` defaults to $MEGATRON_2BW_CACHE, else ~/.cache/megatron_2bw. At most
    `max_bytes` of source are taken. UserError if the cache cannot be written.
    """
    texts = read_library(max_bytes)
    default = os.environ.get("MEGATRON_2BW_CACHE") or "~/.cache/megatron_2bw"
    cache = Path(cache_dir or default).expanduser().absolute()
    content = json.dumps([_FORMAT, EOD, tokenizers.__version__, texts])
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    name = f"stdlib-{platform.python_version()}-v{vocab_size}-b{max_bytes}-{digest}"
    folder = cache / name
    if not folder.exists():  # else the cache may be read-only
        with file_errors(f"the corpus in {cache}, or in $MEGATRON_2BW_CACHE"):
            cache.mkdir(parents=True, exist_ok=True)
            # another process may build it at this moment
            with FileLock(f"{folder}.lock"):
                if not folder.exists():
                    _build(folder, texts, vocab_size)
    return Corpus(folder / "corpus", folder / "tokenizer")


def read_library(max_bytes: int) -> list[str]:
    """The documents: whole source files of at most `max_bytes` in total.

    The digests of their names give their order. It is fixed, and any part of it, such
    as what fits `max_bytes` or Megatron's validation split, is a mix of the library.
    """
    root = Path(sysconfig.get_path("stdlib"))
    names = []
    for folder, subfolders, files in root.walk():
        subfolders[:] = set(subfolders) - _SKIPPED
        for name in files:
            if name.endswith(".py"):
                names.append((folder / name).relative_to(root).as_posix())
    names.sort(key=lambda name: hashlib.sha256(os.fsencode(name)).digest())
    texts = []
    for name in names:
        try:
            data = (root / name).read_bytes()
            text = data.decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if 0 < len(data) <= max_bytes:
            texts.append(text)
            max_bytes -= len(data)
    return texts


def _build(folder: Path, texts: list[str], vocab_size: int) -> None:
    """Write the whole corpus next to `folder`, then rename it."""
    with (
        warnings.catch_warnings(),
        tempfile.TemporaryDirectory(dir=folder.parent, prefix=".building-") as scratch,
    ):
        warnings.simplefilter("ignore")  # Megatron's import lists what is not installed
        from megatron_2bw.mcore import cpu

        cpu.without_triton()
        work = Path(scratch) / folder.name
        work.mkdir()
        say(f"training the tokenizer on {len(texts)} files of the standard library")
        tokenizer = train_bpe(texts, vocab_size, GPT)
        save(work / "tokenizer", tokenizer, GPT)
        encoder = Encoder(tokenizer.to_str(), tokenizer.token_to_id(EOD))
        counts = write(work / "corpus", encoder.dtype, encoder.encode(texts))
        os.rename(work, folder)
    say(f"{counts['documents']} documents, {counts['tokens']} tokens in {folder}")


def say(text: str) -> None:
    print(f"corpus: {text}", file=sys.stderr, flush=True)
