"""A transformer's dimensions, its parameters by place, and Megatron's flags for it.
Pure Python.

Invariant: the counts equal those of the modules that Megatron builds from `flags()`,
with biases and norms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_2bw.base.errors import UserError
from megatron_2bw.tools.planner.descriptions.reading import (
    Count,
    Described,
    named,
    presets,
)


@dataclass(frozen=True)
class Model(Described):
    """A GPT, BERT or Llama-like model, dense or a mixture of experts. Sizes are in
    elements, as in Megatron's flags (ARGUMENTS)."""

    name: str
    layers: Count
    hidden: Count
    heads: Count
    vocab: Count = 50257  # tokens of the tokenizer, before Megatron pads them
    sequence: Count = 1024  # tokens of a sample
    kind: str = "gpt"  # or bert
    ffn: int = 0  # 0: 4 x hidden
    groups: int = 0  # of queries (grouped-query attention); 0: as many as heads
    head_size: int = 0  # 0: hidden / heads
    gated: bool = False  # SwiGLU: the first linear layer of the MLP is twice as wide
    rms_norm: bool = False
    rotary: bool = False
    rotary_base: int = 10000
    tied: bool = True  # the output layer is the embedding
    bias: bool = True
    qkv_bias: bool = False
    dropout: bool = True  # whether dropout masks are kept
    norm_epsilon: float = 1e-5
    rope_scaling: bool = False  # rotary positions as in Llama 3.1
    rope_factor: float = 8.0  # of that scaling
    qk_norm: bool = False  # a norm of each head's query and key
    adapter_rank: int = 0  # of --lora-rank; 0: all parameters are trained
    experts: int = 0  # of each layer; 0: dense layers
    topk: int = 2  # experts of a token
    expert_ffn: int = 0  # of one expert; 0: ffn
    shared_ffn: int = 0  # of the expert that all tokens have; 0: none
    dense: int = 0  # first layers without experts
    # a token's experts have the shares of a softmax over all of them
    pre_softmax: bool = False
    aux_loss: float = 0.0  # coefficient of the loss that balances the experts
    # of keys and values in multi-latent attention, whose values have head_size; 0:
    # other attention
    latent: int = 0
    rotary_head: int = 0  # of the part of a head's query and key with positions, there
    # its form if it matters: "exact" or "tanh"; else what is faster on the host
    gelu: str = ""

    def __post_init__(self) -> None:
        if not self.head_size and self.hidden % self.heads:
            raise UserError(
                f"--hidden-size {self.hidden} is not a multiple of "
                f"--num-attention-heads {self.heads}; "
                "give --kv-channels if heads are meant to have another size"
            )
        defaults = {
            "ffn": 4 * self.hidden,
            "groups": self.heads,
            "head_size": self.hidden // self.heads,
        }
        for name, default in defaults.items():
            object.__setattr__(self, name, getattr(self, name) or default)
        if self.experts:
            object.__setattr__(self, "expert_ffn", self.expert_ffn or self.ffn)
        if self.heads % self.groups:
            raise UserError(
                f"--num-attention-heads {self.heads} is not a multiple of "
                f"--num-query-groups {self.groups}"
            )

    @property
    def query_size(self) -> int:
        return self.heads * self.head_size

    @property
    def key_size(self) -> int:
        """Elements of one token's keys; the values' are as many."""
        return self.groups * self.head_size

    @cached_property
    def without_experts(self) -> Model:
        """The model whose layers are all as its first `dense` ones."""
        return replace(self, experts=0, dense=0)

    def layer_parameters(self, tensor: int = 1, expert: int = 1) -> float:
        """Parameters of one layer (of a mixture: with experts) on one of `tensor`
        ranks, with one of `expert` parts of the experts: matrices and their biases
        divided by the tensor ranks, norms whole."""
        count = _products(self.matrix_sides(tensor)) + self._norms(2)
        if self.latent:
            count += self.latent * (1 if self.rms_norm else 2) * self.qk_norm
        elif self.qk_norm:
            count += 2 * self.head_size * (1 if self.rms_norm else 2)
        if self.bias or self.qkv_bias:
            count += (self.query_size + 2 * self.key_size) / tensor
        if self.bias:  # whole ones of the row-parallel layers
            mlp = self.experts or self._mlp_biases(self.ffn, tensor)
            count += self.hidden + mlp
        return count + self.expert_parameters(tensor, expert)

    def expert_parameters(self, tensor: int = 1, expert: int = 1) -> float:
        """Parameters of the experts in a layer; 0 without experts."""
        each = _products(self.expert_sides(tensor))
        each += self._mlp_biases(self.expert_ffn, tensor) if self.bias else 0
        return self.experts / expert * each

    def _mlp_biases(self, ffn: int, tensor: int) -> float:
        return ffn * (2 if self.gated else 1) / tensor + self.hidden

    def adapter_parameters(self, tensor: int = 1) -> float:
        """Parameters of one layer's adapters on one of `tensor` ranks."""
        # without the router
        sides = self.matrix_sides(tensor)[: -1 if self.experts else None]
        return self.adapter_rank * sum(inputs + outputs for inputs, outputs in sides)

    def _norms(self, count: int) -> int:
        return count * self.hidden * (1 if self.rms_norm else 2)

    def padded_vocab(self, tensor: int = 1) -> int:
        """The vocabulary with Megatron's padding to a multiple of 128 for each tensor
        rank."""
        return -(-self.vocab // (128 * tensor)) * 128 * tensor

    def embedding_parameters(self, tensor: int = 1) -> float:
        """Parameters of the embedding (words, learned positions, BERT's token types) on
        one of `tensor` ranks."""
        positions = 0 if self.rotary else self.sequence * self.hidden
        types = 2 * self.hidden if self.kind == "bert" else 0
        return self.padded_vocab(tensor) * self.hidden / tensor + positions + types

    def output_parameters(self, tensor: int = 1) -> float:
        """Parameters after the last layer on one of `tensor` ranks, a copy of tied
        words included."""
        words = self.padded_vocab(tensor) * self.hidden / tensor
        # dense layer, norm and bias of the language-model head; pooler and binary head
        if self.kind == "bert":
            extra = (
                2 * (self.hidden * self.hidden + self.hidden)
                + self._norms(1)
                + self.padded_vocab(tensor) / tensor
            )
            return words + extra + 2 * self.hidden + 2 + self._norms(1)
        return words + self._norms(1)

    def parameters(self) -> float:
        """All parameters, tied words once."""
        twice = self.padded_vocab() * self.hidden if self.tied else 0
        each = self.layer_parameters()
        first = self.without_experts.layer_parameters()
        layers = self.dense * first + (self.layers - self.dense) * each
        return layers + self.embedding_parameters() + self.output_parameters() - twice

    def layer_flops(self, microbatch: float, tensor: int = 1) -> tuple[float, float]:
        """(matrices, attention scores) of one layer's forward on `microbatch` samples,
        on one of `tensor` ranks.

        The scores are counted whole, without a mask.
        """
        tokens = microbatch * self.sequence
        routed = self.topk * _products(self.expert_sides(tensor))
        each = _products(self.matrix_sides(tensor)) + routed
        scores = 2 * self.query_size + self.heads * self.rotary_head
        return 2 * tokens * each, 2 * tokens * self.sequence * scores / tensor

    def matrix_sides(self, tensor: int = 1) -> list[tuple[float, float]]:
        """(inputs, outputs) of the matrix products of all tokens in one layer, on one
        of `tensor` ranks; in a mixture with the shared expert, and the router last."""
        sides = [
            (self.hidden, (self.query_size + 2 * self.key_size) / tensor),
            (self.query_size / tensor, self.hidden),
        ]
        if self.latent:
            queries = self.heads * (self.head_size + self.rotary_head)
            both = 2 * self.query_size
            down = (self.hidden, self.latent + self.rotary_head)
            sides[:1] = [
                (self.hidden, queries / tensor),
                down,
                (self.latent, both / tensor),
            ]
        return sides + self.mlp_sides(tensor)

    def mlp_sides(self, tensor: int = 1) -> list[tuple[float, float]]:
        """Inputs and outputs of the products of `matrix_sides` that are the MLP's."""
        if not self.experts:
            return self._mlp_sides(self.ffn, tensor)
        shared = self._mlp_sides(self.shared_ffn, tensor) if self.shared_ffn else []
        return [*shared, (self.hidden, self.experts)]

    def expert_sides(self, tensor: int = 1) -> list[tuple[float, float]]:
        """Inputs and outputs of one expert's products, each with a part of the
        tokens."""
        return self._mlp_sides(self.expert_ffn, tensor) if self.experts else []

    def _mlp_sides(self, ffn: int, tensor: int) -> list[tuple[float, float]]:
        return [
            (self.hidden, ffn * (2 if self.gated else 1) / tensor),
            (ffn / tensor, self.hidden),
        ]

    def output_flops(self, microbatch: float, tensor: int = 1) -> float:
        """Forward of the output layer (and BERT's head before it) on one of `tensor`
        ranks."""
        tokens = microbatch * self.sequence
        head = 0
        if self.kind == "bert":
            head = 2 * tokens * self.hidden * self.hidden
        words = 2 * tokens * self.hidden * self.padded_vocab(tensor)
        return words / tensor + head

    def sample_flops(self) -> float:
        """Floating-point operations of one sample, forward and backward, without
        recompute. As Megatron's own figure (num_floating_point_operations) it has half
        of the attention scores, as with a causal mask. With adapters no gradient of the
        weights."""
        matrices, scores = self.layer_flops(1)
        weights = self.layers * matrices + self.output_flops(1)
        parts = 2 if self.adapter_rank else 3
        plain, _ = self.without_experts.layer_flops(1)
        weights += self.dense * (plain - matrices)
        return parts * weights + 3 * self.layers * scores / 2

    def flags(self) -> list[str]:
        """Megatron's flags of the architecture."""
        return command_line(
            (
                True,
                f"--num-layers {self.layers} --hidden-size {self.hidden} "
                f"--num-attention-heads {self.heads} --seq-length {self.sequence} "
                f"--max-position-embeddings {self.sequence}",
            ),
            # With --swiglu Megatron's default is not 4 x hidden.
            (
                self.gated or self.ffn != 4 * self.hidden,
                f"--ffn-hidden-size {self.ffn}",
            ),
            (
                self.head_size * self.heads != self.hidden,
                f"--kv-channels {self.head_size}",
            ),
            (
                self.groups != self.heads,
                f"--group-query-attention --num-query-groups {self.groups}",
            ),
            (self.rms_norm, "--normalization RMSNorm"),
            (self.norm_epsilon != 1e-5, f"--norm-epsilon {self.norm_epsilon}"),
            (
                self.rotary,
                f"--position-embedding-type rope --rotary-base {self.rotary_base}",
            ),
            *(
                (getattr(self, field) is value, flag(argument))
                for field, (argument, value) in SWITCHES.items()
            ),
            (
                self.rope_scaling and self.rope_factor != 8,
                f"--rope-scaling-factor {self.rope_factor:g}",
            ),
            (self.gelu == "tanh", "--openai-gelu"),
            (self.gelu == "exact", "--no-bias-gelu-fusion"),
            (not self.dropout, "--attention-dropout 0 --hidden-dropout 0"),
            (self.adapter_rank, f"--lora-rank {self.adapter_rank}"),
            (
                self.latent,
                f"--multi-latent-attention --rope-type rope --kv-lora-rank {self.latent} "
                f"--qk-head-dim {self.head_size} --v-head-dim {self.head_size} "
                f"--qk-pos-emb-head-dim {self.rotary_head}",
            ),
            (
                self.experts,
                f"--num-experts {self.experts} --moe-router-topk {self.topk} "
                f"--moe-ffn-hidden-size {self.expert_ffn} --moe-token-dispatcher-type alltoall",
            ),
            (
                self.shared_ffn,
                f"--moe-shared-expert-intermediate-size {self.shared_ffn}",
            ),
            (
                self.dense,
                f"--moe-layer-freq [0]*{self.dense}+[1]*{self.layers - self.dense}",
            ),
            (
                self.aux_loss,
                f"--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff {self.aux_loss:g}",
            ),
        )


def _products(sides: list[tuple[float, float]]) -> float:
    return sum(map(math.prod, sides))


def flag(argument: str) -> str:
    """The flag of an argument's name."""
    return "--" + argument.replace("_", "-")


def command_line(*rows: tuple[object, str]) -> list[str]:
    """The words of the rows whose condition holds; no word contains a blank."""
    return " ".join(words for condition, words in rows if condition).split()


# Megatron's arguments by field, and the flags of the sizes among them.
_SIZES = {
    "layers": "num_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "sequence": "seq_length",
    "vocab": "vocab_size",
    "ffn": "ffn_hidden_size",
    "groups": "num_query_groups",
    "head_size": "kv_channels",
}
FLAGS = {}
for _field, _argument in _SIZES.items():
    FLAGS[_field] = flag(_argument)
ARGUMENTS = _SIZES | {
    "gated": "swiglu",
    "bias": "add_bias_linear",
    "experts": "num_experts",
    "topk": "moe_router_topk",
    "expert_ffn": "moe_ffn_hidden_size",
    "shared_ffn": "moe_shared_expert_intermediate_size",
}
# The flags without a value, and what each means.
SWITCHES = {
    "gated": ("swiglu", True),
    "rope_scaling": ("use_rope_scaling", True),
    "qk_norm": ("qk_layernorm", True),
    "qkv_bias": ("add_qkv_bias", True),
    "tied": ("untie_embeddings_and_output_weights", False),
    "bias": ("disable_bias_linear", False),
    "pre_softmax": ("moe_router_pre_softmax", True),
}

_DATA = presets("models.toml")
LLAMA_LAYER = _DATA["shared"]["llama_layer"]
PRESETS = {}
for _name, _entry in _DATA["models"].items():
    PRESETS[_name] = Model(_name, **_entry)


def preset(name: str, sequence: int | None = None) -> Model:
    """A preset, with another sequence length if given."""
    model = named(PRESETS, name, "--model")
    return replace(model, sequence=sequence) if sequence else model
