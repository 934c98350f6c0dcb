"""Reads a Hugging Face config.json as a Model. Pure Python.

Invariant: Megatron builds the same model from the Model's flags; a file for which it would not is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_2bw.errors import UserError
from megatron_2bw.planner.describe.cluster import LARGEST
from megatron_2bw.planner.describe.model import LLAMA_LAYER, Model

SIZES = {  # of BERT and of the Llama-like ones
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "vocab": "vocab_size",
    "ffn": "intermediate_size",
}


def from_hugging_face(path: Path, sequence: int | None = None) -> Model:
    """The model that a Hugging Face config.json describes (GPT-2, BERT, Llama, Mistral, Qwen2).

    Raises UserError for what Megatron would build differently: other architectures, biases, activations, scalings of
    the rotary positions and windows of the attention.
    """
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"--model {path}: not a readable JSON file ({' '.join(str(error).split())})") from None
    kind = config.get("model_type") if isinstance(config, dict) else None
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        raise UserError(
            f"--model {path}: model_type {kind!r} is not supported; use {', '.join(_READERS)}, or give Megatron's flags"
        )
    try:
        return reader(_Entries(config), path.parent.name or str(path), sequence)
    except UserError as error:
        raise UserError(f"--model {path}: {error}") from None


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

    def one_of(self, name: str, *same: str) -> None:
        """UserError if the entry is present and none of `same`, with which Megatron's model is the same."""
        entry = self.config.get(name)
        if entry is not None and entry not in same:
            raise UserError(f"the entry {name!r} must be {' or '.join(same)}, which Megatron has, not {entry!r}")


def _from_gpt2(config: _Entries, name: str, sequence: int | None) -> Model:
    config.one_of("activation_function", "gelu_new", "gelu", "gelu_pytorch_tanh")
    return Model(
        name,
        *(config.count(entry) for entry in ("n_layer", "n_embd", "n_head", "vocab_size")),
        sequence=sequence or config.count("n_positions"),
        ffn=config.count("n_inner", 0),
        tied=config.flag("tie_word_embeddings", True),
        dropout=config.number("resid_pdrop", 0.1) > 0,
        norm_epsilon=config.number("layer_norm_epsilon", 1e-5),
    )


def _from_bert(config: _Entries, name: str, sequence: int | None) -> Model:
    config.one_of("hidden_act", "gelu")
    return Model(
        name,
        **config.sizes(),
        sequence=sequence or config.count("max_position_embeddings"),
        kind="bert",
        dropout=config.number("hidden_dropout_prob", 0.1) > 0,
        norm_epsilon=config.number("layer_norm_eps", 1e-12),
    )


def _from_llama(config: _Entries, name: str, sequence: int | None) -> Model:
    kind, sequence = config.config["model_type"], sequence or config.count("max_position_embeddings")
    config.one_of("hidden_act", "silu")
    for entry in ("attention_bias", "mlp_bias"):
        if config.flag(entry, False):
            raise UserError(f"{entry} is true; Megatron has no flag for biases in those layers alone")
    window = config.count("sliding_window", sequence)
    if window < sequence and config.flag("use_sliding_window", kind != "qwen2"):  # false is Qwen2's own default
        raise UserError(
            f"the entry 'sliding_window' is {window}, less than the sequence's {sequence} tokens, but Megatron attends "
            f"to the whole sequence; give --seq-length {window} or less"
        )
    base, scaled = _rope(config)
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
        norm_epsilon=config.number("rms_norm_eps", 1e-6),
        rope_scaling=scaled,
    )


# Megatron's scaling of rotary positions. Only the factor has a flag, and Megatron 0.19 ignores it.
SCALING = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}


def _rope(config: _Entries) -> tuple[int, bool]:
    """(base, whether scaled as in Llama 3.1) of the rotary positions; newer files have both in `rope_parameters`."""
    base, scaled = config.number("rope_theta", 10000), False
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.config.get(name) or {}
        if not isinstance(rope, dict):
            raise UserError(f"the entry {name!r} must be null or an object, not {rope!r}")
        base = _Entries(rope).number("rope_theta", base)
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind not in ("default", "llama3"):
            raise UserError(f"the entry {name!r} is of type {kind!r}; only default and llama3 are supported")
        scaled = scaled or kind == "llama3"
        for entry, number in SCALING.items() if kind == "llama3" else ():
            if (found := rope.get(entry)) != number:
                raise UserError(f"the entry '{name}.{entry}' must be {number}, as in Megatron, not {found!r}")
    if not float(base).is_integer():
        raise UserError(f"the entry 'rope_theta' must be a whole number, as for --rotary-base, not {base!r}")
    return int(base), scaled


_READERS = {"gpt2": _from_gpt2, "bert": _from_bert, "llama": _from_llama, "mistral": _from_llama, "qwen2": _from_llama}
