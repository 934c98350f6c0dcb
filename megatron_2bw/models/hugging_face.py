"""Reads a Hugging Face config.json as a Model. Pure Python.

Invariant: Megatron builds the same model from the Model's flags; a file for which it would not is refused: an entry has
another type than the one below, in which each entry has the values that Megatron has.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_2bw.errors import UserError
from megatron_2bw.models.model import LLAMA_LAYER, Model
from megatron_2bw.models.reading import Count, Positive, content, described

SIZES = {  # of BERT and of the Llama-like ones
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "vocab": "vocab_size",
    "ffn": "intermediate_size",
}
Gelu = Literal["gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast"]
Off, On = Literal[False], Literal[True]  # what Megatron has no flag for


@dataclass
class _Sizes:
    num_hidden_layers: Count
    hidden_size: Count
    num_attention_heads: Count
    vocab_size: Count
    intermediate_size: Count
    max_position_embeddings: Count

    def sizes(self) -> dict[str, int]:
        return {size: getattr(self, entry) for size, entry in SIZES.items()}


@dataclass
class _Gpt2:
    n_layer: Count
    n_embd: Count
    n_head: Count
    vocab_size: Count
    n_positions: Count
    n_inner: int = 0
    tie_word_embeddings: bool = True
    resid_pdrop: float = 0.1
    layer_norm_epsilon: Positive = 1e-5
    activation_function: Gelu = "gelu_new"
    scale_attn_weights: On = True
    scale_attn_by_inverse_layer_idx: Off = False
    reorder_and_upcast_attn: Off = False
    add_cross_attention: Off = False

    def model(self, name: str, sequence: int | None) -> Model:
        return Model(
            name,
            *(self.n_layer, self.n_embd, self.n_head, self.vocab_size),
            sequence=sequence or self.n_positions,
            ffn=self.n_inner,
            tied=self.tie_word_embeddings,
            dropout=self.resid_pdrop > 0,
            norm_epsilon=self.layer_norm_epsilon,
            gelu="exact" if self.activation_function == "gelu" else "tanh",
        )


@dataclass
class _Bert(_Sizes):
    hidden_act: Gelu = "gelu"
    tie_word_embeddings: bool = True
    hidden_dropout_prob: float = 0.1
    layer_norm_eps: Positive = 1e-12

    def model(self, name: str, sequence: int | None) -> Model:
        return Model(
            name,
            **self.sizes(),
            sequence=sequence or self.max_position_embeddings,
            kind="bert",
            tied=self.tie_word_embeddings,
            gelu="exact" if self.hidden_act == "gelu" else "tanh",
            dropout=self.hidden_dropout_prob > 0,
            norm_epsilon=self.layer_norm_eps,
        )


@dataclass
class _Rope:
    """The scaling of rotary positions. Of Llama 3's only the factor has a flag; older files say `type`."""

    rope_type: Literal["default", "llama3"] | None = None
    type: Literal["default", "llama3"] = "default"
    rope_theta: int = 0
    factor: float = 0.0
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    original_max_position_embeddings: int = 0

    def scaling(self) -> float:
        """The factor of Llama 3's scaling; 0 without it. UserError if the others are not Megatron's."""
        if (self.rope_type or self.type) == "default":
            return 0.0
        others = (self.low_freq_factor, self.high_freq_factor, self.original_max_position_embeddings)
        if others != (1, 4, 8192) or self.factor <= 0:
            raise UserError(
                "rope_scaling: Megatron has low_freq_factor 1, high_freq_factor 4, original_max_position_embeddings "
                f"8192 and a factor above 0, not {others} and {self.factor}"
            )
        return self.factor


@dataclass
class _Llama(_Sizes):
    model_type: str
    num_key_value_heads: int = 0
    head_dim: int = 0
    hidden_act: Literal["silu"] = "silu"
    attention_bias: Off = False
    mlp_bias: Off = False
    sliding_window: int = 0
    use_sliding_window: bool | None = None  # of Qwen, whose default is false
    tie_word_embeddings: bool = False
    rms_norm_eps: Positive = 1e-6
    partial_rotary_factor: float = 1.0
    rope_theta: int = 10000
    rope_scaling: _Rope = field(default_factory=_Rope)
    rope_parameters: _Rope = field(default_factory=_Rope)  # in newer files

    def model(self, name: str, sequence: int | None) -> Model:
        sequence = sequence or self.max_position_embeddings
        slides = self.model_type == "mistral" if self.use_sliding_window is None else self.use_sliding_window
        if slides and 0 < self.sliding_window < sequence:
            raise UserError(
                f"sliding_window: {self.sliding_window} is less than the sequence's {sequence} tokens, but Megatron "
                f"attends to the whole sequence; give --seq-length {self.sliding_window} or less"
            )
        if self.partial_rotary_factor != 1:
            raise UserError("partial_rotary_factor: it is not 1; Megatron's flags have no such model")
        factor = self.rope_scaling.scaling() or self.rope_parameters.scaling()
        return Model(
            name,
            **self.sizes(),
            **LLAMA_LAYER,
            sequence=sequence,
            groups=self.num_key_value_heads,
            head_size=self.head_dim,
            rotary_base=self.rope_parameters.rope_theta or self.rope_scaling.rope_theta or self.rope_theta,
            tied=self.tie_word_embeddings,
            qkv_bias=self.model_type == "qwen2",
            qk_norm=self.model_type == "qwen3",
            norm_epsilon=self.rms_norm_eps,
            rope_scaling=factor > 0,
            rope_factor=factor or 8.0,
        )


_KINDS = {"gpt2": _Gpt2, "bert": _Bert, "megatron-bert": _Bert} | dict.fromkeys(
    ("llama", "mistral", "qwen2", "qwen3"), _Llama
)


def _read(path: Path) -> Any:
    config = content("--model", path)
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind not in _KINDS:
        known = ", ".join(_KINDS)
        raise UserError(f"--model {path}: model_type {kind!r} is not one of {known}; use these, or Megatron's flags")
    given = {name: entry for name, entry in config.items() if entry is not None}
    return described(_KINDS[kind], given, f"--model {path}")


def from_hugging_face(path: Path, sequence: int | None = None) -> Model:
    """The model that a Hugging Face config.json describes (GPT-2, BERT, MegatronBert, Llama, Mistral, Qwen2, Qwen3).

    Raises UserError for what Megatron would build differently: other architectures, biases, activations, scalings of
    the rotary positions and windows of the attention.
    """
    found = _read(path)
    try:
        return found.model(path.parent.name or str(path), sequence)
    except UserError as error:
        raise UserError(f"--model {path}: {error}") from None


def rotary_positions(path: Path) -> int:
    """The longest sequence of a config.json with rotary positions; 0 for other models."""
    found = _read(path)
    return found.max_position_embeddings if isinstance(found, _Llama) else 0
