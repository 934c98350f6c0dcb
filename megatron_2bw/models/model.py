"""A transformer's dimensions, its parameters by place, and Megatron's flags for it. Pure Python.

Invariant: the counts equal those of the modules that Megatron builds from `flags()`, with biases and norms.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_2bw.errors import UserError, did_you_mean
from megatron_2bw.models.reading import Count, Described


@dataclass(frozen=True)
class Model(Described):
    """A GPT, BERT or Llama-like model. Sizes are in elements, as in Megatron's flags (ARGUMENTS)."""

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
    gelu: str = ""  # its form if it matters: "exact" or "tanh"; else what is faster on the host

    def __post_init__(self) -> None:
        if not self.head_size and self.hidden % self.heads:
            raise UserError(
                f"--hidden-size {self.hidden} is not a multiple of --num-attention-heads {self.heads}; "
                "give --kv-channels if heads are meant to have another size"
            )
        defaults = {"ffn": 4 * self.hidden, "groups": self.heads, "head_size": self.hidden // self.heads}
        for name, default in defaults.items():
            object.__setattr__(self, name, getattr(self, name) or default)
        if self.heads % self.groups:
            raise UserError(f"--num-attention-heads {self.heads} is not a multiple of --num-query-groups {self.groups}")

    @property
    def query_size(self) -> int:
        return self.heads * self.head_size

    @property
    def key_size(self) -> int:
        """Elements of one token's keys; the values' are as many."""
        return self.groups * self.head_size

    def matrix_parameters(self) -> int:
        """Weights of one layer's matrices, which tensor parallelism divides."""
        return self.hidden * (2 * self.query_size + 2 * self.key_size) + self.mlp_parameters()

    def mlp_parameters(self) -> int:
        """Weights of one layer's MLP."""
        return self.hidden * self.ffn * (3 if self.gated else 2)

    def layer_parameters(self, tensor: int = 1) -> float:
        """Parameters of one layer on one of `tensor` ranks: matrices and their biases divided, norms whole."""
        sharded, whole = self.matrix_parameters(), self._norms(2)
        if self.qk_norm:
            whole += 2 * self.head_size * (1 if self.rms_norm else 2)
        if self.bias or self.qkv_bias:
            sharded += self.query_size + 2 * self.key_size
        if self.bias:
            sharded += self.ffn * (2 if self.gated else 1)
            whole += 2 * self.hidden  # of the two row-parallel layers
        return sharded / tensor + whole

    def adapter_parameters(self, tensor: int = 1) -> float:
        """Parameters of one layer's adapters on one of `tensor` ranks."""
        return self.adapter_rank * sum(inputs + outputs for inputs, outputs in self.matrix_sides(tensor))

    def trained_parameters(self) -> float:
        return self.layers * self.adapter_parameters() if self.adapter_rank else self.parameters()

    def _norms(self, count: int) -> int:
        return count * self.hidden * (1 if self.rms_norm else 2)

    def padded_vocab(self, tensor: int = 1) -> int:
        """The vocabulary with Megatron's padding to a multiple of 128 for each tensor rank."""
        return -(-self.vocab // (128 * tensor)) * 128 * tensor

    def embedding_parameters(self, tensor: int = 1) -> float:
        """Parameters of the embedding (words, learned positions, BERT's token types) on one of `tensor` ranks."""
        positions = 0 if self.rotary else self.sequence * self.hidden
        types = 2 * self.hidden if self.kind == "bert" else 0
        return self.padded_vocab(tensor) * self.hidden / tensor + positions + types

    def output_parameters(self, tensor: int = 1) -> float:
        """Parameters after the last layer on one of `tensor` ranks, a copy of tied words included."""
        words = self.padded_vocab(tensor) * self.hidden / tensor
        if self.kind == "bert":  # dense layer, norm and bias of the language-model head; pooler and binary head
            extra = 2 * (self.hidden * self.hidden + self.hidden) + self._norms(1) + self.padded_vocab(tensor) / tensor
            return words + extra + 2 * self.hidden + 2 + self._norms(1)
        return words + self._norms(1)

    def parameters(self) -> float:
        """All parameters, tied words once."""
        twice = self.padded_vocab() * self.hidden if self.tied else 0
        return self.layers * self.layer_parameters() + self.embedding_parameters() + self.output_parameters() - twice

    def layer_flops(self, microbatch: float, tensor: int = 1) -> tuple[float, float]:
        """(matrices, attention scores) of one layer's forward on `microbatch` samples, on one of `tensor` ranks.

        The scores are counted whole, without a mask.
        """
        tokens = microbatch * self.sequence
        return (2 * tokens * self.matrix_parameters() / tensor, 4 * tokens * self.sequence * self.query_size / tensor)

    def matrix_sides(self, tensor: int = 1) -> list[tuple[float, float]]:
        """(inputs, outputs) of one layer's four matrix products on one of `tensor` ranks."""
        return [
            (self.hidden, (self.query_size + 2 * self.key_size) / tensor),
            (self.query_size / tensor, self.hidden),
            (self.hidden, self.ffn * (2 if self.gated else 1) / tensor),
            (self.ffn / tensor, self.hidden),
        ]

    def output_flops(self, microbatch: float, tensor: int = 1) -> float:
        """Forward of the output layer (and BERT's head before it) on one of `tensor` ranks."""
        tokens = microbatch * self.sequence
        head = 2 * tokens * self.hidden * self.hidden if self.kind == "bert" else 0
        return 2 * tokens * self.hidden * self.padded_vocab(tensor) / tensor + head

    def sample_flops(self) -> float:
        """Floating-point operations of one sample, forward and backward, without recompute. As Megatron's own figure
        (num_floating_point_operations) it has half of the attention scores, as with a causal mask. With adapters no
        gradient of the weights."""
        matrices, scores = self.layer_flops(1)
        weights, parts = self.layers * matrices + self.output_flops(1), 2 if self.adapter_rank else 3
        return parts * weights + 3 * self.layers * scores / 2

    def flags(self) -> list[str]:
        """Megatron's flags of the architecture."""
        return command_line(
            (True, f"--num-layers {self.layers} --hidden-size {self.hidden} --num-attention-heads {self.heads}"),
            (True, f"--seq-length {self.sequence} --max-position-embeddings {self.sequence}"),
            # With --swiglu Megatron's default is not 4 x hidden.
            (self.gated or self.ffn != 4 * self.hidden, f"--ffn-hidden-size {self.ffn}"),
            (self.head_size * self.heads != self.hidden, f"--kv-channels {self.head_size}"),
            (self.groups != self.heads, f"--group-query-attention --num-query-groups {self.groups}"),
            (self.rms_norm, "--normalization RMSNorm"),
            (self.norm_epsilon != 1e-5, f"--norm-epsilon {self.norm_epsilon}"),
            (self.rotary, f"--position-embedding-type rope --rotary-base {self.rotary_base}"),
            *((getattr(self, field) is value, flag(argument)) for field, (argument, value) in SWITCHES.items()),
            (self.rope_scaling and self.rope_factor != 8, f"--rope-scaling-factor {self.rope_factor:g}"),
            (self.gelu == "tanh", "--openai-gelu"),
            (self.gelu == "exact", "--no-bias-gelu-fusion"),
            (not self.dropout, "--attention-dropout 0 --hidden-dropout 0"),
            (self.adapter_rank, f"--lora-rank {self.adapter_rank}"),
        )


def flag(argument: str) -> str:
    """The flag of an argument's name."""
    return "--" + argument.replace("_", "-")


def command_line(*rows: tuple[object, str]) -> list[str]:
    """The words of the rows whose condition holds; no word contains a blank."""
    return " ".join(words for condition, words in rows if condition).split()


# Megatron's arguments by field, and the flags of the sizes among them.
ARGUMENTS = {"layers": "num_layers", "hidden": "hidden_size", "heads": "num_attention_heads", "sequence": "seq_length"}
ARGUMENTS |= {"vocab": "vocab_size", "ffn": "ffn_hidden_size", "groups": "num_query_groups", "head_size": "kv_channels"}
FLAGS = {field: flag(argument) for field, argument in ARGUMENTS.items()}
ARGUMENTS |= {"gated": "swiglu", "bias": "add_bias_linear"}
# The flags without a value, and what each means.
SWITCHES = {"gated": ("swiglu", True), "rope_scaling": ("use_rope_scaling", True), "qk_norm": ("qk_layernorm", True)}
SWITCHES |= {"qkv_bias": ("add_qkv_bias", True), "tied": ("untie_embeddings_and_output_weights", False)}
SWITCHES |= {"bias": ("disable_bias_linear", False)}

LLAMA_LAYER = dict(gated=True, rms_norm=True, rotary=True, bias=False, dropout=False)
_BERT = dict(vocab=30522, sequence=512, kind="bert")
_QWEN3 = dict(
    vocab=151936, groups=8, head_size=128, rotary_base=1000000, qk_norm=True, norm_epsilon=1e-6, **LLAMA_LAYER
)
_LLAMA = dict(vocab=128256, sequence=8192, groups=8, rotary_base=500000, tied=False, **LLAMA_LAYER)

# The paper names its models by size and says that their layers are similar to Megatron's (section 5): 1.3B and the
# BERT models are Megatron's own, 2.2B has the layers of its 4.2B, and 3.8B those of its BERT 3.9B with 32 heads,
# since 16-way tensor parallelism must divide them. BERT-48 and -192 are BERT-large with more layers (Table 1). It names
# a BERT by the size of the GPT with its layers: BERT 355M is BERT-large. 8.3B is Megatron's (arXiv 1909.08053).
PRESETS: dict[str, Model] = {
    model.name: model
    for model in (
        Model("gpt-355m", 24, 1024, 16, sequence=512),
        Model("gpt-1.3b", 24, 2048, 16, sequence=512),
        Model("gpt-2.2b", 32, 2304, 24, sequence=512),
        Model("gpt-3.8b", 48, 2560, 32, sequence=512),
        Model("gpt-8.3b", 72, 3072, 24),
        Model("gpt-28.3b", 64, 6048, 36, sequence=512),
        Model("gpt-175b", 96, 12288, 96, sequence=2048),
        Model("bert-24", 24, 1024, 16, **_BERT),
        Model("bert-48", 48, 1024, 16, **_BERT),
        Model("bert-192", 192, 1024, 16, **_BERT),
        Model("bert-355m", 24, 1024, 16, **_BERT),
        Model("bert-1.3b", 24, 2048, 32, **_BERT),
        Model("bert-2.2b", 32, 2304, 24, **_BERT),
        Model("bert-3.8b", 48, 2560, 40, **_BERT),
        Model("llama-8b", 32, 4096, 32, ffn=14336, **_LLAMA),
        Model("llama-70b", 80, 8192, 64, ffn=28672, **_LLAMA),
        Model("qwen3-0.6b", 28, 1024, 16, ffn=3072, sequence=4096, **_QWEN3),
        Model("qwen3-8b", 36, 4096, 32, ffn=12288, sequence=4096, tied=False, **_QWEN3),
        Model("qwen3-32b", 64, 5120, 64, ffn=25600, sequence=4096, tied=False, **_QWEN3),
    )
}


def preset(name: str, sequence: int | None = None) -> Model:
    """A preset, with another sequence length if given. UserError lists the names if the name is unknown."""
    model = PRESETS.get(name) or PRESETS.get(f"gpt-{name}")
    if model is None:
        raise UserError(f"--model {name}: not one of {', '.join(PRESETS)}, and no file{did_you_mean(name, PRESETS)}")
    return replace(model, sequence=sequence) if sequence else model
