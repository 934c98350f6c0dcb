"""Opens tokenizers and datasets in Hugging Face's formats, from a local folder or by their name on the Hub.

Invariant: every error of the libraries becomes one line that names the flag. An unreachable Hub costs seconds, not the
minutes of the libraries' retries; their caches are used then.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_2bw.data.sources import DatasetSource
from megatron_2bw.errors import UserError

_NEEDED = {"gpt": ("eod",), "sft": ("eod",), "bert": ("cls", "sep", "mask", "pad")}
_SPECIAL = ("eod", "bos", "cls", "sep", "mask", "pad")


@dataclass(frozen=True)
class Loaded:
    """A tokenizer as Megatron sees it. `json`: of the tokenizers library, None for a tokenizer written in Python."""

    tokenizer: Any  # of transformers
    json: str | None
    vocab_size: int
    eod: int | None
    forbidden: frozenset[int]  # ids that text must not become

    def digest(self) -> str:
        text = self.json or json.dumps(self.tokenizer.get_vocab(), sort_keys=True)
        text += str(self.tokenizer.chat_template or "")
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def load_tokenizer(name: str, task: str) -> Loaded:
    """The tokenizer that Megatron builds for --tokenizer-type HuggingFaceTokenizer --tokenizer-model `name`.

    Raises UserError if it cannot be loaded or lacks a token that Megatron's dataset for the task needs.
    """
    path = Path(name).expanduser()
    if path.is_file():
        raise UserError(f"--tokenizer-model {name}: a file; give the folder that it is in, or --vocab-file")
    with _one_line(f"--tokenizer-model {name}: ", path):
        from megatron_2bw import cpu

        cpu.without_triton()
        from megatron.core.tokenizers import MegatronTokenizer

        ours = MegatronTokenizer.from_pretrained(
            str(path),
            {"library": "huggingface"},
            chat_template=None,
            vocab_file=None,
            merges_file=None,
            additional_special_tokens=[],
            use_fast=True,
            trust_remote_code=False,
            include_special_tokens=True,
        )
    found = {}
    for token in _SPECIAL:
        try:
            found[token] = getattr(ours, token)
        except Exception:  # Megatron asks for the id of a missing token
            found[token] = None
    missing = [token for token in _NEEDED[task] if found[token] is None]
    if missing:
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
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if task == "sft" and backend is None:
        raise UserError(f"--tokenizer-model {name}: --task sft needs a fast tokenizer, a folder with a tokenizer.json")
    known = {found[token] for token in _SPECIAL if found[token] is not None}
    unknown = set() if ours.unk is None else {ours.unk} - {found["eod"] if task == "gpt" else None}
    size = max(ours.vocab_size, max(tokenizer.get_vocab().values()) + 1)
    eod = found["eod"] if task == "gpt" else None
    return Loaded(tokenizer, backend and backend.to_str(), size, eod, frozenset(known - unknown))


def tokenizer_of(where: str, name: str | Path, vocab_size: int) -> Any:
    """transformers' tokenizer of a model with `vocab_size` tokens.

    Raises UserError, which begins with `where`, if it cannot be loaded or has tokens that the model has not.
    """
    path = Path(name).expanduser()
    with _one_line(f"{where}, its tokenizer: ", path):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(path))
        largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= vocab_size:
        raise UserError(
            f"{where}: the tokenizer has the token {largest}, but the vocabulary of config.json ends at "
            f"{vocab_size - 1}: give the model's own tokenizer"
        )
    return tokenizer


def load(name: str, config: str | None, split: str | None = None, data_files: dict[str, str] | None = None) -> Any:
    """The dataset in a folder written by save_to_disk, in a folder of data files, or of a name on the Hub.

    split, data_files: as load_dataset's; a saved dataset comes whole. Raises UserError, which names --dataset.
    """
    path = Path(name).expanduser()
    with _one_line(f"--dataset {name}: ", path):
        import datasets

        if saved(name):
            return datasets.load_from_disk(str(path))
        return datasets.load_dataset(str(path), config, split=split, data_files=data_files)


def saved(name: str) -> bool:
    """Whether save_to_disk has written the folder."""
    return any((Path(name).expanduser() / file).is_file() for file in ("dataset_dict.json", "state.json"))


def open_dataset(name: str, config: str | None, split: str | None, key: str | None, skip_bad: bool) -> DatasetSource:
    """One split of the dataset that `load` finds: its text column, or all of it if `key` is None."""
    if Path(name).expanduser().is_file():
        raise UserError(f"--dataset {name}: a file; give the folder that it is in, or --input for text and JSON lines")
    if saved(name) and config is not None:
        raise UserError(f"--dataset-config {config}: {name} is a saved dataset, which has none: leave it out")
    found = load(name, config, split or "train")
    import datasets

    if isinstance(found, datasets.DatasetDict):
        if (split or "train") not in found:
            raise UserError(f"--dataset-split {split or 'train'}: {name} has {', '.join(found)}")
        found = found[split or "train"]
    elif saved(name) and split is not None:
        raise UserError(f"--dataset-split {split}: {name} is a single split: leave it out")
    if key is not None and key not in found.column_names:
        raise UserError(f"--text-column {key}: {name} has {', '.join(found.column_names)}")
    if not len(found):
        raise UserError(f"--dataset {name}: it is empty")
    return DatasetSource(name, found if key is None else found.select_columns([key]), key, skip_bad)


@contextlib.contextmanager
def _one_line(begin: str, path: Path) -> Iterator[None]:
    """Raise an error of the libraries, which the block imports, as a UserError that begins with `begin`."""
    offline = not path.is_dir() and _unreachable()
    try:
        yield
    except Exception as error:  # of transformers, huggingface_hub, tokenizers, datasets, pyarrow
        text = str(error).split("Exception: ")[-1].strip() or type(error).__name__
        line = f"cannot be loaded, {text.splitlines()[0].rstrip('.')}"
        if offline:
            line = "no such folder, and the Hub cannot be reached for one of that name: give a local folder"
        elif not path.is_dir():
            line += " (no such folder here either)"
        raise UserError(begin + line) from error


def _unreachable() -> bool:
    """Whether the Hub is unreachable; if so its libraries are set to use their caches. Call before importing them."""
    import huggingface_hub.constants as hub

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    if hub.HF_HUB_OFFLINE:
        return True
    if urllib.request.getproxies():
        return False
    address = urllib.parse.urlsplit(hub.ENDPOINT)
    try:
        socket.create_connection((address.hostname, address.port or 443), timeout=5).close()
        return False
    except OSError:
        os.environ["HF_HUB_OFFLINE"] = "1"  # for datasets, which reads it as it is imported
        hub.HF_HUB_OFFLINE = True
        return True
