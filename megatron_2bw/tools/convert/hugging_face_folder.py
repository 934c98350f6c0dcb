"""The weights of a Hugging Face folder: safetensors, read and written one tensor or one
file at a time.

Invariant: what is missing, cut short or of another kind is found before anything is
written.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatron_2bw.base.errors import UserError
from megatron_2bw.base.files import write_json
from megatron_2bw.base.portions import portions

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_COPIED = (
    r"((generation_)?config|tokenizer(_config)?|special_tokens_map|added_tokens|vocab|chat_template|tekken)\.json|"
    r"(vocab|merges)\.txt|chat_template\.jinja|.+\.model"
)
SHARD = 256 << 20  # bytes of a file, or one tensor that is larger


class Weights:
    """The tensors of a folder by name: `shapes` and `dtypes`, and `read` for one of
    them."""

    def __init__(self, folder: Path):
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._files: dict[str, Path] = {}
        for path, names in _files(folder).items():
            with _errors(path), safe_open(path, "pt") as file:
                for name in sorted({*names, *file.keys()}):
                    part = file.get_slice(name)
                    kind = part.get_dtype()
                    if kind not in DTYPES:
                        known = ", ".join(DTYPES)
                        raise UserError(
                            f"{path}: the tensor {name} is of type {kind}: only "
                            f"{known} can be imported"
                        )
                    self.shapes[name], self.dtypes[name] = (
                        tuple(part.get_shape()),
                        DTYPES[kind],
                    )
                    self._files[name] = path

    def read(self, name: str) -> torch.Tensor:
        """A copy, so that no page of the file stays in memory."""
        path = self._files[name]
        with _errors(path), safe_open(path, "pt") as file:
            return file.get_tensor(name).clone()


def _files(folder: Path) -> dict[Path, set[str]]:
    """The files of tensors that transformers reads, with the names that the index
    places in each."""
    if (folder / SINGLE).is_file():
        return {folder / SINGLE: set()}
    index = folder / INDEX
    if not index.is_file():
        raise UserError(
            f"{folder}: there is neither {INDEX} nor {SINGLE}: save it with "
            "transformers' save_pretrained"
        )
    files: dict[Path, set[str]] = {}
    for name, file in json.loads(index.read_text())["weight_map"].items():
        files.setdefault(folder / Path(file).name, set()).add(name)
    return files


@contextlib.contextmanager
def _errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path}: it is missing, cut short or no file of safetensors ({error})"
        ) from None


def write(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Files of at most SHARD bytes, or of one tensor, and their index; the memory of
    one file is held."""
    place: dict[str, int] = {}  # the number of each tensor's file
    total = count = 0
    for part in portions(tensors, lambda each: each[1].nbytes, SHARD):
        save_file(dict(part), folder / f"part-{count}", metadata={"format": "pt"})
        place |= {name: count for name, _ in part}
        total += sum(tensor.nbytes for _, tensor in part)
        count += 1
    final = (
        [f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)]
        if count > 1
        else [SINGLE]
    )
    for number, name in enumerate(final):
        (folder / f"part-{number}").rename(folder / name)
    if count > 1:
        weight_map = {name: final[number] for name, number in place.items()}
        write_json(
            folder / INDEX,
            {"metadata": {"total_size": total}, "weight_map": weight_map},
            indent=2,
        )


def copy_files(source: Path, target: Path) -> None:
    """A tokenizer's files, the generation's options, the configuration. UserError for a
    link out of the folder."""
    target.mkdir(parents=True, exist_ok=True)
    root = source.resolve()
    # the Hub's cache links to its own `blobs`
    root = root.parents[1] if root.parent.name == "snapshots" else root
    for path in sorted(source.iterdir()):
        if path.is_file() and re.fullmatch(_COPIED, path.name):
            if not path.resolve().is_relative_to(root):
                raise UserError(
                    f"{path}: it is a link out of the folder: copy the file itself there"
                )
            shutil.copyfile(path, target / path.name)


def has_tokenizer(folder: Path) -> bool:
    return any(
        (folder / name).is_file()
        for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
    )
