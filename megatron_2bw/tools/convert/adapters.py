"""The adapters of a checkpoint of --lora-rank: merged into the weights, or as a folder
that the package peft loads."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from megatron_2bw.base.files import write_json
from megatron_2bw.run.flags.project_flags import ADAPTER
from megatron_2bw.tools.convert import hugging_face_folder
from megatron_2bw.tools.convert.config import Found
from megatron_2bw.tools.convert.families import to_hugging_face

# a parameter of the checkpoint, or of its --lora-base, by Megatron's name
Read = Callable[[str], torch.Tensor]


def of(name: str, part: str = "a") -> str:
    """The name of the adapter's matrix, a or b, of the weight `name`."""
    return f"{name.removesuffix('.weight')}{ADAPTER}.{part}"


def merged(read: Read, name: str, args: argparse.Namespace) -> torch.Tensor:
    """The weight with its adapter's product added, which is rounded once."""
    weight, a, b = read(name), read(of(name)).float(), read(of(name, "b")).float()
    return (
        weight.float()
        .addmm_(b, a, alpha=args.lora_alpha / args.lora_rank)
        .to(weight.dtype)
    )


def write(
    folder: Path,
    found: Found,
    read: Read,
    names: list[str],
    args: argparse.Namespace,
    base: Path | None,
) -> None:
    """peft's files for the adapters of the weights `names`. Layers that are one in
    Megatron have the same A."""
    tensors: dict[str, torch.Tensor] = {}
    modules: set[str] = set()
    # peft's matrices of GPT-2's layers are not
    family = replace(found.family, transposed=False)
    for name in names:
        for source, b in zip(
            family.sources(name),
            to_hugging_face(family, name, read(of(name, "b")), found.model),
        ):
            path = source.removesuffix(".weight")
            tensors[f"base_model.model.{path}.lora_A.weight"] = read(of(name))
            tensors[f"base_model.model.{path}.lora_B.weight"] = b
            last = path.split(".")
            # a head has a layer `dense`, too
            modules.add(".".join(last[-2:]) if last[-1] == "dense" else last[-1])
    hugging_face_folder.write(folder, tensors.items())
    (folder / hugging_face_folder.SINGLE).rename(folder / "adapter_model.safetensors")
    (folder / "config.json").unlink()  # it is of the model, which is not here
    config = dict(
        peft_type="LORA",
        r=args.lora_rank,
        lora_alpha=args.lora_alpha,
        target_modules=sorted(modules),
    )
    config |= dict(
        task_type="CAUSAL_LM" if args.task == "gpt" else None,
        fan_in_fan_out=found.family.transposed,
    )
    config |= dict(
        base_model_name_or_path=str(base or ""),
        lora_dropout=0.0,
        bias="none",
        inference_mode=True,
    )
    write_json(folder / "adapter_config.json", config, indent=2)
