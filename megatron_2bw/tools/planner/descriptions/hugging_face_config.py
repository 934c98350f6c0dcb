"""Reads a Hugging Face config.json as a Model; transformers fills in what the file
leaves out.

Invariant: Megatron builds the same model from the Model's flags; a file for which it
would not is refused.
"""

from pathlib import Path
from typing import Any

from megatron_2bw.base.errors import UserError
from megatron_2bw.base.files import read_yaml
from megatron_2bw.tools.planner.descriptions.model import LLAMA_LAYER, Model
from megatron_2bw.tools.planner.descriptions.reading import described

# Entries by field of a Model, of BERT and of the Llama-like ones.
SIZES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
}
SIZES |= {"vocab": "vocab_size", "ffn": "intermediate_size"}
LLAMAS = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
KINDS = ("gpt2", "bert", "megatron-bert", *LLAMAS)
GELUS = {
    "gelu": "exact",
    "gelu_new": "tanh",
    "gelu_pytorch_tanh": "tanh",
    "gelu_fast": "tanh",
}
# Entries of which Megatron has one value.
OFF = (
    "attention_bias",
    "mlp_bias",
    "scale_attn_by_inverse_layer_idx",
    "add_cross_attention",
)
FIXED = {"scale_attn_weights": (True,)} | dict.fromkeys(OFF, (False,))
# Megatron's scaling of rotary positions. Only the factor has a flag.
SCALING = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Tokens of a sequence, unless it is given. Rotary positions allow 32,768 to 131,072,
# but most of a pretraining has shorter sequences: 4,096 for Llama 2 and Qwen3, 8,192
# for Llama 3.
LONGEST = 4096


def from_hugging_face(path: Path, sequence: int | None = None) -> Model:
    """The model that a Hugging Face config.json describes (GPT-2, BERT, MegatronBert,
    Llama, Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE).

    sequence: by default the learned positions; of rotary ones at most LONGEST Raises
    UserError for what Megatron would build differently: other architectures, biases,
    activations, scalings of the rotary positions and windows of the attention.
    """
    where = f"--model {path}"
    config = _read(path)
    kind = config.model_type
    llama = config.model_type in LLAMAS
    positions = config.max_position_embeddings
    found = {field: getattr(config, entry, None) for field, entry in SIZES.items()}
    found |= {"name": path.parent.name or str(path), "tied": config.tie_word_embeddings}
    found["sequence"] = sequence or (min(positions, LONGEST) if llama else positions)
    _check(config, where, found["sequence"])
    if llama:
        found |= LLAMA_LAYER | _rotary(config, where) | _experts(config, where)
        found |= {"qkv_bias": kind == "qwen2", "qk_norm": kind.startswith("qwen3")}
        found |= {
            "groups": config.num_key_value_heads,
            "head_size": getattr(config, "head_dim", None) or 0,
        }
        found["norm_epsilon"] = config.rms_norm_eps
    elif kind == "gpt2":
        found |= {"ffn": config.n_inner or 0, "gelu": GELUS[config.activation_function]}
        found |= {
            "norm_epsilon": config.layer_norm_epsilon,
            "dropout": bool(config.resid_pdrop),
        }
    else:
        found |= {
            "kind": "bert",
            "gelu": GELUS[config.hidden_act],
            "norm_epsilon": config.layer_norm_eps,
        }
        found["dropout"] = bool(config.hidden_dropout_prob)
    return described(Model, found, where)


def _read(path: Path) -> Any:
    """transformers' configuration of the file."""
    entries = read_yaml(path, "--model")
    kind = entries.get("model_type") if isinstance(entries, dict) else None
    if kind not in KINDS:
        known = ", ".join(KINDS)
        raise UserError(
            f"--model {path}: model_type {kind!r} is not one of {known}; use "
            "these, or Megatron's flags"
        )
    from transformers import AutoConfig  # takes seconds

    return AutoConfig.for_model(**entries)


def _check(config: Any, where: str, sequence: int) -> None:
    """UserError for entries with which Megatron's model is another."""
    gelus = ("silu",) if config.model_type in LLAMAS else tuple(GELUS)
    for name, values in (
        FIXED | {"hidden_act": gelus, "activation_function": gelus}
    ).items():
        if getattr(config, name, values[0]) not in values:
            known = " or ".join(map(str, values))
            raise UserError(
                f"{where}: {name} must be {known}, which Megatron has, not "
                f"{getattr(config, name)!r}"
            )
    window = getattr(config, "sliding_window", None) or sequence
    if window < sequence and getattr(config, "use_sliding_window", True):
        raise UserError(
            f"{where}: sliding_window {window} is below the sequence: give "
            f"--seq-length {window} or less"
        )


def _experts(config: Any, where: str) -> dict[str, Any]:
    """Sizes and routing of a mixture's experts."""
    if config.model_type not in ("mixtral", "qwen3_moe"):
        return {}
    found = {"experts": config.num_local_experts, "topk": config.num_experts_per_tok}
    found["aux_loss"] = config.router_aux_loss_coef
    if config.model_type == "mixtral":
        return found
    first = len(config.mlp_only_layers)
    if config.decoder_sparse_step != 1 or sorted(config.mlp_only_layers) != [
        *range(first)
    ]:
        raise UserError(
            f"{where}: mlp_only_layers, decoder_sparse_step: only the first "
            "layers may have no experts"
        )
    found |= {"expert_ffn": config.moe_intermediate_size, "dense": first}
    return found | {"pre_softmax": not config.norm_topk_prob}


def _rotary(config: Any, where: str) -> dict[str, Any]:
    """Base and scaling of the rotary positions."""
    given = {"partial_rotary_factor": 1} | config.rope_parameters
    found = {"rotary_base": given["rope_theta"]}
    if given["partial_rotary_factor"] != 1:
        raise UserError(f"{where}: partial_rotary_factor must be 1, which Megatron has")
    if given["rope_type"] == "default":
        return found
    if given["rope_type"] != "llama3" or any(
        given.get(name) != value for name, value in SCALING.items()
    ):
        wanted = ", ".join(f"{name} {value}" for name, value in SCALING.items())
        raise UserError(
            f"{where}: rope_scaling: Megatron has type llama3 with {wanted}, not {given}"
        )
    return found | {"rope_scaling": True, "rope_factor": given["factor"]}
