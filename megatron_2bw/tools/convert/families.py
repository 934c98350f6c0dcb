"""Where each weight of a Hugging Face model is in Megatron's, and in which order its
rows are.

Invariant: `to_hugging_face` undoes `to_megatron` bit for bit. Neither computes; they
only move rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from megatron_2bw.tools.planner.descriptions.model import Model

# Megatron's name (of its local layers), and Hugging Face's; * is the layer. Braces:
# several tensors, in this order.
_DECODER = "decoder.layers.*"
_LLAMA = f"""
embedding.word_embeddings.weight                    model.embed_tokens.weight
{_DECODER}.input_layernorm.weight                   model.layers.*.input_layernorm.weight
{_DECODER}.self_attention.linear_qkv.weight         model.layers.*.self_attn.{{q,k,v}}_proj.weight
{_DECODER}.self_attention.linear_qkv.bias           model.layers.*.self_attn.{{q,k,v}}_proj.bias
{_DECODER}.self_attention.q_layernorm.weight        model.layers.*.self_attn.q_norm.weight
{_DECODER}.self_attention.k_layernorm.weight        model.layers.*.self_attn.k_norm.weight
{_DECODER}.self_attention.linear_proj.weight        model.layers.*.self_attn.o_proj.weight
{_DECODER}.pre_mlp_layernorm.weight                 model.layers.*.post_attention_layernorm.weight
{_DECODER}.mlp.linear_fc1.weight                    model.layers.*.mlp.{{gate,up}}_proj.weight
{_DECODER}.mlp.linear_fc2.weight                    model.layers.*.mlp.down_proj.weight
decoder.final_layernorm.weight                      model.norm.weight
output_layer.weight                                 lm_head.weight
"""
# two stars: the layer, and the expert
_EXPERT = f"{_DECODER}.mlp.experts.local_experts.*"
_QWEN3_MOE = f"""{_LLAMA}
{_DECODER}.mlp.router.weight   model.layers.*.mlp.gate.weight
{_EXPERT}.linear_fc1.weight    model.layers.*.mlp.experts.*.{{gate,up}}_proj.weight
{_EXPERT}.linear_fc2.weight    model.layers.*.mlp.experts.*.down_proj.weight
"""
_MIXTRAL = f"""{_LLAMA}
{_DECODER}.mlp.router.weight   model.layers.*.block_sparse_moe.gate.weight
{_EXPERT}.linear_fc1.weight    model.layers.*.block_sparse_moe.experts.*.{{w1,w3}}.weight
{_EXPERT}.linear_fc2.weight    model.layers.*.block_sparse_moe.experts.*.w2.weight
"""
_GPT2 = f"""
embedding.word_embeddings.weight                    transformer.wte.weight
embedding.position_embeddings.weight                transformer.wpe.weight
{_DECODER}.input_layernorm.?                        transformer.h.*.ln_1.?
{_DECODER}.self_attention.linear_qkv.?              transformer.h.*.attn.c_attn.?
{_DECODER}.self_attention.linear_proj.?             transformer.h.*.attn.c_proj.?
{_DECODER}.pre_mlp_layernorm.?                      transformer.h.*.ln_2.?
{_DECODER}.mlp.linear_fc1.?                         transformer.h.*.mlp.c_fc.?
{_DECODER}.mlp.linear_fc2.?                         transformer.h.*.mlp.c_proj.?
decoder.final_layernorm.?                           transformer.ln_f.?
output_layer.weight                                 lm_head.weight
"""
_ENCODER = "encoder.layers.*"
_MEGATRON_BERT = f"""
embedding.word_embeddings.weight                    bert.embeddings.word_embeddings.weight
embedding.position_embeddings.weight                bert.embeddings.position_embeddings.weight
embedding.tokentype_embeddings.weight               bert.embeddings.token_type_embeddings.weight
{_ENCODER}.input_layernorm.?                        bert.encoder.layer.*.attention.ln.?
{_ENCODER}.self_attention.linear_qkv.?              bert.encoder.layer.*.attention.self.{{query,key,value}}.?
{_ENCODER}.self_attention.linear_proj.?             bert.encoder.layer.*.attention.output.dense.?
{_ENCODER}.pre_mlp_layernorm.?                      bert.encoder.layer.*.ln.?
{_ENCODER}.mlp.linear_fc1.?                         bert.encoder.layer.*.intermediate.dense.?
{_ENCODER}.mlp.linear_fc2.?                         bert.encoder.layer.*.output.dense.?
encoder.final_layernorm.?                           bert.encoder.ln.?
lm_head.dense.?                                     cls.predictions.transform.dense.?
lm_head.layer_norm.?                                cls.predictions.transform.LayerNorm.?
output_layer.weight                                 cls.predictions.decoder.weight
output_layer.bias                                   cls.predictions.bias
pooler.dense.?                                      bert.pooler.dense.?
binary_head.?                                       cls.seq_relationship.?
"""
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
    """prefix: of all tensors but the heads; a file of the model without heads leaves it
    out."""

    prefix: str
    names: dict[str, tuple[str, ...]]
    transposed: bool = False  # GPT-2's linear layers have [inputs, outputs]
    ignored: str = r"$."  # tensors without weights

    def sources(self, name: str) -> tuple[str, ...]:
        """Hugging Face's names of the tensors of Megatron's parameter `name`. Raises
        KeyError."""
        numbers = re.findall(r"\.(\d+)\.", name)
        found = self.names[re.sub(r"\.\d+\.", ".*.", name)]
        return tuple(source.replace("*", "{}").format(*numbers) for source in found)


def _table(text: str) -> dict[str, tuple[str, ...]]:
    names = {}
    for line in filter(None, text.splitlines()):
        for kind in ("weight", "bias") if "?" in line else ("",):
            ours, theirs = line.replace("?", kind).split()
            several = re.search(r"\{(.*)\}", theirs)
            words = several[1].split(",") if several else [""]
            names[ours] = tuple(re.sub(r"\{.*\}", word, theirs) for word in words)
    return names


_LLAMA_FAMILY = Family("model.", _table(_LLAMA), ignored=r".*rotary_emb\.inv_freq")
FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _LLAMA_FAMILY),
    "mixtral": replace(_LLAMA_FAMILY, names=_table(_MIXTRAL)),
    "qwen3_moe": replace(_LLAMA_FAMILY, names=_table(_QWEN3_MOE)),
    "gpt2": Family(
        "transformer.",
        _table(_GPT2),
        transposed=True,
        ignored=r".*\.attn\.(bias|masked_bias)",
    ),
    "megatron-bert": Family(
        "bert.", _table(_MEGATRON_BERT), ignored=r".*embeddings\.position_ids"
    ),
}


def to_megatron(
    family: Family,
    name: str,
    parts: Sequence[torch.Tensor],
    model: Model,
    rows: int | None = None,
) -> torch.Tensor:
    """Megatron's parameter `name`, whole, from Hugging Face's tensors `parts`.

    rows: of the padded vocabulary. A padding row is a copy of the last token's, or
    PADDING_BIAS in a bias.
    """
    if family.transposed and ".linear_" in name and name.endswith("weight"):
        parts = [part.t() for part in parts]
    if ".linear_qkv." in name:
        if len(parts) == 1:
            parts = parts[0].chunk(3)
        # [query heads of a group, its key head, its value head] for each group
        grouped = [part.reshape(model.groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(grouped, dim=1).flatten(0, 1)
    whole = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
    missing = rows - model.vocab if rows and name in VOCABULARY else 0
    if missing > 0:
        last = (
            torch.full_like(whole[-1:], PADDING_BIAS)
            if name.endswith("bias")
            else whole[-1:]
        )
        whole = torch.cat([whole, *[last] * missing])
    return whole.contiguous()


def to_hugging_face(
    family: Family, name: str, whole: torch.Tensor, model: Model
) -> list[torch.Tensor]:
    """Hugging Face's tensors, in the order of `family.sources(name)`; without the
    vocabulary's padding."""
    count = len(family.sources(name))
    if name in VOCABULARY:
        parts = [whole[: model.vocab]]
    elif ".linear_qkv." in name:
        size = model.head_size
        grouped = whole.reshape(model.groups, -1, *whole.shape[1:])
        parts = [
            part.flatten(0, 1)
            for part in grouped.split(
                [model.heads // model.groups * size, size, size], dim=1
            )
        ]
        if count == 1:
            parts = [torch.cat(parts)]
    else:
        parts = list(whole.chunk(count))
    if family.transposed and ".linear_" in name and name.endswith("weight"):
        parts = [part.t() for part in parts]
    return [part.clone(memory_format=torch.contiguous_format) for part in parts]
