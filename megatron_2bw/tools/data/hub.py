"""Opens tokenizers and datasets in Hugging Face's formats, from a local folder or by
their name on the Hub.

Invariant: every error of the libraries becomes one line that names the flag. Nothing
local needs a network.
"""

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
    with reached("--tokenizer-model", name), _one_line(f"--tokenizer-model {name}"):
        from megatron_2bw.mcore import cpu

        cpu.without_triton()
        from megatron.core.tokenizers import MegatronTokenizer

        tokenizer = MegatronTokenizer.from_pretrained(
            str(Path(name).expanduser()),
            {"library": "huggingface"},
            use_fast=True,
            include_special_tokens=True,
        )
    ids = {}
    for token in _NEEDED[task]:
        number = None
        # Megatron asks for the id of a missing token
        with contextlib.suppress(Exception):
            number = getattr(tokenizer, token)
        if number is None:
            raise UserError(
                f"--tokenizer-model {name}: it has no {token} token, which --task {task} "
                "needs; --train-tokenizer makes one that has"
            )
        ids[token] = number
    if ids.get("pad"):
        raise UserError(
            f"--tokenizer-model {name}: its padding token has the id {ids['pad']}, "
            "but Megatron's BERT dataset marks padding by 0; "
            "--train-tokenizer wordpiece makes one that does"
        )
    return tokenizer._tokenizer.tokenizer, ids.get("eod")


def load(
    where: str,
    source: str,
    split: str,
    key: str | None = None,
    arrays: bool = False,
    **words: Any,
) -> Any:
    """A split of a dataset: of a folder written by save_to_disk, of a folder of data
    files, or of a name on the Hub.

    key: the only column that is taken, or None for all. arrays: each text is a JSON
    array, whose elements become the rows. words: for load_dataset. Raises UserError,
    which begins with `where`.
    """
    with _one_line(where):
        import datasets

        datasets.logging.set_verbosity_error()
        path = str(Path(source).expanduser())
        try:
            rows = datasets.load_from_disk(path)
            if isinstance(rows, dict):
                rows = rows[split]
        except FileNotFoundError:
            rows = datasets.load_dataset(path, split=split, **words)
        if arrays:
            name = f"{rows._fingerprint}-elements"
            rows = rows.map(_elements, batched=True, batch_size=1, new_fingerprint=name)
        return rows if key is None else rows.select_columns([key])


def _elements(texts: dict[str, list[str]]) -> dict[str, list[str]]:
    lines = []
    for element in json.loads(texts["text"][0].removeprefix("\ufeff")):
        line = json.dumps(element, ensure_ascii=False)
        # half of a surrogate pair remains an escape
        lines.append(line.encode(errors="backslashreplace").decode())
    return {"text": lines}


def holds_array(file: str) -> bool:
    """Whether a file, perhaps a compressed one, is one JSON array."""
    import fsspec

    with (
        _one_line(f"--input {file}"),
        fsspec.open(file, "rb", compression="infer") as stream,
    ):
        begin = stream.read(1000).removeprefix(b"\xef\xbb\xbf")
        return begin.lstrip().startswith(b"[")


@contextlib.contextmanager
def _one_line(begin: str) -> Iterator[None]:
    """Raise an error of the libraries, which the block imports, as a UserError that
    begins with `begin`."""
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        yield
    # of transformers, huggingface_hub, tokenizers, datasets, pyarrow
    except Exception as error:
        text = str(error.__cause__ or error).split("Exception: ")[-1].strip()
        line, *_ = (text or type(error).__name__).splitlines()
        reason = line.rstrip(".")
        raise UserError(f"{begin}: cannot be loaded, {reason}") from error
