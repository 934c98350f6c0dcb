"""Where each weight of a Hugging Face model is in Megatron's, and in which order its
rows are.

Invariant: `to_hugging_face` undoes `to_megatron` bit for bit. Neither computes; they
only move rows.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_2bw.base.command_line import table_of
from megatron_2bw.tools.planner.descriptions.model import Model

# a row for each token
VOCABULARY = (
    "embedding.word_embeddings.weight",
    "output_layer.weight",
    "output_layer.bias",
)
# of the output layer for a padding row; in fp16 its probability is 0 too
PADDING_BIAS = -10000.0


@dataclass(frozen=True)
class Family:
    """Models whose tensors have the same names; families.yaml describes the fields."""

    architectures: list[str]
    prefix: str
    names: dict[str, str]
    ignored: str
    transposed: bool = False

    def sources(self, name: str) -> list[str]:
        """Hugging Face's names of the tensors of Megatron's parameter `name`. Raises
        KeyError."""
        place = re.sub(r"\.\d+\.", ".*.", name)
        module, _, kind = place.rpartition(".")
        source = self.names.get(f"{module}.?") or self.names[place]
        for number in re.findall(r"\.(\d+)\.", name):
            source = source.replace("*", number, 1)
        before, _, rest = source.replace("?", kind).partition("{")
        words, _, after = rest.partition("}")
        return [before + word + after for word in words.split(",")]

    def transposes(self, name: str) -> bool:
        return self.transposed and ".linear_" in name and name.endswith("weight")


_DATA = table_of(__file__)
FAMILIES = {kind: Family(**fields) for kind, fields in _DATA.items()}


def to_megatron(
    family: Family,
    name: str,
    parts: Sequence[Tensor],
    model: Model,
    rows: int,
) -> Tensor:
    """Megatron's parameter `name`, whole, from Hugging Face's tensors `parts`.

    rows: of the padded vocabulary. A padding row is a copy of the last token's; in a
    bias it is PADDING_BIAS.
    """
    parts = list(parts)
    if family.transposes(name):
        parts = [part.t() for part in parts]
    if ".linear_qkv." in name:
        if len(parts) == 1:
            parts = parts[0].chunk(3)
        # [query heads of a group, its key head, its value head] for each group
        grouped = [part.unflatten(0, (model.groups, -1)) for part in parts]
        return torch.cat(grouped, dim=1).flatten(0, 1)
    if name in VOCABULARY:
        padding = parts[0][-1:]
        if name.endswith("bias"):
            padding = torch.full_like(padding, PADDING_BIAS)
        parts += [padding] * (rows - model.vocab)
    return torch.cat(parts)


def to_hugging_face(
    family: Family, name: str, whole: Tensor, model: Model
) -> list[Tensor]:
    """Hugging Face's tensors, in the order of `family.sources(name)`; without the
    vocabulary's padding."""
    count = len(family.sources(name))
    if name in VOCABULARY:
        parts = [whole[: model.vocab]]
    elif ".linear_qkv." in name:
        size = model.head_size
        queries = model.heads // model.groups * size
        grouped = whole.unflatten(0, (model.groups, -1))
        split = grouped.split([queries, size, size], dim=1)
        parts = [part.flatten(0, 1) for part in split]
        if count == 1:
            parts = [torch.cat(parts)]
    else:
        parts = whole.chunk(count)
    if family.transposes(name):
        parts = [part.t() for part in parts]
    return [part.clone(memory_format=torch.contiguous_format) for part in parts]
