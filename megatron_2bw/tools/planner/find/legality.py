"""Whether a plan is one that Megatron 0.19 and this project's schedules run, and if
not, why. Pure Python.

Invariant: what is legal here trains; Megatron's own check of its arguments
(validate_args) accepts much that fails, or builds another model, later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from megatron_2bw.run.flags.rule import installed
from megatron_2bw.tools.planner.descriptions.model import Model
from megatron_2bw.tools.planner.descriptions.plan import Plan

PRECISIONS = ("bf16", "fp16", "fp32")


class Host(NamedTuple):
    """What a plan is to run on: the number of GPUs, the precision, and whether the GPUs
    have bf16."""

    gpus: int
    precision: str = "bf16"
    bf16: bool = True


def violations(plan: Plan, model: Model, *host: int | str | bool) -> Iterator[str]:
    """The causes, of RULES, for which `plan` is illegal; none if it is legal. `host` is
    what Host has."""
    on = Host(*host)
    return (cause for cause, broken in RULES.items() if broken(plan, model, on))


def may_divide_sequences(model: Model) -> bool:
    """Whether a run divides sequences over tensor-parallel ranks: a BERT's only where
    Apex is installed."""
    return model.kind != "bert" or installed("apex")


def _unshared(p: Plan, m: Model, on: Host) -> bool:
    """Megatron does not look at the sizes of a layout's middle stages: none, or less
    than none, would pass."""
    if p.stages:
        ends = p.first or p.last or p.virtual > 1
        return (
            bool(ends)
            or not len(p.stages) == p.depth > 1
            or min(p.stages) < 1
            or sum(p.stages) != m.layers
        )
    own = [layers for layers in (p.first, p.last) if layers]
    layers, stages = m.layers - sum(own), p.depth - len(own)
    if stages == 0:
        return layers != 0
    return p.depth > m.layers or not layers >= stages > 0 or layers % stages != 0


def _few(p: Plan, m: Model, on: Host) -> bool:
    # By default an interleaved chunk runs as many microbatches in a row as there are
    # stages; fewer would make it wait for itself.
    return (
        bool(p.microbatches % p.depth)
        if p.virtual > 1
        else p.microbatches < p.pipeline.min_microbatches(p.depth)
    )


# Whether a plan breaks a rule, by the cause. The rules that a search breaks most often
# come first.
RULES: dict[str, Callable[[Plan, Model, Host], object]] = {
    "the sizes do not use every GPU": lambda p, m, on: p.gpus != on.gpus,
    "--tensor-model-parallel-size does not divide --num-attention-heads": lambda p, m, on: (
        m.heads % p.tensor
    ),
    # Fewer groups than ranks are allowed, but the columns of queries, keys and values
    # must divide.
    (
        "--num-query-groups is neither a multiple nor a divisor of "
        "--tensor-model-parallel-size"
    ): lambda p, m, on: (
        m.groups != m.heads and m.groups % p.tensor and p.tensor % m.groups
    ),
    "--tensor-model-parallel-size does not divide the columns of keys and values": lambda p, m, on: (
        2 * m.key_size % p.tensor
    ),
    "--tensor-model-parallel-size does not divide --ffn-hidden-size": lambda p, m, on: (
        m.ffn % p.tensor
    ),
    (
        "--sequence-parallel, and --tensor-model-parallel-size does not divide "
        "--seq-length"
    ): lambda p, m, on: p.sequence_parallel and m.sequence % p.tensor,
    "--sequence-parallel with one tensor rank": lambda p, m, on: (
        p.sequence_parallel and p.tensor == 1
    ),
    "--sequence-parallel of a BERT without Apex": lambda p, m, on: (
        p.sequence_parallel and not may_divide_sequences(m)
    ),
    (
        "--seq-length is no multiple of twice --context-parallel-size, or of it "
        "times the tensor ranks"
    ): lambda p, m, on: (
        p.context > 1
        and (
            m.sequence % (2 * p.context)
            or (p.sequence_parallel and m.sequence % (p.context * p.tensor))
        )
    ),
    "--context-parallel-size with a BERT": lambda p, m, on: (
        p.context > 1 and m.kind == "bert"
    ),
    "--expert-model-parallel-size does not divide --num-experts and the replicas": lambda p, m, on: (
        p.expert > 1
        and (not m.experts or m.experts % p.expert or p.replicas % p.expert)
    ),
    "--num-experts with tensor parallelism and without --sequence-parallel": lambda p, m, on: (
        m.experts and p.tensor > 1 and not p.sequence_parallel
    ),
    "--expert-model-parallel-size with --use-tp-pp-dp-mapping": lambda p, m, on: (
        p.expert > 1 and p.pipeline_inside
    ),
    "the stages do not share --num-layers": _unshared,
    "--global-batch-size gives too few microbatches, or a part of a round of chunks": _few,
    "virtual stages only with Megatron's schedule and several stages": lambda p, m, on: (
        p.virtual > 1 and (p.schedule != "megatron" or p.depth == 1)
    ),
    "virtual stages do not divide the layers of a stage": lambda p, m, on: any(
        n % p.virtual for n in p.layers_of(m)
    ),
    "the GPU has no bf16: use --precision fp16": lambda p, m, on: (
        not on.bf16 and on.precision == "bf16"
    ),
    "gradient slots only with 2bw, and shard only with the distributed optimizer": lambda p, m, on: (
        p.gradient_slots
        not in (
            (1, 2, *["shard"] * p.distributed_optimizer)
            if p.schedule == "2bw"
            else (2,)
        )
    ),
    "--two-bw-optimizer host only with 2bw": lambda p, m, on: (
        p.host and (p.schedule, p.gradient_slots) != ("2bw", 2)
    ),
    "extra warm-up only with 2bw, one number or one for each boundary": lambda p, m, on: (
        p.extra_warmup
        and (
            p.schedule != "2bw"
            or p.depth == 1
            or len(p.extra_warmup) not in (1, p.depth - 1)
        )
    ),
    "--two-bw-correction only with 2bw": lambda p, m, on: (
        p.extrapolate and p.schedule != "2bw"
    ),
    "--gpipe-round only with gpipe, of at most a batch's microbatches": lambda p, m, on: (
        p.gpipe_round and (p.schedule != "gpipe" or p.gpipe_round > p.microbatches)
    ),
    "pipedream with the distributed optimizer": lambda p, m, on: (
        p.schedule == "pipedream" and p.distributed_optimizer
    ),
    "pipedream with --num-experts": lambda p, m, on: (
        p.schedule == "pipedream" and m.experts
    ),
    "pipedream with tied embeddings": lambda p, m, on: (
        p.schedule == "pipedream" and p.depth > 1 and m.tied
    ),
    "pipedream with fp16 and dynamic loss scale": lambda p, m, on: (
        p.schedule == "pipedream" and on.precision == "fp16"
    ),
}
