"""Between a Hugging Face config.json and Megatron's flags: which model it is, and what cannot be converted.

Invariant: the planner's reader of config.json decides what Megatron can represent; this module adds what the weights
need.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_2bw.convert.families import FAMILIES, Family
from megatron_2bw.errors import UserError
from megatron_2bw.files import read_yaml
from megatron_2bw.models.hugging_face import LONGEST, SCALING, SIZES, from_hugging_face
from megatron_2bw.models.inputs import model_of
from megatron_2bw.models.model import Model

ARCHITECTURES = {  # those with the heads that Megatron trains, the first is written
    "llama": ("LlamaForCausalLM",),
    "mistral": ("MistralForCausalLM",),
    "qwen2": ("Qwen2ForCausalLM",),
    "qwen3": ("Qwen3ForCausalLM",),
    "gpt2": ("GPT2LMHeadModel", "GPT2Model"),
    "megatron-bert": ("MegatronBertForPreTraining", "MegatronBertForMaskedLM"),
}
_TIED = {"lm_head.weight", "cls.predictions.decoder.weight"}


@dataclass(frozen=True)
class Found:
    """A model that both sides can represent. kind: transformers' model_type; flags: Megatron's."""

    kind: str
    model: Model
    binary_head: bool = False
    flags: tuple[str, ...] = ()

    @property
    def family(self) -> Family:
        return FAMILIES[self.kind]

    @property
    def task(self) -> str:
        return self.model.kind

    @property
    def zero_types(self) -> bool:
        """Whether transformers' model has token types and Megatron's none."""
        return self.task == "bert" and not self.binary_head

    @property
    def spare(self) -> set[str]:
        """Tensors that a folder may hold twice."""
        return _TIED if self.model.tied else set()


def read(path: Path, sequence: int | None) -> Found:
    """The model of a config.json, and Megatron's flags for samples of `sequence` tokens.

    Raises UserError, with the entry and the reason, for what Megatron 0.19 cannot represent.
    """
    config = read_yaml(path)
    kind = config.get("model_type")
    if kind == "bert":
        raise UserError(
            f"{path}: model_type 'bert' has its norms after each layer; Megatron's BERT has them before, as "
            "transformers' megatron-bert"
        )
    if kind not in FAMILIES:
        raise UserError(f"{path}: model_type {kind!r} is not supported; those that are: {', '.join(FAMILIES)}")
    names = config.get("architectures") or ARCHITECTURES[kind][:1]
    if names[0] not in ARCHITECTURES[kind]:
        raise UserError(
            f"{path}: the entry 'architectures' is {names[0]}, with a head that Megatron does not train; use "
            f"{' or '.join(ARCHITECTURES[kind])}"
        )
    try:
        learned = kind in ("gpt2", "megatron-bert")
        model = from_hugging_face(path, None if learned else sequence)
    except UserError as error:
        raise UserError(str(error).removeprefix("--model ")) from None
    flags = model.flags()
    if learned:
        if sequence and sequence > model.sequence:
            raise UserError(f"--seq-length {sequence}: the model has only {model.sequence} positions")
        flags[flags.index("--seq-length") + 1] = str(sequence or min(model.sequence, LONGEST))
    for flag, entry in (("--hidden-dropout", _DROPOUTS[0]), ("--attention-dropout", _DROPOUTS[1])):
        rate = next((config[name] for name in entry if name in config), None)
        if model.dropout and rate is not None and rate != 0.1:
            flags += [flag, str(rate)]
    head = kind == "megatron-bert" and names[0] == ARCHITECTURES[kind][0]
    if kind == "megatron-bert" and not head:
        flags.append("--bert-no-binary-head")
    return Found(kind, model, head, tuple(flags))


_DROPOUTS = (("resid_pdrop", "hidden_dropout_prob"), ("attn_pdrop", "attention_probs_dropout_prob"))


def of_arguments(args: argparse.Namespace, like: Path | None) -> tuple[Found, dict[str, Any]]:
    """The model of a checkpoint's arguments, and the content of its config.json.

    like: a folder whose config.json is taken if it is of this model. Raises UserError, with the flag, for a model that
    none of the families has.
    """
    bert = getattr(args, "task", "gpt") == "bert"
    names = dict(model=None, bert=bert, seq_length=args.max_position_embeddings, norm_epsilon=args.layernorm_epsilon)
    off = dict(disable_bias_linear=not args.add_bias_linear, no_bias_gelu_fusion=not args.bias_gelu_fusion)
    model = model_of(argparse.Namespace(**vars(args) | names | off))
    model = replace(
        model,
        name="exported",
        qkv_bias=model.qkv_bias and not model.bias,
        rope_factor=model.rope_factor if model.rope_scaling else 8.0,
        gelu="" if args.swiglu else "tanh" if args.openai_gelu or args.bias_gelu_fusion else "exact",
    )
    kind = _kind(model, args)
    head = bert and bool(args.bert_binary_head)
    if like is not None:
        with_config = _same(model, kind, head, like / "config.json")
        if with_config is not None:
            return with_config
    found = Found(kind, model, head)
    return found, _config(found)


def _kind(model: Model, args: argparse.Namespace) -> str:
    if getattr(args, "num_experts", None) or getattr(args, "multi_latent_attention", False):
        raise UserError("--num-experts, --multi-latent-attention: only dense models can be exported")
    if {model.gated, model.rms_norm, not model.bias} != {model.rotary} or (model.qk_norm and model.qkv_bias):
        raise UserError(
            "--position-embedding-type rope, --swiglu, --normalization RMSNorm and --disable-bias-linear: a model that "
            "can be exported has all of them (with one of --qk-layernorm and --add-qkv-bias at most) or none"
        )
    if model.rotary:
        return "qwen3" if model.qk_norm else "qwen2" if model.qkv_bias else "llama"
    if model.groups != model.heads or model.head_size * model.heads != model.hidden or model.qk_norm:
        raise UserError("--group-query-attention, --kv-channels, --qk-layernorm: GPT-2 and MegatronBert have none")
    return "megatron-bert" if model.kind == "bert" else "gpt2"


def _same(model: Model, kind: str, head: bool, path: Path) -> tuple[Found, dict[str, Any]] | None:
    """The folder's own configuration, if it is of this model but for its samples' length."""
    try:
        other = read(path, 1 if model.rotary else None)
    except UserError:
        return None
    apart = dict(name="", sequence=1, dropout=False, vocab=1)
    llamas = {"llama", "mistral"}
    kinds = other.kind == kind or {other.kind, kind} == llamas
    if not kinds or other.binary_head != head or replace(other.model, **apart) != replace(model, **apart):
        return None
    return Found(other.kind, replace(model, vocab=other.model.vocab), head), read_yaml(path)


def _config(found: Found) -> dict[str, Any]:
    from transformers import AutoConfig

    model = found.model
    ends = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None, tie_word_embeddings=model.tied)
    gelu = "gelu_new" if model.gelu == "tanh" else "gelu"
    fields: dict[str, Any] = {entry: getattr(model, field) for field, entry in SIZES.items()}
    fields["max_position_embeddings"] = model.sequence
    if model.rotary:
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(model.rotary_base)}
        if model.rope_scaling:
            rope |= {"rope_type": "llama3", "factor": model.rope_factor} | SCALING
        fields |= {"num_key_value_heads": model.groups, "head_dim": model.head_size, "rope_parameters": rope}
        fields["rms_norm_eps"] = model.norm_epsilon
    elif found.kind == "gpt2":
        fields["n_inner"] = fields.pop("intermediate_size")
        fields |= {"layer_norm_epsilon": model.norm_epsilon, "activation_function": gelu}
    else:
        fields |= {"layer_norm_eps": model.norm_epsilon, "hidden_act": gelu}
    config = AutoConfig.for_model(found.kind, **fields, **ends)
    names = ARCHITECTURES[found.kind]
    config.architectures = [names[1 if found.zero_types else 0]]
    return config.to_dict()  # all entries: readers need those that equal a default, too
