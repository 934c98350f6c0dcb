"""From flags to a model and a cluster: presets, files, or Megatron's own flags of a model. Pure Python."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from megatron_2bw.planner.describe import cluster as clusters
from megatron_2bw.planner.describe import model as models
from megatron_2bw.planner.describe.cluster import Cluster, ClusterError
from megatron_2bw.planner.describe.hugging_face import from_hugging_face
from megatron_2bw.planner.describe.model import Model, ModelError
from megatron_2bw.planner.describe.profile import Profile

SHAPE = ("num_layers", "hidden_size", "num_attention_heads")
# Megatron's flags that only say what a preset or a file says already.
ONLY_WITHOUT_MODEL = (*SHAPE, "ffn_hidden_size", "kv_channels", "num_query_groups", "vocab_size")


class Parser(argparse.ArgumentParser):
    """Errors of one line."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message}\n")


def numbers(text: str) -> tuple[int, ...]:
    """A comma-separated list of positive numbers, for argparse."""
    values = tuple(int(word) for word in text.split(","))
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be positive")
    return values


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model: a name, a file, or Megatron's flags")
    group.add_argument("--model", metavar="NAME|config.json", help=", ".join(models.PRESETS))
    meaning = "as Megatron's"
    for flag in (
        "--seq-length",
        "--num-layers",
        "--hidden-size",
        "--num-attention-heads",
        "--ffn-hidden-size",
        "--kv-channels",
        "--num-query-groups",
        "--vocab-size",
    ):
        group.add_argument(flag, type=int, help=meaning)
    group.add_argument("--bert", action="store_true", help="a BERT, not a GPT")
    for flag in (
        "--group-query-attention",
        "--swiglu",
        "--use-rope-scaling",
        "--untie-embeddings-and-output-weights",
        "--disable-bias-linear",
        "--add-qkv-bias",
    ):
        group.add_argument(flag, action="store_true", help=meaning)
    group.add_argument("--normalization", choices=("LayerNorm", "RMSNorm"), default="LayerNorm", help=meaning)
    group.add_argument(
        "--position-embedding-type", choices=("learned_absolute", "rope"), default="learned_absolute", help=meaning
    )
    group.add_argument("--rotary-base", type=int, default=10000, help=meaning)
    for flag, default in (("--norm-epsilon", 1e-5), ("--attention-dropout", 0.1), ("--hidden-dropout", 0.1)):
        group.add_argument(flag, type=float, default=default, help=meaning)
    group.add_argument("--max-position-embeddings", type=int, help=argparse.SUPPRESS)


def model_of(options: argparse.Namespace) -> Model:
    """The model that the flags describe. ModelError says what is missing or given twice."""
    for name in ("seq_length", *ONLY_WITHOUT_MODEL):
        number = getattr(options, name)
        if number is not None and number < 1:
            raise ModelError(f"--{name.replace('_', '-')} must be positive, not {number}")
    if options.model:
        twice = _typed(options)
        if twice:
            raise ModelError(f"{twice}: --model {options.model} says it already; give one of them")
        path = Path(options.model)
        if path.is_dir():
            path /= "config.json"
        if path.suffix == ".json" or path.is_file():
            return from_hugging_face(path, options.seq_length)
        return models.preset(options.model, options.seq_length)
    missing = [name for name in SHAPE if getattr(options, name) is None]
    if missing:
        flag = "--" + missing[0].replace("_", "-")
        raise ModelError(f"give --model NAME, or Megatron's flags of a model ({flag} is missing)")
    if options.num_query_groups and not options.group_query_attention:
        raise ModelError("--num-query-groups needs --group-query-attention, as in Megatron")
    return Model(
        "bert" if options.bert else "gpt",
        options.num_layers,
        options.hidden_size,
        options.num_attention_heads,
        vocab=options.vocab_size or (30522 if options.bert else 50257),
        sequence=options.seq_length or 1024,
        kind="bert" if options.bert else "gpt",
        ffn=options.ffn_hidden_size or _ffn(options),
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
        qkv_bias=options.add_qkv_bias,
        dropout=options.attention_dropout > 0 or options.hidden_dropout > 0,
    )


def _typed(options: argparse.Namespace) -> str | None:
    """A flag of a model that was typed beside --model."""
    switches = (
        "bert",
        "group_query_attention",
        "swiglu",
        "untie_embeddings_and_output_weights",
        "disable_bias_linear",
        "add_qkv_bias",
        "use_rope_scaling",
    )
    defaults = {
        "norm_epsilon": 1e-5,
        "normalization": "LayerNorm",
        "rotary_base": 10000,
        "position_embedding_type": "learned_absolute",
        "attention_dropout": 0.1,
        "hidden_dropout": 0.1,
    }
    given = [name for name in ONLY_WITHOUT_MODEL if getattr(options, name) is not None]
    given += [name for name in switches if getattr(options, name)]
    given += [name for name, default in defaults.items() if getattr(options, name) != default]
    return "--" + given[0].replace("_", "-") if given else None


def _ffn(options: argparse.Namespace) -> int:
    """Megatron's default: 4h, and with --swiglu two thirds of it, in multiples of 64."""
    return int(options.hidden_size * 8 / 3 / 64) * 64 if options.swiglu else 0


def cluster_of(options: argparse.Namespace) -> Cluster:
    """The cluster that the flags describe, with its profile."""
    for flag in ("servers", "gpus_per_server"):
        number = getattr(options, flag)
        if number is not None and number < 1:
            raise ClusterError(f"--{flag.replace('_', '-')} must be positive, not {number}")
    path = Path(options.cluster)
    if options.cluster in clusters.PRESETS or not path.exists():
        cluster = clusters.preset(options.cluster, options.servers or 1)
    else:
        cluster = clusters.from_yaml(path)
        cluster = replace(cluster, servers=options.servers or cluster.servers)
    if options.gpus_per_server:
        if options.gpus_per_server > cluster.gpus_per_server:
            raise ClusterError(
                f"--gpus-per-server {options.gpus_per_server}: the servers of {cluster.name} have "
                f"{cluster.gpus_per_server}"
            )
        cluster = replace(cluster, gpus_per_server=options.gpus_per_server)
    options.profile = options.profile or cluster.profile  # where the user finds it named
    if not options.profile:
        return cluster
    profile = Profile.load(Path(options.profile))
    between = replace(profile.between, rails=cluster.between.rails) if profile.between else cluster.between
    return replace(cluster, profile=profile, inside=profile.inside or cluster.inside, between=between)
