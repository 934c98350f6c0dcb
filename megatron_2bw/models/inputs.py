"""The model and the cluster that a command line describes: presets, files, or Megatron's flags. Pure Python."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

from megatron_2bw.errors import UserError
from megatron_2bw.flags.own import whole
from megatron_2bw.models import cluster as clusters
from megatron_2bw.models import model as models
from megatron_2bw.models.cluster import Cluster
from megatron_2bw.models.hugging_face import from_hugging_face, rotary_positions
from megatron_2bw.models.model import Model, flag
from megatron_2bw.models.plan import PRECISION_AWARE
from megatron_2bw.models.profile import Profile

SHAPE = ("num_layers", "hidden_size", "num_attention_heads")
SIZES = (*SHAPE, "ffn_hidden_size", "kv_channels", "num_query_groups", "vocab_size")
SWITCHES = (
    "group_query_attention swiglu use_rope_scaling untie_embeddings_and_output_weights disable_bias_linear "
    "add_qkv_bias qk_layernorm openai_gelu no_bias_gelu_fusion"
).split()
DROPOUTS = {"attention_dropout": 0.1, "hidden_dropout": 0.1}
NUMBERS = {"rotary_base": 10000, "rope_scaling_factor": 8.0, "norm_epsilon": 1e-5} | DROPOUTS
CHOICES = {"normalization": ("LayerNorm", "RMSNorm"), "position_embedding_type": ("learned_absolute", "rope")}


# Tokens of a sequence, unless --seq-length says more. A model's rotary positions allow 32,768 to 131,072, but most of a
# pretraining has shorter sequences: 4,096 for Llama 2 and Qwen3, 8,192 for Llama 3.
LONGEST = 4096
# What a search covers in seconds to minutes.
MOST_LAYERS, MOST_GPUS = 1_000, 1_000_000


def numbers(text: str) -> tuple[int, ...]:
    """A comma-separated list of positive numbers, for argparse."""
    try:
        values = tuple(int(word) for word in text.split(","))
    except ValueError:
        values = (0,)
    if min(values) < 1 or max(values) >= models.LARGEST:
        raise argparse.ArgumentTypeError(f"{text}: expected positive whole numbers such as 1,2,4,8")
    return values


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model: a name, a file, or Megatron's flags")
    group.add_argument("--model", metavar="NAME|config.json", help=", ".join(models.PRESETS))
    meaning = "as Megatron's"
    for name in ("seq_length", *SIZES):
        group.add_argument(flag(name), type=int, help=meaning)
    group.add_argument("--bert", action="store_true", help="a BERT, not a GPT")
    for name in SWITCHES:
        group.add_argument(flag(name), action="store_true", help=meaning)
    for name, choices in CHOICES.items():
        group.add_argument(flag(name), choices=choices, default=choices[0], help=meaning)
    for name, default in NUMBERS.items():
        group.add_argument(flag(name), type=type(default), default=default, help=meaning)
    for name in ("--max-position-embeddings", "--padded-vocab-size"):
        group.add_argument(name, type=whole(1), help=argparse.SUPPRESS)
    for name in ("--tokenizer-type", "--tokenizer-model"):
        group.add_argument(name, help=argparse.SUPPRESS)


def model_of(options: argparse.Namespace) -> Model:
    """The model that the flags describe. UserError names the flag that is missing, wrong, or given twice."""
    model = _model(options)
    if model.layers > MOST_LAYERS:
        name = f"--model {options.model}" if options.model else "--num-layers"
        raise UserError(f"{name}: {model.layers} layers are more than the planner searches, {MOST_LAYERS}")
    return model


def _model(options: argparse.Namespace) -> Model:
    sizes = ("seq_length", *SIZES, "rotary_base")
    _check_positive(options, *sizes)
    for name in sizes:
        if (getattr(options, name) or 0) >= models.LARGEST:
            raise UserError(f"{flag(name)} {getattr(options, name)}: it must be below {models.LARGEST:g}")
    for name in DROPOUTS:
        if not 0 <= getattr(options, name) < 1:
            raise UserError(f"{flag(name)} must be at least 0 and less than 1, not {getattr(options, name)}")
    if not 0 < options.norm_epsilon < 1:
        raise UserError(f"--norm-epsilon must be greater than 0 and less than 1, not {options.norm_epsilon}")
    if options.model:
        twice = _typed(options)
        if twice:
            raise UserError(f"{twice}: --model {options.model} says it already; give one of them")
        path = Path(options.model)
        if os.path.isdir(path):
            path /= "config.json"
        if path.suffix == ".json" or os.path.isfile(path):
            return from_hugging_face(path, options.seq_length or _shortened(path))
        return models.preset(options.model, options.seq_length)
    missing = [name for name in SHAPE if getattr(options, name) is None]
    if missing:
        raise UserError(f"give --model NAME, or Megatron's flags of a model ({flag(missing[0])} is missing)")
    for name in ("rotary_base", "use_rope_scaling"):
        if options.position_embedding_type != "rope" and getattr(options, name) not in (False, NUMBERS.get(name)):
            raise UserError(f"{flag(name)} has no effect without --position-embedding-type rope: leave it out")
    if options.num_query_groups and not options.group_query_attention:
        raise UserError("--num-query-groups needs --group-query-attention, as in Megatron")
    return Model(
        "bert" if options.bert else "gpt",
        options.num_layers,
        options.hidden_size,
        options.num_attention_heads,
        vocab=options.vocab_size or options.padded_vocab_size or (30522 if options.bert else 50257),
        sequence=options.seq_length or 1024,
        kind="bert" if options.bert else "gpt",
        # Megatron's default is 4h (0 here), and with --swiglu two thirds of it, rounded down to a multiple of 64.
        ffn=options.ffn_hidden_size or int(options.hidden_size * 8 / 3 / 64) * 64 * options.swiglu,
        groups=options.num_query_groups or (1 if options.group_query_attention else 0),
        head_size=options.kv_channels or 0,
        gated=options.swiglu,
        rms_norm=options.normalization == "RMSNorm",
        rotary=options.position_embedding_type == "rope",
        rotary_base=options.rotary_base,
        tied=not options.untie_embeddings_and_output_weights,
        bias=not options.disable_bias_linear,
        norm_epsilon=options.norm_epsilon,
        rope_scaling=options.use_rope_scaling,
        rope_factor=options.rope_scaling_factor,
        qk_norm=options.qk_layernorm,
        gelu="tanh" if options.openai_gelu else "exact" if options.no_bias_gelu_fusion else "",
        qkv_bias=options.add_qkv_bias,
        dropout=options.attention_dropout > 0 or options.hidden_dropout > 0,
    )


# Megatron's flags for the floats of gradients, optimizer and loss, and their values.
NUMERICS = {
    "--grad-reduce-in-bf16": (),
    PRECISION_AWARE: (),
    "--main-grads-dtype": ("fp32", "bf16"),
    "--main-params-dtype": ("fp32", "fp16"),
    "--exp-avg-dtype": ("fp32", "fp16", "bf16", "fp8"),
    "--exp-avg-sq-dtype": ("fp32", "fp16", "bf16", "fp8"),
    "--cross-entropy-loss-fusion": (),
}


def add_numerics_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("floats, of all plans")
    for name, values in NUMERICS.items():
        kind = {"choices": values, "default": values[0]} if values else {"action": "store_true"}
        group.add_argument(name, help="as Megatron's", **kind)


def numerics_of(options: argparse.Namespace, precision: str) -> tuple[str, ...]:
    """The flags of NUMERICS that were given, with their values. UserError names one that has no effect."""
    given = {name: getattr(options, name[2:].replace("-", "_")) for name in NUMERICS}
    chosen = [name for name, values in NUMERICS.items() if given[name] not in (False, *values[:1])]
    alone = [name for name in chosen if NUMERICS[name]]
    if alone and not given[PRECISION_AWARE]:
        raise UserError(f"{alone[0]} has no effect without {PRECISION_AWARE}: add it, or leave {alone[0]} out")
    if "--grad-reduce-in-bf16" in chosen and precision not in ("bf16", "fp8"):
        raise UserError(f"--grad-reduce-in-bf16 has no effect with --precision {precision}: leave it out")
    return tuple(f"{name} {given[name]}" if NUMERICS[name] else name for name in chosen)


def _shortened(path: Path) -> int | None:
    """LONGEST, with a line about it, if the file's model takes longer sequences."""
    longest = rotary_positions(path)
    if longest <= LONGEST:
        return None
    planned = f"planned are {LONGEST}. Give --seq-length for others"
    print(f"--model {path} allows sequences of {longest} tokens; {planned}", file=sys.stderr)
    return LONGEST


