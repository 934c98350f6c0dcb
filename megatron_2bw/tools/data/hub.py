"""Opens tokenizers and datasets in Hugging Face's formats, from a local folder or by
their name on the Hub.

Invariant: every error of the libraries becomes one line that names the flag. Nothing
local needs a network.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_2bw.base.errors import UserError
from megatron_2bw.run.flags.hub_offline import reached

_NEEDED = {"gpt": ("eod",), "sft": ("eod",), "bert": ("cls", "sep", "mask", "pad")}


def load_tokenizer(name: str, task: str) -> tuple[Any, int | None]:
    """transformers' tokenizer as Megatron's HuggingFaceTokenizer has it, and the end of
    a document, which BERT has not.

    Raises UserError if it cannot be loaded or lacks a token that Megatron's dataset for
    the task needs.
    """
    with reached("--tokenizer-model", name), _one_line(f"--tokenizer-model {name}: "):
        from megatron_2bw.mcore import cpu

        cpu.without_triton()
        from megatron.core.tokenizers import MegatronTokenizer

        metadata, folder = {"library": "huggingface"}, str(Path(name).expanduser())
        ours = MegatronTokenizer.from_pretrained(
            folder, metadata, use_fast=True, include_special_tokens=True
        )
    found: dict[str, int | None] = {}
    for token in _NEEDED[task]:
        # Megatron asks for the id of a missing token
        with contextlib.suppress(Exception):
            found[token] = getattr(ours, token)
    if missing := [token for token in _NEEDED[task] if found.get(token) is None]:
        lacks = (
            f"it has no {', '.join(missing)} token, which --task {task} needs; "
            "--train-tokenizer makes one that has"
        )
        raise UserError(f"--tokenizer-model {name}: {lacks}")
    if found.get("pad"):
        raise UserError(
            f"--tokenizer-model {name}: its padding token has the id "
            f"{found['pad']}, but Megatron's BERT dataset marks "
            "padding by 0; --train-tokenizer wordpiece makes one that does"
        )
    return ours._tokenizer.tokenizer, found.get("eod")


def load(
    where: str,
    source: str,
    split: str,
    key: str | None = None,
    arrays: bool = False,
    **words: Any,
) -> Any:
    """A split of the dataset in a folder written by save_to_disk, in a folder of data
    files, or of a name on the Hub.

    key: of its only column, or None for all; arrays: the texts are JSON arrays, the
    rows their elements; words: of load_dataset. Raises UserError, which begins with
    `where`.
    """
    with _one_line(f"{where}: "):
        import datasets

        datasets.logging.set_verbosity_error()
        path = Path(source).expanduser()
        if any((path / file).is_file() for file in ("dataset_dict.json", "state.json")):
            found = datasets.load_from_disk(str(path))
            found = found[split] if isinstance(found, dict) else found
        else:
            found = datasets.load_dataset(str(path), split=split, **words)
        if arrays:
            name = f"{found._fingerprint}-elements"
            found = found.map(
                _elements, batched=True, batch_size=1, new_fingerprint=name
            )
        return found if key is None else found.select_columns([key])


def _elements(texts: dict[str, list[str]]) -> dict[str, list[str]]:
    array = json.loads(texts["text"][0].removeprefix("\ufeff"))
    # half of a surrogate pair remains an escape
    lines = [json.dumps(each, ensure_ascii=False) for each in array]
    return {"text": [line.encode(errors="backslashreplace").decode() for line in lines]}


def holds_array(file: str) -> bool:
    """Whether a file, perhaps a compressed one, is one JSON array."""
    import fsspec

    with (
        _one_line(f"--input {file}: "),
        fsspec.open(file, "rb", compression="infer") as stream,
    ):
        return stream.read(1000).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


@contextlib.contextmanager
def _one_line(begin: str) -> Iterator[None]:
    """Raise an error of the libraries, which the block imports, as a UserError that
    begins with `begin`."""
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        yield
    # of transformers, huggingface_hub, tokenizers, datasets, pyarrow
    except Exception as error:
        text = (
            str(error.__cause__ or error).split("Exception: ")[-1].strip()
            or type(error).__name__
        )
        raise UserError(
            f"{begin}cannot be loaded, {text.splitlines()[0].rstrip('.')}"
        ) from error
