"""The weights of a Hugging Face folder: safetensors, read and written one tensor or one
file at a time.

Invariant: what is missing, cut short or of another kind is found before anything is
written.
"""

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

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
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
        self.shapes = {}
        self.dtypes = {}
        self._files = {}
        for path in _files(folder):
            with _opened(path) as file:
                for name in file.keys():
                    part = file.get_slice(name)
                    kind = part.get_dtype()
                    if kind not in DTYPES:
                        raise UserError(
                            f"{path}: the tensor {name} is of type {kind}: only "
                            f"{', '.join(DTYPES)} can be imported"
                        )
                    self.shapes[name] = tuple(part.get_shape())
                    self.dtypes[name] = DTYPES[kind]
                    self._files[name] = path

    def read(self, name: str) -> torch.Tensor:
        """A copy, so that no page of the file stays in memory."""
        with _opened(self._files[name]) as file:
            return file.get_tensor(name).clone()


def _files(folder: Path) -> list[Path]:
    """The files of tensors that transformers reads."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.is_file():
        raise UserError(
            f"{folder}: there is neither {INDEX} nor {SINGLE}: save it with "
            "transformers' save_pretrained"
        )
    files = json.loads(index.read_text())["weight_map"].values()
    return sorted({folder / Path(file).name for file in files})


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[safe_open]:
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path}: it is missing, cut short or no file of safetensors ({error})"
        ) from None


def write(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Files of at most SHARD bytes, or of one tensor, and their index; the memory of
    one file is held."""
    held = {}  # the names of the tensors of each part
    total = 0
    for portion in portions(tensors, lambda each: each[1].nbytes, SHARD):
        part = folder / f"part-{len(held)}"
        save_file(dict(portion), part, metadata={"format": "pt"})
        held[part] = [name for name, _ in portion]
        total += sum(tensor.nbytes for _, tensor in portion)
    if len(held) == 1:
        part.rename(folder / SINGLE)
        return
    weight_map = {}
    for number, (part, names) in enumerate(held.items(), 1):
        file = f"model-{number:05d}-of-{len(held):05d}.safetensors"
        part.rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(folder / INDEX, index, indent=2)


def copy_files(source: Path, target: Path) -> None:
    """A tokenizer's files, the generation's options, the configuration. UserError for a
    link out of the folder."""
    target.mkdir(parents=True, exist_ok=True)
    root = source.resolve()
    # the Hub's cache links to its own `blobs`
    if root.parent.name == "snapshots":
        root = root.parents[1]
    for path in sorted(source.iterdir()):
        if not path.is_file() or not re.fullmatch(_COPIED, path.name):
            continue
        if not path.resolve().is_relative_to(root):
            raise UserError(
                f"{path}: it is a link out of the folder: copy the file itself there"
            )
        shutil.copyfile(path, target / path.name)


def has_tokenizer(folder: Path) -> bool:
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
    return any((folder / name).is_file() for name in names)