def _check_positive(options: argparse.Namespace, *names: str) -> None:
    for name in names:
        number = getattr(options, name)
        if number is not None and number < 1:
            raise UserError(f"{flag(name)} must be positive, not {number}")


def _typed(options: argparse.Namespace) -> str | None:
    """A flag of a model that the user gave, apart from --model and --seq-length."""
    defaults = dict.fromkeys(SIZES) | dict.fromkeys(("bert", *SWITCHES), False) | NUMBERS
    defaults |= {name: choices[0] for name, choices in CHOICES.items()}
    return next((flag(name) for name, default in defaults.items() if getattr(options, name) != default), None)


def cluster_of(options: argparse.Namespace) -> Cluster:
    """The cluster that the flags describe, with its profile."""
    _check_positive(options, "servers", "gpus_per_server")
    cluster, per_server = named_cluster(options.cluster), options.gpus_per_server
    if per_server and per_server > cluster.gpus_per_server:
        raise UserError(f"--gpus-per-server {per_server}: the servers of {cluster.name} have {cluster.gpus_per_server}")
    if options.servers and cluster.devices:
        raise UserError(f"--servers {options.servers}: the groups of --cluster {options.cluster} say it; leave it out")
    servers = options.servers or cluster.servers
    cluster = replace(cluster, servers=servers, gpus_per_server=per_server or cluster.gpus_per_server)
    if options.link:
        if cluster.servers == 1:
            raise UserError("--link has no effect with one server: give --servers, or leave it out")
        cluster = replace(cluster, between=options.link)
    if cluster.gpus > MOST_GPUS:
        name = "--servers" if options.servers else f"--cluster {options.cluster}"
        raise UserError(f"{name}: {cluster.gpus} GPUs are more than the planner searches, {MOST_GPUS}")
    options.profile = options.profile or cluster.profile  # errors name it
    if not options.profile:
        return cluster
    if cluster.devices:
        raise UserError(f"--profile {options.profile}: it is of one GPU, and the cluster has several; leave it out")
    profile = Profile.load(Path(options.profile))
    between = cluster.between
    if profile.between and not options.link:
        between = replace(profile.between, rails=between.rails)
    return replace(cluster, profile=profile, inside=profile.inside or cluster.inside, between=between)


def named_cluster(name: str) -> Cluster:
    """The cluster of --cluster: a preset, or a YAML file that exists. Its profile is a path."""
    if name in clusters.PRESETS or not os.path.exists(name):
        return clusters.preset(name, 1)
    return clusters.from_yaml(Path(name))
