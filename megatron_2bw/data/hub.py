"""Opens tokenizers and datasets in Hugging Face's formats, from a local folder or by their name on the Hub.

Invariant: every error of the libraries becomes one line that names the flag. Nothing local needs a network.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_2bw.errors import UserError

_NEEDED = {"gpt": ("eod",), "sft": ("eod",), "bert": ("cls", "sep", "mask", "pad")}


@dataclass(frozen=True)
class Loaded:
    """A tokenizer as Megatron sees it. `json`: of the tokenizers library."""

    tokenizer: Any  # of transformers
    json: str
    vocab_size: int
    eod: int | None
    forbidden: frozenset[int]  # ids that text must not become

    def digest(self) -> str:
        return hashlib.sha256(f"{self.json}{self.tokenizer.chat_template}".encode()).hexdigest()[:16]


def load_tokenizer(name: str, task: str) -> Loaded:
    """The tokenizer that Megatron builds for --tokenizer-type HuggingFaceTokenizer --tokenizer-model `name`.

    Raises UserError if it cannot be loaded or lacks a token that Megatron's dataset for the task needs.
    """
    with _one_line(f"--tokenizer-model {name}: "):
        from megatron_2bw import cpu

        cpu.without_triton()
        from megatron.core.tokenizers import MegatronTokenizer

        metadata, folder = {"library": "huggingface"}, str(Path(name).expanduser())
        ours = MegatronTokenizer.from_pretrained(folder, metadata, use_fast=True, include_special_tokens=True)
    found: dict[str, int] = {}
    for token in ("eod", "bos", "cls", "sep", "mask", "pad"):
        with contextlib.suppress(Exception):  # Megatron asks for the id of a missing token
            if (number := getattr(ours, token)) is not None:
                found[token] = number
    if missing := [token for token in _NEEDED[task] if token not in found]:
        raise UserError(
            f"--tokenizer-model {name}: it has no {', '.join(missing)} token, which --task {task} needs; "
            "--train-tokenizer makes one that has"
        )
    if task == "bert" and found["pad"] != 0:
        raise UserError(
            f"--tokenizer-model {name}: its padding token has the id {found['pad']}, but Megatron's BERT dataset marks "
            "padding by 0; --train-tokenizer wordpiece makes one that does"
        )
    tokenizer = ours._tokenizer.tokenizer
    if not tokenizer.is_fast:
        raise UserError(f"--tokenizer-model {name}: it is written in Python; give one with a tokenizer.json")
    eod = found["eod"] if task == "gpt" else None
    size = max(ours.vocab_size, max(tokenizer.get_vocab().values()) + 1)
    forbidden = set(found.values()) - ({ours.unk} - {eod})  # a text may have the unknown token
    return Loaded(tokenizer, tokenizer.backend_tokenizer.to_str(), size, eod, frozenset(forbidden))


def tokenizer_of(where: str, name: str | Path, vocab_size: int) -> Any:
    """transformers' tokenizer of a model with `vocab_size` tokens.

    Raises UserError, which begins with `where`, if it cannot be loaded or has tokens that the model has not.
    """
    with _one_line(f"{where}, its tokenizer: "):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(Path(name).expanduser()))
        largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= vocab_size:
        raise UserError(
            f"{where}: the tokenizer has the token {largest}, but the vocabulary of config.json ends at "
            f"{vocab_size - 1}: give the model's own tokenizer"
        )
    return tokenizer


def load(name: str, config: str | None = None, **words: Any) -> Any:
    """The dataset in a folder written by save_to_disk, in a folder of data files, or of a name on the Hub.

    words: of load_dataset; a saved dataset comes whole. Raises UserError, which names --dataset.
    """
    where = f"--dataset {name}" if name != "text" else f"--input {' '.join(words['data_files'])[:200]}"
    with _one_line(f"{where}: "):
        import datasets

        datasets.logging.set_verbosity_error()
        path = Path(name).expanduser()
        return datasets.load_from_disk(str(path)) if saved(name) else datasets.load_dataset(str(path), config, **words)


def saved(name: str) -> bool:
    """Whether save_to_disk has written the folder."""
    return any((Path(name).expanduser() / file).is_file() for file in ("dataset_dict.json", "state.json"))


def open_dataset(name: str, config: str | None, split: str, key: str | None) -> Any:
    """One split of the dataset that `load` finds: its text column, or all of it if `key` is None."""
    found = load(name, config, split=split)
    with _one_line(f"--dataset {name}, --dataset-split {split}, --text-column {key}: "):
        found = found[split] if isinstance(found, dict) else found
        return found if key is None else found.select_columns([key])


@contextlib.contextmanager
def _one_line(begin: str) -> Iterator[None]:
    """Raise an error of the libraries, which the block imports, as a UserError that begins with `begin`."""
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        yield
    except Exception as error:  # of transformers, huggingface_hub, tokenizers, datasets, pyarrow
        text = str(error.__cause__ or error).split("Exception: ")[-1].strip() or type(error).__name__
        raise UserError(f"{begin}cannot be loaded, {text.splitlines()[0].rstrip('.')}") from error
