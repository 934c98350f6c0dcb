"""Import a Hugging Face folder as a Megatron checkpoint, export a checkpoint as such a
folder.

Invariants:
- configuration, names and shapes are those of transformers' model, checked before
  anything is written;
- what was not written to its end cannot be loaded.
"""

import re
import shlex
import shutil
import uuid
from argparse import Namespace
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from megatron_2bw.base.errors import UserError, file_errors
from megatron_2bw.base.files import write_json, write_whole
from megatron_2bw.run.flags import project_flags
from megatron_2bw.tools.convert import (
    adapters,
    hugging_face_folder,
    megatron,
    parameters,
)
from megatron_2bw.tools.convert import config as configs
from megatron_2bw.tools.convert.config import CommonModel
from megatron_2bw.tools.convert.families import to_hugging_face, to_megatron

FLAGS = "model_flags.txt"
TOKENIZER = "tokenizer"
Shapes = dict[str, tuple[int, ...]]


def import_model(options: Namespace) -> int:
    """Write a checkpoint, the model's flags and its tokenizer. Memory: that of one
    parameter, twice."""
    common = configs.read(options.source / "config.json", options.seq_length)
    model = common.model
    weights = hugging_face_folder.Weights(options.source)
    files, copies = _files(common, weights.shapes)
    megatron.use_cpu()
    divisor = options.make_vocab_size_divisible_by
    rows = -(-model.vocab // divisor) * divisor
    tokenizer = hugging_face_folder.has_tokenizer(options.source)
    flags = _flags(common, rows, options.source if tokenizer else None)
    args = megatron.arguments(flags, model.kind)
    if tokenizer:
        flags[-1] = str((options.save / TOKENIZER).resolve())
        args.tokenizer_model = flags[-1]
    with megatron.whole_model(args, "meta") as (_, entries):
        names = _parameters(entries)
        _check_unused(common, weights, files, copies, names)

        def sources(name: str) -> list[str]:
            return [files[source] for source in common.family.sources(name)]

        dtypes = {name: weights.dtypes[sources(name)[0]] for name in names}
        options.save.mkdir(parents=True, exist_ok=True)
        if tokenizer:
            hugging_face_folder.copy_files(options.source, options.save / TOKENIZER)
        write_whole(options.save / FLAGS, shlex.join(flags) + "\n")
        with tqdm(total=len(names), unit="tensor", desc="import") as bar:

            def make(name: str) -> Tensor:
                bar.update()
                parts = [_finite(part, weights.read(part)) for part in sources(name)]
                return to_megatron(common.family, name, parts, model, rows)

            parameters.write(options.save, args, entries, dtypes, make)
    print(
        f"{options.save}: {model.parameters() / 1e6:,.1f} million parameters. Train with\n"
        f"  megatron-2bw train {model.kind} @{options.save / FLAGS} --load "
        f"{options.save} --finetune \\\n"
        "    --pipeline-schedule 2bw --pipeline-model-parallel-size 2 --data-path ... --lr 2e-5 ..."
    )
    return 0


def _flags(common: CommonModel, rows: int, tokenizer: Path | None) -> list[str]:
    """Megatron's flags of a model; the last one is the tokenizer's folder."""
    padded = ["--padded-vocab-size", str(rows)]
    return [*common.flags, *padded, *_tokenizer_flags(tokenizer, common.model.vocab)]


def _parameters(entries: dict[str, Any]) -> list[str]:
    return [name for name in entries if not name.endswith("_extra_state")]


def _check_unused(
    common: CommonModel,
    weights: hugging_face_folder.Weights,
    files: dict[str, str],
    copies: dict[str, str],
    names: list[str],
) -> None:
    """UserError for a tensor without a place among Megatron's parameters `names`,
    unless it is a copy of another one, or zero."""
    used = set(chain(*map(common.family.sources, names)))
    for name in files.keys() - used:
        if re.fullmatch(common.family.ignored, name):
            continue
        original = copies.get(name)
        expected = weights.read(files[original]) if original else torch.zeros(1)
        if (weights.read(files[name]) != expected).any():
            entry = "tie_word_embeddings" if original else "architectures"
            raise UserError(
                f"the tensor {name} differs from {original or 0}, but Megatron's model "
                f"has no place for it: see {entry} in config.json, or remove the tensor"
            )


def export_model(options: Namespace) -> int:
    """Write the weights of a checkpoint, with 2BW the newest, as a folder that
    transformers' AutoModel loads; adapters alone as one that peft loads."""
    folder = megatron.find(options.source, options.ckpt_step)
    megatron.use_cpu()
    args = megatron.saved_arguments(folder)
    like = options.like or (args.tokenizer_model and Path(args.tokenizer_model))
    checkpoint = parameters.Checkpoint(folder, args)
    alone = args.lora_rank and not options.merge
    name = f".{options.out.name}.{uuid.uuid4().hex}"
    temporary = options.out.with_name(name)
    try:
        temporary.mkdir(parents=True)
        if like and like.is_dir():
            hugging_face_folder.copy_files(like, temporary)
        common, written = _represented(args, temporary / "config.json")
        with megatron.whole_model(written, "meta") as (_, entries):
            dtypes = checkpoint.dtypes(entries, _parameters(entries))
            names = [name for name in dtypes if f"{project_flags.ADAPTER}." not in name]
            tensors = _exported(common, lambda name: entries[name].data, names)
            _files(common, {name: tuple(tensor.shape) for name, tensor in tensors})
            _write_config(temporary, common, set(dtypes.values()))
            bar = tqdm(names, unit="tensor", desc="export")

            def read(name: str) -> Tensor:
                return _finite(name, checkpoint.read(entries[name]))

            def read_merged(name: str) -> Tensor:
                if adapters.matrix(name, "a") in entries:
                    return adapters.merged(read, name, args)
                return read(name)

            if alone:
                adapted = [n for n in bar if adapters.matrix(n, "a") in entries]
                adapters.write(temporary, common, read, adapted, args, like)
            else:
                tensors = _exported(common, read_merged, bar)
                hugging_face_folder.write(temporary, tensors)
        temporary.rename(options.out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    model = common.model
    if model.kind == "bert" and model.gelu == "tanh" and not args.openai_gelu:
        print(
            "> the masked-language head was trained with the exact GeLU; "
            "transformers has the layers' tanh form"
        )
    what = f"adapters of rank {args.lora_rank} for" if alone else ""
    print(
        f"{options.out}: {what} {model.parameters() / 1e6:,.1f} million parameters, "
        f"{common.architecture}"
    )
    return 0


def _write_config(folder: Path, common: CommonModel, dtypes: set[torch.dtype]) -> None:
    if len(dtypes) > 1:
        dtypes = {torch.float32}
    kind = str(dtypes.pop()).removeprefix("torch.")
    # the second as before transformers 5
    content = common.content | configs.older(common.model)
    content |= {"dtype": kind, "torch_dtype": kind}
    write_json(folder / "config.json", content, indent=2)


def _represented(args: Namespace, path: Path) -> tuple[CommonModel, Namespace]:
    """The model of the configuration at `path`, and Megatron's arguments of its import.
    Unless the file is of the model of `args`, it is written anew. UserError, with the
    flag, if no configuration is."""
    for anew in (False, True):
        if anew:
            write_json(path, configs.of_arguments(args))
        try:
            common = configs.read(path, args.max_position_embeddings)
            flags = _flags(common, args.padded_vocab_size, None)
            written = megatron.arguments(flags, common.model.kind)
            differing = megatron.differing_flags(args, written)
        except UserError:
            if anew:
                raise
            continue
        if not differing:
            project_flags.adopt(written, args)
            return common, written
    raise UserError(
        f"{differing}: transformers' {common.architecture} has another value of it: nothing was exported"
    )


def _files(
    common: CommonModel, shapes: Shapes
) -> tuple[dict[str, str], dict[str, str]]:
    """The name in `shapes`, which may lack the family's prefix, of each tensor; and the
    original of each copy, which a folder may hold too. UserError unless names and
    shapes are those of transformers' model of the configuration."""
    wanted, copies = _transformers_tensors(common)
    files = {}
    for name in shapes:
        full = common.family.prefix + name
        files[full if full in wanted else name] = name
    for name in sorted(wanted.keys() | files.keys()):
        shape = shapes.get(files.get(name, ""), "missing")
        expected = wanted.get(name, "missing")
        absent_copy = shape == "missing" and name in copies
        if absent_copy or re.fullmatch(common.family.ignored, name):
            continue
        if shape != expected:
            raise UserError(
                f"the tensor {name} is {shape}; config.json's {common.architecture} "
                f"has it as {expected}"
            )
    return files, copies


def _transformers_tensors(common: CommonModel) -> tuple[Shapes, dict[str, str]]:
    """The shapes of the tensors of transformers' model, and of which ones others are
    copies."""
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        build = getattr(transformers, common.architecture)
        model = build(transformers.AutoConfig.for_model(**common.content))
    copies = {}
    for name, original in model._tied_weights_keys.items():
        if common.model.tied or name.endswith("bias"):
            copies[name] = original
    # as in a file, where each expert has its own tensors
    state = revert_weight_conversion(model, model.state_dict())
    return {name: tuple(state[name].shape) for name in state}, copies


def _finite(name: str, tensor: Tensor) -> Tensor:
    # aminmax hands NaN on, and needs no memory
    if not torch.stack(tensor.aminmax()).isfinite().all():
        raise UserError(
            f"the tensor {name} holds NaN or infinite numbers: take a checkpoint from before that"
        )
    return tensor


def _exported(
    common: CommonModel, read: adapters.Read, names: Iterable[str]
) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face's tensors of Megatron's parameters `names`."""
    for name in names:
        parts = to_hugging_face(common.family, name, read(name), common.model)
        yield from zip(common.family.sources(name), parts)
        if name == "embedding.word_embeddings.weight" and common.zero_types:
            types = parts[0].new_zeros(2, parts[0].shape[1])
            yield "bert.embeddings.token_type_embeddings.weight", types
        # transformers' model reads the copy then
        if name == "output_layer.bias" and not common.model.tied:
            yield "cls.predictions.decoder.bias", parts[0].clone()


def _tokenizer_flags(folder: Path | None, vocab: int) -> list[str]:
    """UserError if the tokenizer has more than the `vocab` tokens of the model."""
    if folder is None:
        return ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(vocab)]
    from transformers import AutoTokenizer

    with file_errors(f"{folder}: the tokenizer cannot be read"):  # its code is not run
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocab:
        raise UserError(
            f"{folder}: the tokenizer has the token {largest}, but the vocabulary of "
            f"config.json ends at {vocab - 1}: give the model's own tokenizer"
        )
    flags = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model".split()
    return [*flags, str(folder)]
