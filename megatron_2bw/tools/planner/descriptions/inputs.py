"""The model and the cluster that a command line describes: presets, files, or
Megatron's flags."""

from __future__ import annotations

import argparse
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_2bw.base.errors import UserError, whole
from megatron_2bw.tools.planner.descriptions import model as models
from megatron_2bw.tools.planner.descriptions.cluster import Cluster
from megatron_2bw.tools.planner.descriptions.cluster_file import named_cluster
from megatron_2bw.tools.planner.descriptions.hugging_face_config import (
    from_hugging_face,
)
from megatron_2bw.tools.planner.descriptions.model import Model, flag
from megatron_2bw.tools.planner.descriptions.profile import Profile

SHAPE = ("num_layers", "hidden_size", "num_attention_heads")


def numbers(text: str) -> tuple[int, ...]:
    """A comma-separated list of positive numbers, for argparse."""
    return tuple(map(whole(1), text.split(",")))


# Megatron's flags of a model, by argument, and --bert.
FLAGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (*SHAPE, "ffn_hidden_size", "kv_channels", "num_query_groups", "vocab_size"),
        {"type": whole(1)},
    ),
    **dict.fromkeys(
        (argument for argument, _ in models.SWITCHES.values()), {"action": "store_true"}
    ),
    **dict.fromkeys(
        ("bert", "group_query_attention", "openai_gelu", "no_bias_gelu_fusion"),
        {"action": "store_true"},
    ),
    "normalization": {"choices": ("LayerNorm", "RMSNorm"), "default": "LayerNorm"},
    "position_embedding_type": {
        "choices": ("learned_absolute", "rope"),
        "default": "learned_absolute",
    },
    "rotary_base": {"type": int, "default": 10000},
    "rope_scaling_factor": {"type": float, "default": 8.0},
    "norm_epsilon": {"type": float, "default": 1e-5},
    "attention_dropout": {"type": float, "default": 0.1},
    "hidden_dropout": {"type": float, "default": 0.1},
    **dict.fromkeys(
        ("num_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
        {"type": whole(1)},
    ),
    "moe_router_topk": {"type": whole(1), "default": 2},
    "moe_layer_freq": {"default": "1"},
    "moe_aux_loss_coeff": {"type": float, "default": 0.0},
    "multi_latent_attention": {"action": "store_true"},
    "kv_lora_rank": {"type": whole(1), "default": 32},
    **dict.fromkeys(("qk_head_dim", "v_head_dim"), {"type": whole(1), "default": 128}),
    "qk_pos_emb_head_dim": {"type": whole(1), "default": 64},
    # Other flags say it, or no estimate depends on it.
    **dict.fromkeys(
        ("moe_token_dispatcher_type", "moe_router_load_balancing_type", "rope_type"), {}
    ),
    **dict.fromkeys(
        (
            "max_position_embeddings",
            "padded_vocab_size",
            "tokenizer_type",
            "tokenizer_model",
        ),
        {},
    ),
}


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model: a name, a file, or Megatron's flags")
    group.add_argument(
        "--model", metavar="NAME|config.json", help=", ".join(models.PRESETS)
    )
    group.add_argument("--seq-length", type=whole(1), help="as Megatron's")
    group.add_argument(
        "--lora-rank", type=whole(1), help="of adapters, which alone are trained"
    )
    for name, kind in FLAGS.items():
        meaning = (
            "a BERT, not a GPT"
            if name == "bert"
            else "as Megatron's"
            if kind
            else argparse.SUPPRESS
        )
        group.add_argument(flag(name), **kind, help=meaning)


def model_of(options: argparse.Namespace) -> Model:
    """The model that the flags describe. UserError names the flag that is missing, or
    given twice."""
    return replace(_whole_model(options), adapter_rank=options.lora_rank or 0)


def _whole_model(options: argparse.Namespace) -> Model:
    given, bert = options, options.bert
    if given.model:
        for name, kind in FLAGS.items():
            value = getattr(given, name)
            # 0 == False
            if value is not False and value not in (None, kind.get("default")):
                raise UserError(
                    f"{flag(name)}: --model {given.model} says it already; give one of them"
                )
        return _named_model(given.model, given.seq_length)
    for name in SHAPE:
        if getattr(given, name) is None:
            raise UserError(
                f"give --model NAME, or Megatron's flags of a model ({flag(name)} is missing)"
            )
    switches = {
        field: getattr(given, argument) is value
        for field, (argument, value) in models.SWITCHES.items()
    }
    return Model(
        "bert" if bert else "gpt",
        *(getattr(given, name) for name in SHAPE),
        vocab=given.vocab_size
        or int(given.padded_vocab_size or 0)
        or (30522 if bert else 50257),
        sequence=given.seq_length or 1024,
        kind="bert" if bert else "gpt",
        # Megatron's default is 4h (0 here), and with --swiglu two thirds of it, rounded
        # down to a multiple of 64.
        ffn=given.ffn_hidden_size
        or int(given.hidden_size * 8 / 3 / 64) * 64 * given.swiglu,
        groups=(given.num_query_groups or 1) if given.group_query_attention else 0,
        head_size=given.v_head_dim
        if given.multi_latent_attention
        else given.kv_channels or 0,
        latent=given.kv_lora_rank if given.multi_latent_attention else 0,
        rotary_head=given.qk_pos_emb_head_dim if given.multi_latent_attention else 0,
        experts=given.num_experts or 0,
        topk=given.moe_router_topk,
        expert_ffn=given.moe_ffn_hidden_size or 0,
        shared_ffn=given.moe_shared_expert_intermediate_size or 0,
        dense=dense_layers(given.moe_layer_freq) if given.num_experts else 0,
        aux_loss=given.moe_aux_loss_coeff,
        rms_norm=given.normalization == "RMSNorm",
        rotary=given.position_embedding_type == "rope",
        rotary_base=given.rotary_base,
        norm_epsilon=given.norm_epsilon,
        rope_factor=given.rope_scaling_factor,
        gelu="tanh"
        if given.openai_gelu
        else "exact"
        if given.no_bias_gelu_fusion
        else "",
        dropout=given.attention_dropout > 0 or given.hidden_dropout > 0,
        **switches,
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
    path = Path(name, "config.json") if os.path.isdir(name) else Path(name)
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
    """The cluster that the flags describe, with its profile."""
    cluster = named_cluster(options.cluster)
    per_server, servers = (
        options.gpus_per_server or cluster.gpus_per_server,
        options.servers or cluster.servers,
    )
    if per_server > cluster.gpus_per_server:
        raise UserError(
            f"--gpus-per-server {per_server}: the servers of {cluster.name} have "
            f"{cluster.gpus_per_server}"
        )
    profile = Profile.load(options.profile) if options.profile else cluster.profile
    for name, given in (("servers", options.servers), ("profile", profile)):
        if given and cluster.devices:
            raise UserError(
                f"{flag(name)}: --cluster {options.cluster} has groups of "
                "different GPUs; leave it out"
            )
    inside, between = cluster.inside, cluster.between
    if profile:
        inside = profile.inside or inside
        between = (
            replace(profile.between, rails=between.rails)
            if profile.between
            else between
        )
    links = {"inside": inside, "between": options.link or between}
    return replace(
        cluster, servers=servers, gpus_per_server=per_server, profile=profile, **links
    )
