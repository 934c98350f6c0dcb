"""Reads a Hugging Face config.json as a Model. Pure Python.

Invariant: Megatron builds the same model from the Model's flags; a file for which it would not is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_2bw.errors import UserError
from megatron_2bw.models.cluster import LARGEST
from megatron_2bw.models.model import LLAMA_LAYER, Model

GELUS = {"gelu": "exact", **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "tanh")}
SIZES = {  # of BERT and of the Llama-like ones
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "vocab": "vocab_size",
    "ffn": "intermediate_size",
}


def from_hugging_face(path: Path, sequence: int | None = None) -> Model:
    """The model that a Hugging Face config.json describes (GPT-2, BERT, MegatronBert, Llama, Mistral, Qwen2, Qwen3).

    Raises UserError for what Megatron would build differently: other architectures, biases, activations, scalings of
    the rotary positions and windows of the attention.
    """
    config = _read(path)
    kind = config.get("model_type")
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        remedy = f"use {', '.join(_READERS)}, or give Megatron's flags"
        raise UserError(f"--model {path}: model_type {kind!r} is not supported; {remedy}")
    try:
        return reader(_Entries(config), path.parent.name or str(path), sequence)
    except UserError as error:
        raise UserError(f"--model {path}: {error}") from None


def rotary_positions(path: Path) -> int:
    """The longest sequence of a config.json with rotary positions; 0 for other models."""
    config = _read(path)
    llama = _READERS.get(str(config.get("model_type"))) is _from_llama
    return _Entries(config).count("max_position_embeddings", 0) if llama else 0


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"--model {path}: not a readable JSON file ({' '.join(str(error).split())})") from None
    return config if isinstance(config, dict) else {}


class _Entries:
    """The entries of a configuration. Each read checks its entry."""

    def __init__(self, config: dict[str, Any]):
        self.config = config

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number; `default` if the entry is missing or null."""
        entry = self._read(name, default, "a whole number", int)
        if entry is None:
            raise UserError(f"the entry {name!r} is missing")
        return entry

    def sizes(self) -> dict[str, int]:
        return {field: self.count(entry) for field, entry in SIZES.items()}

    def flag(self, name: str, default: bool) -> bool:
        return self._read(name, default, "true or false", bool)

    def number(self, name: str, default: float) -> float:
        return self._read(name, default, "a number", int, float)

    def _read(self, name: str, default: Any, what: str, *types: type) -> Any:
        entry = self.config.get(name)
        large = type(entry) in (int, float) and not abs(entry) < LARGEST
        if large or entry is not None and type(entry) not in types:  # a bool is no number
            raise UserError(f"the entry {name!r} must be {what}, not {entry!r}")
        return default if entry is None else entry

    def off(self, *names: str) -> None:
        for name in names:
            if self.flag(name, False):
                raise UserError(f"{name} is true; Megatron has no flag for that")

    def gelu(self, name: str, default: str) -> str:
        """Its form, "exact" or "tanh"."""
        kind = self.config.get(name) or default
        if kind not in GELUS:
            raise UserError(f"the entry {name!r} must be {' or '.join(GELUS)}, which Megatron has, not {kind!r}")
        return GELUS[kind]

    def one_of(self, name: str, *same: str) -> None:
        """UserError if the entry is present and none of `same`, with which Megatron's model is the same."""
        entry = self.config.get(name)
        if entry is not None and entry not in same:
            raise UserError(f"the entry {name!r} must be {' or '.join(same)}, which Megatron has, not {entry!r}")


def _from_gpt2(config: _Entries, name: str, sequence: int | None) -> Model:
    config.off("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention")
    if not config.flag("scale_attn_weights", True):
        raise UserError("scale_attn_weights is false; Megatron always scales the scores by the head's size")
    return Model(
        name,
        *(config.count(entry) for entry in ("n_layer", "n_embd", "n_head", "vocab_size")),
        sequence=sequence or config.count("n_positions"),
        ffn=config.count("n_inner", 0),
        tied=config.flag("tie_word_embeddings", True),
        dropout=config.number("resid_pdrop", 0.1) > 0,
        norm_epsilon=config.number("layer_norm_epsilon", 1e-5),
        gelu=config.gelu("activation_function", "gelu_new"),
    )


def _from_bert(config: _Entries, name: str, sequence: int | None) -> Model:
    return Model(
        name,
        **config.sizes(),
        sequence=sequence or config.count("max_position_embeddings"),
        kind="bert",
        tied=config.flag("tie_word_embeddings", True),
        gelu=config.gelu("hidden_act", "gelu"),
        dropout=config.number("hidden_dropout_prob", 0.1) > 0,
        norm_epsilon=config.number("layer_norm_eps", 1e-12),
    )


def _from_llama(config: _Entries, name: str, sequence: int | None) -> Model:
    kind, sequence = config.config["model_type"], sequence or config.count("max_position_embeddings")
    config.one_of("hidden_act", "silu")
    config.off("attention_bias", "mlp_bias")
    window = config.count("sliding_window", sequence)
    if window < sequence and config.flag("use_sliding_window", kind == "mistral"):  # false is Qwen's own default
        raise UserError(
            f"the entry 'sliding_window' is {window}, less than the sequence's {sequence} tokens, but Megatron attends "
            f"to the whole sequence; give --seq-length {window} or less"
        )
    base, factor = _rope(config)
    return Model(
        name,
        **config.sizes(),
        **LLAMA_LAYER,
        sequence=sequence,
        groups=config.count("num_key_value_heads", 0),
        head_size=config.count("head_dim", 0),
        rotary_base=base,
        tied=config.flag("tie_word_embeddings", False),
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        norm_epsilon=config.number("rms_norm_eps", 1e-6),
        rope_scaling=factor > 0,
        rope_factor=factor or 8.0,
    )


# Megatron's scaling of rotary positions. Only the factor has a flag.
SCALING = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}


def _rope(config: _Entries) -> tuple[int, float]:
    """(base, the factor of Llama 3's scaling or 0) of the rotary positions; newer files have `rope_parameters`."""
    base, factor = config.number("rope_theta", 10000), 0.0
    if config.number("partial_rotary_factor", 1) != 1:
        raise UserError("partial_rotary_factor is not 1: such a model is not supported")
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.config.get(name) or {}
        if not isinstance(rope, dict):
            raise UserError(f"the entry {name!r} must be null or an object, not {rope!r}")
        base = _Entries(rope).number("rope_theta", base)
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind not in ("default", "llama3"):
            raise UserError(f"the entry {name!r} is of type {kind!r}; only default and llama3 are supported")
        if kind == "llama3":
            factor = _Entries(rope).number("factor", 0)
            if factor <= 0:
                raise UserError(f"the entry '{name}.factor' must be positive, not {rope.get('factor')!r}")
        for entry, number in SCALING.items() if kind == "llama3" else ():
            if (found := rope.get(entry)) != number:
                raise UserError(f"the entry '{name}.{entry}' must be {number}, as in Megatron, not {found!r}")
    if not float(base).is_integer():
        raise UserError(f"the entry 'rope_theta' must be a whole number, as for --rotary-base, not {base!r}")
    return int(base), factor


_READERS = {
    "gpt2": _from_gpt2,
    "bert": _from_bert,
    "megatron-bert": _from_bert,
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _from_llama),
}
