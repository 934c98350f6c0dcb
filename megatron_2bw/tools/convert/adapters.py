"""The adapters of a checkpoint of --lora-rank: merged into the weights, or as a folder
that the package peft loads."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from megatron_2bw.base.files import write_json
from megatron_2bw.run.flags.project_flags import ADAPTER
from megatron_2bw.tools.convert import hugging_face_folder
from megatron_2bw.tools.convert.config import CommonModel
from megatron_2bw.tools.convert.families import to_hugging_face

# a parameter of the checkpoint, or of its --lora-base, by Megatron's name
Read = Callable[[str], torch.Tensor]


def matrix(name: str, part: str) -> str:
    """The name of the adapter's matrix, a or b, of the weight `name`."""
    return f"{name.removesuffix('.weight')}{ADAPTER}.{part}"


def merged(read: Read, name: str, args: Namespace) -> torch.Tensor:
    """The weight with its adapter's product added, which is rounded once."""
    weight = read(name)
    a = read(matrix(name, "a")).float()
    b = read(matrix(name, "b")).float()
    whole = weight.float()
    whole.addmm_(b, a, alpha=args.lora_alpha / args.lora_rank)
    return whole.to(weight.dtype)


def write(
    folder: Path,
    common: CommonModel,
    read: Read,
    names: list[str],
    args: Namespace,
    base: Path | None,
) -> None:
    """peft's files for the adapters of the weights `names`. Layers that are one in
    Megatron have the same A."""
    tensors = {}
    modules = set()
    # peft's matrices of GPT-2's layers are not transposed
    family = replace(common.family, transposed=False)
    for name in names:
        a = read(matrix(name, "a"))
        parts = to_hugging_face(family, name, read(matrix(name, "b")), common.model)
        for source, b in zip(family.sources(name), parts):
            path = source.removesuffix(".weight")
            tensors[f"base_model.model.{path}.lora_A.weight"] = a.clone()
            tensors[f"base_model.model.{path}.lora_B.weight"] = b
            *parents, module = path.split(".")
            # a head has a layer `dense`, too
            if module == "dense":
                module = f"{parents[-1]}.dense"
            modules.add(module)
    hugging_face_folder.write(folder, tensors.items())
    (folder / hugging_face_folder.SINGLE).rename(folder / "adapter_model.safetensors")
    (folder / "config.json").unlink()  # it is of the model, which is not here
    config = dict(
        peft_type="LORA",
        r=args.lora_rank,
        lora_alpha=args.lora_alpha,
        target_modules=sorted(modules),
        task_type="CAUSAL_LM" if args.task == "gpt" else None,
        fan_in_fan_out=common.family.transposed,
        base_model_name_or_path=str(base or ""),
        lora_dropout=0.0,
        bias="none",
        inference_mode=True,
    )
    write_json(folder / "adapter_config.json", config, indent=2)
