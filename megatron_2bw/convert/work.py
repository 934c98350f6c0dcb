"""Import a Hugging Face folder as a Megatron checkpoint, export a checkpoint as such a folder.

Invariant: the input is checked whole before anything is written, and what was not written to its end cannot be loaded.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from megatron_2bw.convert import config as configs
from megatron_2bw.convert import hugging_face, megatron
from megatron_2bw.convert.families import Family, to_hugging_face, to_megatron
from megatron_2bw.errors import UserError
from megatron_2bw.files import write_json, write_whole
from megatron_2bw.models.model import Model

FLAGS, TOKENIZER = "model_flags.txt", "tokenizer"


def import_model(options: argparse.Namespace) -> int:
    """Write a checkpoint, the model's flags and its tokenizer. Memory: that of one parameter, twice."""
    found = configs.read(options.source / "config.json", options.seq_length)
    weights = hugging_face.Weights(options.source)
    megatron.use_cpu()
    rows = -(-found.model.vocab // options.make_vocab_size_divisible_by) * options.make_vocab_size_divisible_by
    tokenizer = options.source if hugging_face.has_tokenizer(options.source) else None
    flags = [*found.flags, "--padded-vocab-size", str(rows), *_tokenizer_flags(tokenizer, found.model)]
    args = megatron.arguments(flags, found.task)
    if tokenizer:
        args.tokenizer_model = flags[-1] = str((options.save / TOKENIZER).resolve())
    with megatron.whole_model(args, "meta") as (_, entries):
        names = _names(found.family, entries)
        sources = {name: _sources(found.family, name, weights) for name in names}
        _check(found, weights, sources, {name: megatron.shape_of(entries[name]) for name in names}, rows)
        dtypes = {name: weights.dtypes[sources[name][0]] for name in names}
        options.save.mkdir(parents=True, exist_ok=True)
        if tokenizer:
            hugging_face.copy_files(options.source, options.save / TOKENIZER)
        write_whole(options.save / FLAGS, shlex.join(flags) + "\n")
        with tqdm(total=len(names), unit="tensor", desc="import") as bar:

            def make(name: str) -> torch.Tensor:
                bar.update()
                parts = [weights.read(source) for source in sources[name]]
                return to_megatron(found.family, name, parts, found.model, rows)

            megatron.write(options.save, args, entries, dtypes, make)
    script = f"pretrain_{found.task}_2bw.py"
    print(f"{options.save}: {found.model.parameters() / 1e6:,.1f} million parameters. Train with")
    print(f"  torchrun --nproc-per-node 2 {script} @{options.save / FLAGS} --load {options.save} --finetune \\")
    print("    --pipeline-schedule 2bw --pipeline-model-parallel-size 2 --data-path ... --lr 2e-5 ...")
    return 0


def export_model(options: argparse.Namespace) -> int:
    """Write the weights of a checkpoint, with 2BW the newest, as a folder that transformers' AutoModel loads."""
    folder = megatron.find(options.source, options.ckpt_step)
    megatron.use_cpu()
    args = megatron.saved_arguments(folder)
    like = options.like or (args.tokenizer_model and Path(args.tokenizer_model))
    found, content = configs.of_arguments(args, like if like and (like / "config.json").is_file() else None)
    checkpoint = megatron.Checkpoint(folder)
    temporary = options.out.with_name(f".{options.out.name}.{uuid.uuid4().hex}")
    try:
        with megatron.whole_model(args, "meta") as (_, entries):
            names = _names(found.family, entries)
            kinds = {checkpoint.dtype(entries[name]) for name in names}
            temporary.mkdir(parents=True)
            if like and like.is_dir():
                hugging_face.copy_files(like, temporary)
            kind = str(next(iter(kinds))).removeprefix("torch.") if len(kinds) == 1 else "float32"
            write_json(temporary / "config.json", content | {"dtype": kind}, indent=2)
            hugging_face.write(temporary, _exported(found, checkpoint, entries, names))
        temporary.rename(options.out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if found.task == "bert" and found.model.gelu == "tanh" and not args.openai_gelu:
        print("> the masked-language head was trained with the exact GeLU; transformers has the layers' tanh form")
    print(f"{options.out}: {found.model.parameters() / 1e6:,.1f} million parameters, {content['architectures'][0]}")
    return 0


def _exported(found: configs.Found, checkpoint: Any, entries: dict, names: list[str]) -> Iterator:
    for name in tqdm(names, unit="tensor", desc="export"):
        parts = to_hugging_face(found.family, name, checkpoint.read(entries[name]), found.model)
        yield from zip(found.family.sources(name), parts)
        if name == "embedding.word_embeddings.weight" and found.task == "bert" and not found.binary_head:
            size = found.model.hidden  # transformers' model has types, of which a run without the head has none
            yield "bert.embeddings.token_type_embeddings.weight", torch.zeros(2, size, dtype=parts[0].dtype)


def _tokenizer_flags(folder: Path | None, model: Model) -> list[str]:
    """UserError if the tokenizer has tokens that the model has not."""
    if folder is None:
        return ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(model.vocab)]
    from transformers import AutoTokenizer

    largest = max(AutoTokenizer.from_pretrained(folder).get_vocab().values())
    if largest >= model.vocab:
        ends = f"the vocabulary of config.json ends at {model.vocab - 1}: give the model's own tokenizer"
        raise UserError(f"{folder}: the tokenizer has the token {largest}, but {ends}")
    return ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]


def _names(family: Family, entries: dict[str, Any]) -> list[str]:
    """The model's parameters in Megatron's order. UserError if the family has no place for one of them."""
    names = [name for name in entries if not name.endswith("_extra_state")]
    for name in names:
        try:
            family.sources(name)
        except KeyError:
            raise UserError(f"{name}: transformers' model has no place for this parameter") from None
    return names


def _sources(family: Family, name: str, weights: hugging_face.Weights) -> tuple[str, ...]:
    """Hugging Face's names of a parameter's tensors as the folder has them, with or without the prefix."""
    bare = tuple(source.removeprefix(family.prefix) for source in family.sources(name))
    return bare if all(source in weights.shapes for source in bare) else family.sources(name)


def _check(
    found: configs.Found,
    weights: hugging_face.Weights,
    sources: dict[str, tuple[str, ...]],
    shapes: dict[str, tuple[int, ...]],
    rows: int,
) -> None:
    """UserError unless the folder's tensors are those of the model, in their shapes and one type."""
    used = {source for each in sources.values() for source in each}
    for source in sorted(used - set(weights.shapes)):
        raise UserError(f"the tensor {source} is missing, which config.json asks for")
    spare = {name for name in set(weights.shapes) - used if not re.fullmatch(found.family.ignored, name)}
    spare -= found.spare
    for name in sorted(spare):
        if found.zero_types and name.endswith("token_type_embeddings.weight"):
            if weights.read(name)[0].any():
                raise UserError(
                    f"the tensor {name} is not 0, but there is no cls.seq_relationship: Megatron has token types only "
                    "with the binary head; import a MegatronBertForPreTraining"
                )
            continue
        raise UserError(f"the tensor {name} has no place in Megatron's model: config.json names another architecture")
    for name, parts in sources.items():
        meta = [torch.empty(weights.shapes[part], device="meta") for part in parts]
        try:
            made = tuple(to_megatron(found.family, name, meta, found.model, rows).shape)
        except RuntimeError:
            made = ()
        if made != shapes[name]:
            texts = ", ".join(f"{part} {list(weights.shapes[part])}" for part in parts)
            raise UserError(f"the tensor {texts} does not fit config.json: Megatron's {name} is {list(shapes[name])}")
