"""Translates a Hugging Face config.json to Megatron's flags and back, and refuses what
cannot be converted.

Invariant: the planner's reader of config.json decides what Megatron can represent; this
module adds what the weights need.
"""

from argparse import Namespace
from dataclasses import dataclass, replace
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

# Entries of config.json on which no loss depends, or which the planner's reader has
# judged.
_FREE = """
_* transformers_version architectures *dtype output_attentions output_hidden_states chunk_size_feed_forward id2label
label2id task_specific_params tokenizer_class unsloth* use_cache *_token_id initializer_range pretraining_tp *dropout*
*pdrop summary_* gradient_checkpointing n_inner *sliding_window max_window_layers max_position_embeddings n_positions
n_ctx head_dim rope_parameters hidden_act activation_function is_llama_config model_max_length output_router_logits
""".split()
_DROPOUTS = {
    "resid_pdrop": "--hidden-dropout",
    "hidden_dropout_prob": "--hidden-dropout",
    "attn_pdrop": "--attention-dropout",
    "attention_probs_dropout_prob": "--attention-dropout",
}


@dataclass(frozen=True)
class CommonModel:
    """A model that transformers and Megatron can represent.

    kind: transformers' model_type. architecture: its class. content: of config.json.
    flags: Megatron's.
    """

    kind: str
    model: Model
    architecture: str
    content: dict[str, Any]
    flags: list[str]

    @property
    def family(self) -> Family:
        return FAMILIES[self.kind]

    @property
    def zero_types(self) -> bool:
        """Whether transformers' model has token types and Megatron's none."""
        return self.architecture == "MegatronBertForMaskedLM"


def read(path: Path, sequence: int | None) -> CommonModel:
    """The model of a config.json, and Megatron's flags for samples of `sequence`
    tokens.

    Raises UserError, with the entry and the reason, for what Megatron 0.19 cannot
    represent.
    """
    content = read_yaml(path)
    kind = content.get("model_type")
    if kind not in FAMILIES:  # the norms of 'bert' are after each layer
        raise UserError(
            f"{path}: model_type {kind!r} is not supported; those that are: {', '.join(FAMILIES)}"
        )
    trained = FAMILIES[kind].architectures
    architecture = (content.get("architectures") or trained)[0]
    if architecture not in trained:
        raise UserError(
            f"{path}: 'architectures' is {architecture}, whose head Megatron does not "
            f"train; use {' or '.join(trained)}"
        )
    if kind == "gpt2":
        architecture = trained[0]
    learned = kind not in LLAMAS  # positions
    try:
        model = from_hugging_face(path, None if learned else sequence)
    except UserError as error:
        raise UserError(str(error).removeprefix("--model ")) from None
    flags = model.flags()
    if learned:
        sequence = sequence or min(model.sequence, LONGEST)
        if sequence > model.sequence:
            raise UserError(
                f"--seq-length {sequence}: the model has only {model.sequence} positions"
            )
        flags[flags.index("--seq-length") + 1] = str(sequence)
    for entry, flag in _DROPOUTS.items():
        if model.dropout and content.get(entry, 0.1) != 0.1:
            flags += [flag, str(content[entry])]
    common = CommonModel(kind, model, architecture, content, flags)
    if common.zero_types:
        flags.append("--bert-no-binary-head")
    _check_entries(path, common)
    return common


def _check_entries(path: Path, common: CommonModel) -> None:
    """UserError for an entry that Megatron's model does not have."""
    from transformers import AutoConfig

    expected = _content(common.kind, common.model, common.architecture)
    for name, value in AutoConfig.for_model(**common.content).to_dict().items():
        if name in expected:
            same = value == expected[name]
        else:
            same = not value or value == "absolute"  # positions
        if not same and not any(fnmatchcase(name, free) for free in _FREE):
            raise UserError(
                f"{path}: the entry {name!r} is {value!r}: Megatron's model does not "
                "have that; if no output depends on the entry, remove it"
            )


def of_arguments(args: Namespace) -> dict[str, Any]:
    """The content of config.json for the model of a checkpoint's arguments, or for the
    nearest: compare them."""
    bert = args.task == "bert"
    words = vars(args) | dict(
        model=None,
        bert=bert,
        seq_length=args.max_position_embeddings,
        norm_epsilon=args.layernorm_epsilon,
        disable_bias_linear=not args.add_bias_linear,
        no_bias_gelu_fusion=not args.bias_gelu_fusion,
        lora_rank=None,
    )
    tanh = args.openai_gelu or args.bias_gelu_fusion
    gelu = "tanh" if tanh else "exact"
    model = replace(model_of(Namespace(**words)), name="exported", gelu=gelu)
    if bert:
        kind = "megatron-bert"
    elif not model.rotary:
        kind = "gpt2"
    elif model.experts:
        kind = "qwen3_moe" if model.qk_norm else "mixtral"
    elif model.qk_norm:
        kind = "qwen3"
    else:
        kind = "qwen2" if model.qkv_bias and not model.bias else "llama"
    heads = 1 if bert and not args.bert_binary_head else 0
    return _content(kind, model, FAMILIES[kind].architectures[heads])


def older(model: Model) -> dict[str, Any]:
    """Entries by the names before transformers 5, which reads them too. Without them
    older readers take defaults."""
    entries = {}
    if model.experts:
        entries["num_experts"] = model.experts
    if model.rotary:
        entries["rope_theta"] = float(model.rotary_base)
        entries["rope_scaling"] = None
    if model.rope_scaling:
        names = {"rope_type": "llama3", "type": "llama3", "factor": model.rope_factor}
        entries["rope_scaling"] = names | SCALING
    return entries


def _content(kind: str, model: Model, architecture: str) -> dict[str, Any]:
    """All entries of config.json: readers need those that equal a default, too."""
    from transformers import AutoConfig

    gelu = "gelu_new" if model.gelu == "tanh" else "gelu"
    epsilon = model.norm_epsilon
    entries = {entry: getattr(model, field) for field, entry in SIZES.items()}
    if kind in LLAMAS:
        entries |= older(model)
        entries |= dict(
            num_key_value_heads=model.groups,
            head_dim=model.head_size,
            rms_norm_eps=epsilon,
        )
        if model.experts:
            entries["num_experts_per_tok"] = model.topk
            entries["router_aux_loss_coef"] = model.aux_loss
    elif kind == "gpt2":
        entries["n_inner"] = entries.pop("intermediate_size")
        entries |= {"layer_norm_epsilon": epsilon, "activation_function": gelu}
    else:
        entries |= {"layer_norm_eps": epsilon, "hidden_act": gelu}
    if kind == "qwen3_moe":
        entries["moe_intermediate_size"] = model.expert_ffn
        entries["norm_topk_prob"] = not model.pre_softmax
        entries["mlp_only_layers"] = list(range(model.dense))
    config = AutoConfig.for_model(
        kind,
        max_position_embeddings=model.sequence,
        tie_word_embeddings=model.tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **entries,
    )
    config.architectures = [architecture]
    return config.to_dict()
