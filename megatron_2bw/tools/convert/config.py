"""Between a Hugging Face config.json and Megatron's flags: which model it is, and what
cannot be converted.

Invariant: the planner's reader of config.json decides what Megatron can represent; this
module adds what the weights need.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from megatron_2bw.base.errors import UserError
from megatron_2bw.base.files import read_yaml
from megatron_2bw.tools.convert.families import FAMILIES, Family
from megatron_2bw.tools.planner.descriptions.hugging_face_config import (
    LLAMAS,
    LONGEST,
    SCALING,
    SIZES,
    from_hugging_face,
)
from megatron_2bw.tools.planner.descriptions.inputs import model_of
from megatron_2bw.tools.planner.descriptions.model import Model

ARCHITECTURES = {  # those with the heads that Megatron trains, the first is written
    "llama": ("LlamaForCausalLM",),
    "mistral": ("MistralForCausalLM",),
    "qwen2": ("Qwen2ForCausalLM",),
    "qwen3": ("Qwen3ForCausalLM",),
    "mixtral": ("MixtralForCausalLM",),
    "qwen3_moe": ("Qwen3MoeForCausalLM",),
    "gpt2": ("GPT2LMHeadModel", "GPT2Model"),
    "megatron-bert": ("MegatronBertForPreTraining", "MegatronBertForMaskedLM"),
}


@dataclass(frozen=True)
class Found:
    """A model that both sides can represent: transformers' model_type, class and
    config.json, and Megatron's flags."""

    kind: str
    model: Model
    architecture: str
    content: dict[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()

    @property
    def family(self) -> Family:
        return FAMILIES[self.kind]

    @property
    def zero_types(self) -> bool:
        """Whether transformers' model has token types and Megatron's none."""
        return self.architecture == "MegatronBertForMaskedLM"


def read(path: Path, sequence: int | None) -> Found:
    """The model of a config.json, and Megatron's flags for samples of `sequence`
    tokens.

    Raises UserError, with the entry and the reason, for what Megatron 0.19 cannot
    represent.
    """
    config = read_yaml(path)
    kind = config.get("model_type")
    if kind not in FAMILIES:  # the norms of 'bert' are after each layer
        raise UserError(
            f"{path}: model_type {kind!r} is not supported; those that are: {', '.join(FAMILIES)}"
        )
    names = config.get("architectures") or ARCHITECTURES[kind][:1]
    if names[0] not in ARCHITECTURES[kind]:
        known = " or ".join(ARCHITECTURES[kind])
        raise UserError(
            f"{path}: 'architectures' is {names[0]}, whose head Megatron does not "
            f"train; use {known}"
        )
    try:
        learned = kind in ("gpt2", "megatron-bert")
        model = from_hugging_face(path, None if learned else sequence)
    except UserError as error:
        raise UserError(str(error).removeprefix("--model ")) from None
    flags = model.flags()
    if learned:
        if sequence and sequence > model.sequence:
            raise UserError(
                f"--seq-length {sequence}: the model has only {model.sequence} positions"
            )
        flags[flags.index("--seq-length") + 1] = str(
            sequence or min(model.sequence, LONGEST)
        )
    for entry, flag in _DROPOUTS.items():
        if model.dropout and config.get(entry, 0.1) != 0.1:
            flags += [flag, str(config[entry])]
    found = Found(
        kind,
        model,
        ARCHITECTURES[kind][0] if kind == "gpt2" else names[0],
        config,
        tuple(flags),
    )
    from transformers import AutoConfig

    expected = _config(found)
    for name, value in AutoConfig.for_model(**config).to_dict().items():
        # positions
        same = (
            value == expected[name]
            if name in expected
            else not value or value == "absolute"
        )
        if not same and not any(fnmatchcase(name, free) for free in _FREE):
            raise UserError(
                f"{path}: the entry {name!r} is {value!r}: Megatron's model does "
                "not have that; if no output depends "
                "on the entry, remove it"
            )
    return (
        replace(found, flags=(*flags, "--bert-no-binary-head"))
        if found.zero_types
        else found
    )


# Entries of config.json on which no loss depends, or which the planner's reader has
# judged.
_FREE = """
_* transformers_version architectures *dtype output_attentions output_hidden_states chunk_size_feed_forward id2label
label2id task_specific_params tokenizer_class unsloth* use_cache *_token_id initializer_range pretraining_tp *dropout*
*pdrop summary_* gradient_checkpointing n_inner *sliding_window max_window_layers max_position_embeddings n_positions
n_ctx head_dim rope_parameters hidden_act activation_function is_llama_config model_max_length output_router_logits
""".split()
_DROPOUTS = dict.fromkeys(("resid_pdrop", "hidden_dropout_prob"), "--hidden-dropout")
_DROPOUTS |= dict.fromkeys(
    ("attn_pdrop", "attention_probs_dropout_prob"), "--attention-dropout"
)


def of_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The content of config.json for the model of a checkpoint's arguments, or for the
    nearest: compare them."""
    bert = args.task == "bert"
    names = dict(
        model=None,
        bert=bert,
        seq_length=args.max_position_embeddings,
        norm_epsilon=args.layernorm_epsilon,
    )
    off = dict(
        disable_bias_linear=not args.add_bias_linear,
        no_bias_gelu_fusion=not args.bias_gelu_fusion,
    )
    model = model_of(
        argparse.Namespace(**vars(args) | names | off | {"lora_rank": None})
    )
    model = replace(
        model,
        name="exported",
        gelu="tanh" if args.openai_gelu or args.bias_gelu_fusion else "exact",
    )
    kind = "megatron-bert" if bert else "gpt2"
    if model.rotary and not bert:
        kind = (
            "qwen3"
            if model.qk_norm
            else "qwen2"
            if model.qkv_bias and not model.bias
            else "llama"
        )
        if model.experts:
            kind = "qwen3_moe" if model.qk_norm else "mixtral"
    return _config(
        Found(kind, model, ARCHITECTURES[kind][bert and not args.bert_binary_head])
    )


def older(model: Model) -> dict[str, Any]:
    """Entries by the names before transformers 5, which reads them too. Without them
    older readers take defaults."""
    entries: dict[str, Any] = {"num_experts": model.experts} if model.experts else {}
    if model.rotary:
        scaling = {
            "rope_type": "llama3",
            "type": "llama3",
            "factor": model.rope_factor,
        } | SCALING
        entries |= {
            "rope_theta": float(model.rotary_base),
            "rope_scaling": scaling if model.rope_scaling else None,
        }
    return entries


def _config(found: Found) -> dict[str, Any]:
    from transformers import AutoConfig

    model = found.model
    ends = dict(
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=model.tied,
    )
    gelu = "gelu_new" if model.gelu == "tanh" else "gelu"
    fields: dict[str, Any] = {
        entry: getattr(model, field) for field, entry in SIZES.items()
    }
    fields["max_position_embeddings"] = model.sequence
    if found.kind in LLAMAS:
        fields |= {
            "num_key_value_heads": model.groups,
            "head_dim": model.head_size,
        } | older(model)
        fields["rms_norm_eps"] = model.norm_epsilon
        if model.experts:
            fields |= {
                "num_experts_per_tok": model.topk,
                "router_aux_loss_coef": model.aux_loss,
            }
        if found.kind == "qwen3_moe":
            fields |= {
                "moe_intermediate_size": model.expert_ffn,
                "norm_topk_prob": not model.pre_softmax,
            }
            fields["mlp_only_layers"] = [*range(model.dense)]
    elif found.kind == "gpt2":
        fields["n_inner"] = fields.pop("intermediate_size")
        fields |= {
            "layer_norm_epsilon": model.norm_epsilon,
            "activation_function": gelu,
        }
    else:
        fields |= {"layer_norm_eps": model.norm_epsilon, "hidden_act": gelu}
    config = AutoConfig.for_model(found.kind, **fields, **ends)
    config.architectures = [found.architecture]
    return config.to_dict()  # all entries: readers need those that equal a default, too
