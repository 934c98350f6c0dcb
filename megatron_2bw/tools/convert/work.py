"""Import a Hugging Face folder as a Megatron checkpoint, export a checkpoint as such a
folder.

Invariants:
- configuration, names and shapes are those of transformers' model, checked before
  anything is written;
- what was not written to its end cannot be loaded.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from tqdm import tqdm

from megatron_2bw.base.errors import UserError, file_errors
from megatron_2bw.base.files import write_json, write_whole
from megatron_2bw.run.flags import project_flags
from megatron_2bw.tools.convert import adapters, hugging_face_folder, megatron
from megatron_2bw.tools.convert import config as configs
from megatron_2bw.tools.convert.families import to_hugging_face, to_megatron
from megatron_2bw.tools.planner.descriptions.model import Model

FLAGS, TOKENIZER = "model_flags.txt", "tokenizer"


def import_model(options: argparse.Namespace) -> int:
    """Write a checkpoint, the model's flags and its tokenizer. Memory: that of one
    parameter, twice."""
    found = configs.read(options.source / "config.json", options.seq_length)
    weights = hugging_face_folder.Weights(options.source)
    files, copies = _files(found, weights.shapes)
    megatron.use_cpu()
    rows = (
        -(-found.model.vocab // options.make_vocab_size_divisible_by)
        * options.make_vocab_size_divisible_by
    )
    tokenizer = (
        options.source if hugging_face_folder.has_tokenizer(options.source) else None
    )
    flags = [
        *found.flags,
        "--padded-vocab-size",
        str(rows),
        *_tokenizer_flags(tokenizer, found.model),
    ]
    args = megatron.arguments(flags, found.model.kind)
    if tokenizer:
        args.tokenizer_model = flags[-1] = str((options.save / TOKENIZER).resolve())
    with megatron.whole_model(args, "meta") as (_, entries):
        names = [name for name in entries if not name.endswith("_extra_state")]
        sources = {
            name: [files[source] for source in found.family.sources(name)]
            for name in names
        }
        for unused in files.keys() - {
            source for name in names for source in found.family.sources(name)
        }:
            original = copies.get(unused)
            expected = weights.read(files[original]) if original else torch.zeros(1)
            if (
                not re.fullmatch(found.family.ignored, unused)
                and (weights.read(files[unused]) != expected).any()
            ):
                raise UserError(
                    f"the tensor {unused} differs from {original or 0}, but "
                    "Megatron's model has no place for it: see "
                    f"{'tie_word_embeddings' if original else 'architectures'} in "
                    "config.json, or remove the tensor"
                )
        dtypes = {name: weights.dtypes[sources[name][0]] for name in names}
        options.save.mkdir(parents=True, exist_ok=True)
        if tokenizer:
            hugging_face_folder.copy_files(options.source, options.save / TOKENIZER)
        write_whole(options.save / FLAGS, shlex.join(flags) + "\n")
        with tqdm(total=len(names), unit="tensor", desc="import") as bar:

            def make(name: str) -> torch.Tensor:
                bar.update()
                parts = [
                    _finite(source, weights.read(source)) for source in sources[name]
                ]
                return to_megatron(found.family, name, parts, found.model, rows)

            megatron.write(options.save, args, entries, dtypes, make)
    print(
        f"{options.save}: {found.model.parameters() / 1e6:,.1f} million parameters. Train with"
    )
    print(
        f"  megatron-2bw train {found.model.kind} @{options.save / FLAGS} --load "
        f"{options.save} --finetune \\"
    )
    print(
        "    --pipeline-schedule 2bw --pipeline-model-parallel-size 2 --data-path ... --lr 2e-5 ..."
    )
    return 0


def export_model(options: argparse.Namespace) -> int:
    """Write the weights of a checkpoint, with 2BW the newest, as a folder that
    transformers' AutoModel loads; adapters alone as one that peft loads."""
    folder = megatron.find(options.source, options.ckpt_step)
    megatron.use_cpu()
    args = megatron.saved_arguments(folder)
    like = options.like or (args.tokenizer_model and Path(args.tokenizer_model))
    checkpoint, alone = (
        megatron.Checkpoint(folder, args),
        args.lora_rank and not options.merge,
    )
    temporary = options.out.with_name(f".{options.out.name}.{uuid.uuid4().hex}")
    try:
        temporary.mkdir(parents=True)
        if like and like.is_dir():
            hugging_face_folder.copy_files(like, temporary)
        found, written = _represented(args, temporary / "config.json")
        with megatron.whole_model(written, "meta") as (_, entries):
            names = [name for name in entries if not name.endswith("_extra_state")]
            kinds = set(checkpoint.dtypes(entries, names).values())
            names = [name for name in names if f"{project_flags.ADAPTER}." not in name]
            shapes = lambda name: torch.empty(entries[name].data.shape, device="meta")
            _files(
                found,
                {
                    name: tuple(part.shape)
                    for name, part in _exported(found, shapes, names)
                },
            )
            kind = (
                str(next(iter(kinds))).removeprefix("torch.")
                if len(kinds) == 1
                else "float32"
            )
            dtype = {"dtype": kind, "torch_dtype": kind}
            write_json(
                temporary / "config.json",
                found.content | configs.older(found.model) | dtype,
                indent=2,
            )
            read = lambda name: _finite(name, checkpoint.read(entries[name]))
            bar = tqdm(names, unit="tensor", desc="export")
            if alone:
                adapted = [name for name in bar if adapters.of(name) in entries]
                adapters.write(temporary, found, read, adapted, args, like)
            else:
                whole = lambda name: (
                    adapters.merged(read, name, args)
                    if adapters.of(name) in entries
                    else read(name)
                )
                hugging_face_folder.write(temporary, _exported(found, whole, bar))
        temporary.rename(options.out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if (
        found.model.kind == "bert"
        and found.model.gelu == "tanh"
        and not args.openai_gelu
    ):
        print(
            "> the masked-language head was trained with the exact GeLU; "
            "transformers has the layers' tanh form"
        )
    what = f"adapters of rank {args.lora_rank} for" * bool(alone)
    print(
        f"{options.out}: {what} {found.model.parameters() / 1e6:,.1f} million "
        f"parameters, {found.architecture}"
    )
    return 0


def _represented(
    args: argparse.Namespace, path: Path
) -> tuple[configs.Found, argparse.Namespace]:
    """The model of the configuration at `path`, and Megatron's arguments of its import.
    Unless the file is of the model of `args`, it is written anew. UserError, with the
    flag, if no configuration is."""
    flags = "no file"
    for content in (None, configs.of_arguments(args)):
        if content:
            write_json(path, content)
        try:
            found = configs.read(path, args.max_position_embeddings)
            words = [*found.flags, "--padded-vocab-size", str(args.padded_vocab_size)]
            written = megatron.arguments(
                [*words, *_tokenizer_flags(None, found.model)], found.model.kind
            )
            flags = megatron.unlike(args, written)
            project_flags.adopt(written, args)
        except UserError:
            if content:
                raise
        if not flags:
            return found, written
    raise UserError(
        f"{flags}: transformers' {found.architecture} has another value of it: nothing was exported"
    )


def _files(
    found: configs.Found, shapes: dict[str, tuple[int, ...]]
) -> tuple[dict[str, str], dict[str, str]]:
    """The name in `shapes`, which may lack the family's prefix, of each tensor; and the
    original of each copy, which a folder may hold too. UserError unless names and
    shapes are those of transformers' model of the configuration."""
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        model = getattr(transformers, found.architecture)(
            transformers.AutoConfig.for_model(**found.content)
        )
    copies = {
        name: of
        for name, of in model._tied_weights_keys.items()
        if found.model.tied or name.endswith("bias")
    }
    # as in a file, where each expert has its own tensors
    state = revert_weight_conversion(model, model.state_dict())
    wanted, prefix = (
        {name: tuple(tensor.shape) for name, tensor in state.items()},
        found.family.prefix,
    )
    files = {
        prefix + name if prefix + name in wanted else name: name for name in shapes
    }
    for name in sorted(wanted.keys() | files.keys()):
        held, expected = (
            shapes.get(files.get(name, ""), "missing"),
            wanted.get(name, "missing"),
        )
        spare = (
            re.fullmatch(found.family.ignored, name)
            or held == "missing"
            and name in copies
        )
        if held != expected and not spare:
            raise UserError(
                f"the tensor {name} is {held}; config.json's {found.architecture} "
                f"has it as {expected}"
            )
    return files, copies


def _finite(name: str, tensor: torch.Tensor) -> torch.Tensor:
    # aminmax hands NaN on, and needs no memory
    if not torch.stack(tensor.aminmax()).isfinite().all():
        raise UserError(
            f"the tensor {name} holds NaN or infinite numbers: take a checkpoint from before that"
        )
    return tensor


def _exported(
    found: configs.Found, read: Callable[[str], torch.Tensor], names: Iterable[str]
) -> Iterator:
    for name in names:
        parts = to_hugging_face(found.family, name, read(name), found.model)
        yield from zip(found.family.sources(name), parts)
        if name == "embedding.word_embeddings.weight" and found.zero_types:
            yield (
                "bert.embeddings.token_type_embeddings.weight",
                torch.zeros(2, parts[0].shape[1]).to(parts[0]),
            )
        # transformers' model reads the copy then
        if name == "output_layer.bias" and not found.model.tied:
            yield "cls.predictions.decoder.bias", parts[0].clone()


def _tokenizer_flags(folder: Path | None, model: Model) -> list[str]:
    """UserError if the tokenizer has tokens that the model has not."""
    if folder is None:
        return ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(model.vocab)]
    from transformers import AutoTokenizer

    with file_errors(f"{folder}: the tokenizer cannot be read"):  # its code is not run
        largest = max(
            AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            .get_vocab()
            .values()
        )
    if largest >= model.vocab:
        ends = (
            f"the vocabulary of config.json ends at {model.vocab - 1}: give the "
            "model's own tokenizer"
        )
        raise UserError(f"{folder}: the tokenizer has the token {largest}, but {ends}")
    return [
        "--tokenizer-type",
        "HuggingFaceTokenizer",
        "--tokenizer-model",
        str(folder),
    ]
