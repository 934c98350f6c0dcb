"""The model and the cluster that a command line describes: presets, files, or
Megatron's flags."""

import argparse
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

from megatron_2bw.base.errors import UserError, whole_number
from megatron_2bw.tools.planner.descriptions import model as models
from megatron_2bw.tools.planner.descriptions.cluster import Cluster, of_gpus
from megatron_2bw.tools.planner.descriptions.cluster_file import named_cluster
from megatron_2bw.tools.planner.descriptions.hugging_face_config import (
    from_hugging_face,
)
from megatron_2bw.tools.planner.descriptions.model import Model, flag
from megatron_2bw.tools.planner.descriptions.reading import data_file

SHAPE = ("num_layers", "hidden_size", "num_attention_heads")


def numbers(text: str) -> tuple[int, ...]:
    """A comma-separated list of positive numbers, for argparse."""
    return tuple(map(whole_number(1), text.split(",")))


# Megatron's flags of a model, and --bert.
FLAGS = data_file("model_flags.toml")
TYPES = {"count": whole_number(1), "number": float}


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model: a name, a file, or Megatron's flags")
    group.add_argument(
        "--model", metavar="NAME|config.json", help=", ".join(models.PRESETS)
    )
    group.add_argument("--seq-length", type=whole_number(1), help="as Megatron's")
    group.add_argument(
        "--lora-rank", type=whole_number(1), help="of adapters, which alone are trained"
    )
    for name, kind in FLAGS.items():
        meaning = "as Megatron's" if kind else argparse.SUPPRESS
        options = {"help": meaning} | kind
        if "type" in kind:
            options["type"] = TYPES[kind["type"]]
        group.add_argument(flag(name), **options)


def model_of(options: argparse.Namespace) -> Model:
    """The model that the flags describe. UserError names the flag that is missing, or
    given twice."""
    return replace(_whole_model(options), adapter_rank=options.lora_rank or 0)


def _whole_model(options: argparse.Namespace) -> Model:
    if options.model:
        for name, kind in FLAGS.items():
            value = getattr(options, name)
            # 0 == False
            if value is not False and value not in (None, kind.get("default")):
                raise UserError(
                    f"{flag(name)}: --model {options.model} says it already; give one of them"
                )
        return _named_model(options.model, options.seq_length)
    for name in SHAPE:
        if getattr(options, name) is None:
            raise UserError(
                f"give --model NAME, or Megatron's flags of a model ({flag(name)} is missing)"
            )
    return _described_model(options)


def _described_model(given: argparse.Namespace) -> Model:
    """The model of Megatron's flags."""
    kind = "bert" if given.bert else "gpt"
    fields = {}
    for field, argument in models.ARGUMENTS.items():
        fields[field] = getattr(given, argument, None) or 0
    for field, (argument, value) in models.SWITCHES.items():
        fields[field] = getattr(given, argument) is value
    fields["vocab"] = fields["vocab"] or int(given.padded_vocab_size or 0)
    fields["vocab"] = fields["vocab"] or (30522 if given.bert else 50257)
    fields["sequence"] = fields["sequence"] or 1024
    if given.swiglu and not fields["ffn"]:
        # two thirds of Megatron's 4h, rounded down to a multiple of 64
        fields["ffn"] = int(given.hidden_size * 8 / 3 / 64) * 64
    fields["groups"] = (fields["groups"] or 1) if given.group_query_attention else 0
    if given.num_experts:
        fields["dense"] = dense_layers(given.moe_layer_freq)
    if given.multi_latent_attention:
        fields["head_size"] = given.v_head_dim
        fields["latent"] = given.kv_lora_rank
        fields["rotary_head"] = given.qk_pos_emb_head_dim
    if given.openai_gelu:
        fields["gelu"] = "tanh"
    elif given.no_bias_gelu_fusion:
        fields["gelu"] = "exact"
    return Model(
        kind,
        kind=kind,
        aux_loss=given.moe_aux_loss_coeff,
        rms_norm=given.normalization == "RMSNorm",
        rotary=given.position_embedding_type == "rope",
        rotary_base=given.rotary_base,
        norm_epsilon=given.norm_epsilon,
        rope_factor=given.rope_scaling_factor,
        dropout=given.attention_dropout > 0 or given.hidden_dropout > 0,
        **fields,
    )


def dense_layers(frequency: str | int | list[int]) -> int:
    """The first layers without experts, by --moe-layer-freq. UserError if others have
    none too."""
    text = re.sub(r"[\s()]", "", str(frequency))
    found = re.fullmatch(r"\[0\]\*(\d+)\+\[1\]\*\d+|\[((?:0,)*)1(?:,1)*\]|1", text)
    if not found:
        raise UserError(
            f"--moe-layer-freq {frequency}: only the first layers may have no "
            "experts, as in [0]*1+[1]*26"
        )
    return int(found[1] or len(found[2] or "") // 2)


def _named_model(name: str, sequence: int | None) -> Model:
    """The model of --model: a preset, a config.json, or its folder."""
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    if path.suffix != ".json" and not os.path.isfile(path):
        return models.preset(name, sequence)
    model = from_hugging_face(path, sequence)
    if sequence is None:
        print(
            f"planned for sequences of {model.sequence} tokens: give --seq-length for others",
            file=sys.stderr,
        )
    return model


def cluster_of(options: argparse.Namespace) -> Cluster:
    """The cluster that the flags describe."""
    if options.gpu:
        cluster = of_gpus(options.gpu, options.gpus)
    elif options.cluster:
        cluster = named_cluster(options.cluster)
    else:
        raise UserError("give --cluster NAME, or --gpu NAME --gpus N")
    per_server = options.gpus_per_server or cluster.gpus_per_server
    servers = options.servers or cluster.servers
    if per_server > cluster.gpus_per_server:
        raise UserError(
            f"--gpus-per-server {per_server}: the servers of {cluster.name} have "
            f"{cluster.gpus_per_server}"
        )
    return replace(
        cluster,
        servers=servers,
        gpus_per_server=per_server,
        between=options.link or cluster.between,
    )
