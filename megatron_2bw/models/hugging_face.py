"""Reads a Hugging Face config.json as a Model. Pure Python.

Invariant: Megatron builds the same model from the Model's flags; a file for which it would not is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_2bw.errors import UserError
from megatron_2bw.models.model import LLAMA_LAYER, Model
from megatron_2bw.models.reading import content, described

# Entries by field of a Model.
SIZES = {  # of BERT and of the Llama-like ones
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "vocab": "vocab_size",
    "ffn": "intermediate_size",
}
_SHARED = SIZES | {"sequence": "max_position_embeddings", "tied": "tie_word_embeddings"}
_BERT = _SHARED | {"norm_epsilon": "layer_norm_eps", "gelu": "hidden_act", "dropout": "hidden_dropout_prob"}
_LLAMA = _SHARED | {"groups": "num_key_value_heads", "head_size": "head_dim", "norm_epsilon": "rms_norm_eps"}
_GPT2 = dict(
    layers="n_layer", hidden="n_embd", heads="n_head", vocab="vocab_size", sequence="n_positions", ffn="n_inner"
)
_GPT2 |= dict(gelu="activation_function", dropout="resid_pdrop", tied="tie_word_embeddings")
_GPT2 |= dict(norm_epsilon="layer_norm_epsilon")
NEEDED = ("layers", "hidden", "heads", "vocab", "sequence")
# The entries of each kind, and what a missing one means.
_KINDS = {
    "gpt2": (_GPT2, dict(gelu="gelu_new")),
    **dict.fromkeys(("bert", "megatron-bert"), (_BERT, dict(gelu="gelu", kind="bert", norm_epsilon=1e-12))),
    **dict.fromkeys(("llama", "mistral", "qwen3"), (_LLAMA, dict(LLAMA_LAYER, tied=False, norm_epsilon=1e-6))),
    "qwen2": (_LLAMA, dict(LLAMA_LAYER, tied=False, norm_epsilon=1e-6, qkv_bias=True)),
}
GELUS = {"gelu": "exact", **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "tanh")}
# Entries of which Megatron has one value.
FIXED = {"attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 1, "scale_attn_weights": True}
FIXED |= dict.fromkeys(("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"), False)
# Megatron's scaling of rotary positions. Only the factor has a flag.
SCALING = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}


def from_hugging_face(path: Path, sequence: int | None = None) -> Model:
    """The model that a Hugging Face config.json describes (GPT-2, BERT, MegatronBert, Llama, Mistral, Qwen2, Qwen3).

    Raises UserError for what Megatron would build differently: other architectures, biases, activations, scalings of
    the rotary positions and windows of the attention.
    """
    kind, config = _read(path)
    where, (names, meant) = f"--model {path}", _KINDS[kind]
    missing = [names[field] for field in NEEDED if names[field] not in config]
    if missing:
        raise UserError(f"{where}: the entry {missing[0]} is missing")
    found = meant | {field: config[entry] for field, entry in names.items() if entry in config}
    found |= {"name": path.parent.name or str(path), "sequence": sequence or found["sequence"]}
    _check(config, where, found["sequence"], "gelu" in meant)
    if "gelu" in meant:
        found |= {"gelu": GELUS[found["gelu"]], "dropout": bool(found.get("dropout", True))}
    else:
        found |= {"qk_norm": kind == "qwen3"} | _rotary(config, where)
    return described(Model, found, where, names | {"rotary_base": "rope_theta", "rope_factor": "rope_scaling.factor"})


def rotary_positions(path: Path) -> int:
    """The longest sequence of a config.json with rotary positions; 0 for other models."""
    kind, config = _read(path)
    return config.get("max_position_embeddings", 0) if _KINDS[kind][0] is _LLAMA else 0


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    """The model's kind, and the entries that are not null."""
    config = content("--model", path)
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind not in _KINDS:
        known = ", ".join(_KINDS)
        raise UserError(f"--model {path}: model_type {kind!r} is not one of {known}; use these, or Megatron's flags")
    return kind, {name: entry for name, entry in config.items() if entry is not None}


def _check(config: dict[str, Any], where: str, sequence: int, gelu: bool) -> None:
    """UserError for entries with which Megatron's model is another."""
    fixed = [(name, (value,)) for name, value in FIXED.items()]
    fixed += [(name, tuple(GELUS) if gelu else ("silu",)) for name in ("hidden_act", "activation_function")]
    for name, values in fixed:
        if config.get(name, values[0]) not in values:
            known = " or ".join(map(str, values))
            raise UserError(f"{where}: {name} must be {known}, which Megatron has, not {config[name]!r}")
    window = config.get("sliding_window", sequence)
    if window < sequence and config.get("use_sliding_window", config["model_type"] == "mistral"):
        raise UserError(
            f"{where}: sliding_window is {window}, less than the sequence's {sequence} tokens, but Megatron attends to "
            f"the whole sequence; give --seq-length {window} or less"
        )


def _rotary(config: dict[str, Any], where: str) -> dict[str, Any]:
    """Base and scaling of the rotary positions; newer files have `rope_parameters`."""
    ropes = [config.get(name) or {} for name in ("rope_scaling", "rope_parameters")]
    given = ropes[0] | ropes[1]
    found = {"rotary_base": given.get("rope_theta") or config.get("rope_theta", 10000)}
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind == "default":
        return found
    if kind != "llama3" or any(given.get(name) != value for name, value in SCALING.items()) or not given.get("factor"):
        wanted = ", ".join(f"{name} {value}" for name, value in SCALING.items())
        raise UserError(f"{where}: rope_scaling: Megatron has type llama3 with {wanted} and a factor, not {given}")
    return found | {"rope_scaling": True, "rope_factor": given["factor"]}
