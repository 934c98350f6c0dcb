"""Rules about the sizes of a model, its batch and its pipeline: those that a schedule of this project adds, which the
command line checks, and those of Megatron that the planner's search must know too.

Invariant: pure Python. A rule answers one line that names the flags, or None. It reads Megatron's names of the
arguments, so it takes the command line's arguments or what planner/find/legality.py makes of a plan.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from megatron_2bw.flags.rule import OUT, Args, Condition, Rule, asks, line, value
from megatron_2bw.schedules import schedule_of

Check = Callable[[Args], str | None]

# --- the schedule's options ------------------------------------------------------------------------------------------

ONE_CHUNK = Rule(
    "--num-virtual-stages-per-pipeline-rank",
    f"interleaved stages are not supported, a stage is one model chunk; {OUT}",
    when=lambda s: (s.num_virtual_stages_per_pipeline_rank or 1) > 1,
)
SHARDS = Rule("--use-distributed-optimizer", f"its shards have one version; {OUT}", "pipedream")
SCALES = Rule(
    "--fp16",
    "each stage would scale the loss by itself; add --loss-scale N, or use --bf16",
    "pipedream",
    lambda s: s.fp16 and s.loss_scale is None,
)
CHUNKED_LAYOUT = Rule(
    "--pipeline-model-parallel-layout",
    f"it must have as many stages as --pipeline-model-parallel-size: {ONE_CHUNK.why}",
    when=lambda s: (
        s.pipeline_model_parallel_layout
        and len(layout_stages(s.pipeline_model_parallel_layout)) != s.pipeline_model_parallel_size
    ),
)
TIES = Rule(
    "--untie-embeddings-and-output-weights",
    "it must be given: each stage clips and steps alone, so tied embeddings would drift apart",
    "pipedream",
    lambda s: s.pipeline_model_parallel_size > 1 and not s.untie_embeddings_and_output_weights,
)


def idle(flag: str, default: object, need: str) -> Rule:
    """An own flag that must have its default unless the arguments have `need`, another flag with one of its values."""
    text = f"{flag} has no effect without {need}: leave it out"
    return line(text, lambda s: value(s, flag) != default and not asks(s, need))


SLOTS = idle("--two-bw-gradient-slots", 2, "--pipeline-schedule 2bw")
EXTRAPOLATES = idle("--two-bw-correction", "none", "--pipeline-schedule 2bw")
ROUND = idle("--gpipe-round", None, "--pipeline-schedule gpipe")


def extra_warmup(s: Args) -> str | None:
    """--two-bw-extra-warmup needs 2bw and several stages, and one number or one for each boundary between stages."""
    extra, boundaries = s.two_bw_extra_warmup, s.pipeline_model_parallel_size - 1
    if extra and (s.pipeline_schedule != "2bw" or not boundaries):
        return "--two-bw-extra-warmup has no effect without --pipeline-schedule 2bw and several stages: leave it out"
    wrong = len(extra) not in (0, 1, boundaries)
    return f"--two-bw-extra-warmup has {len(extra)} numbers: give one or {boundaries}" if wrong else None


# --- the batch -------------------------------------------------------------------------------------------------------


def _batch(s: Args) -> tuple[int, int, int]:
    """The samples of a batch, those of one microbatch on each pipeline, and the microbatches; 0 where Megatron's own
    assertions find a size wrong."""
    ranks = s.pipeline_model_parallel_size * s.tensor_model_parallel_size * s.context_parallel_size
    replica = (s.micro_batch_size or 0) * (s.world_size // ranks)
    size = s.global_batch_size or replica
    return size, replica, size // replica if replica else 0


def microbatches(s: Args) -> str | None:
    """--global-batch-size must give each pipeline the microbatches that the schedule needs: 2bw one for each stage, and
    more with --two-bw-extra-warmup."""
    stages, extra = s.pipeline_model_parallel_size, s.two_bw_extra_warmup
    schedule = schedule_of(s.pipeline_schedule, gradient_slots=s.two_bw_gradient_slots, extra_warmup=extra)
    if schedule is None or len(extra) not in (0, 1, stages - 1):
        return None
    size, replica, number = _batch(s)
    needed = schedule.min_microbatches(stages)
    if not replica or number >= needed:
        return None
    reason = "with --two-bw-extra-warmup needs" if extra else "needs as many as there are stages,"
    return (
        f"--global-batch-size {size} gives each pipeline {number} of the microbatches, but --pipeline-schedule "
        f"{schedule.name} {reason} {needed}: use --global-batch-size {needed * replica} or more"
    )


def gpipe_round(s: Args) -> str | None:
    """--gpipe-round must be at most the microbatches of a batch on each pipeline."""
    _, replica, number = _batch(s)
    if s.gpipe_round is None or not replica or s.gpipe_round <= number:
        return None
    return f"--gpipe-round {s.gpipe_round} is more than the {number} microbatches of a pipeline's batch: give fewer"


# --- the model -------------------------------------------------------------------------------------------------------


def _divides(name: str, also: str = "", when: Condition = lambda s: True) -> Rule:
    flag = f"--{name.replace('_', '-')} {{a.{name}}}"
    text = f"--tensor-model-parallel-size {{given}}{also} does not divide {flag}: use a size that does"
    return line(text, lambda s: getattr(s, name) % s.tensor_model_parallel_size and when(s))


HEADS, FFN = _divides("num_attention_heads"), _divides("ffn_hidden_size")
SEQUENCE = _divides("seq_length", " with --sequence-parallel", lambda s: s.sequence_parallel)
# Fewer groups than ranks are allowed, but the columns of the linear layer of queries, keys and values must divide.
GROUPS = line(
    "--num-query-groups {given} is neither a multiple nor a divisor of --tensor-model-parallel-size "
    "{a.tensor_model_parallel_size}: use a size for which it is",
    lambda s: (
        s.num_query_groups != s.num_attention_heads
        and s.num_query_groups % s.tensor_model_parallel_size
        and s.tensor_model_parallel_size % s.num_query_groups
    ),
)
KEYS = line(
    "--num-query-groups {given} x --kv-channels {a.kv_channels}: --tensor-model-parallel-size "
    "{a.tensor_model_parallel_size} does not divide twice that, the columns of keys and values; use a smaller size",
    lambda s: (
        2 * s.num_query_groups * s.kv_channels % s.tensor_model_parallel_size
        and not (s.num_attention_heads % s.tensor_model_parallel_size or GROUPS.when(s))
    ),
)
# Megatron's arguments drop the flag with a warning, its configuration raises an error.
SEQUENCE_RANKS = line(
    "--sequence-parallel has no effect with --tensor-model-parallel-size 1: leave it out",
    lambda s: s.sequence_parallel and s.tensor_model_parallel_size == 1,
)
CONTEXT = line(
    "--context-parallel-size {given} needs a --seq-length, now {a.seq_length}, that is a multiple of twice that, and "
    "with --sequence-parallel of --tensor-model-parallel-size times that: use sizes for which it is",
    lambda s: (
        s.context_parallel_size > 1
        and (
            s.seq_length % (2 * s.context_parallel_size)
            or (s.sequence_parallel and s.seq_length % (s.context_parallel_size * s.tensor_model_parallel_size))
        )
    ),
)
CHUNKS = line(
    "--num-virtual-stages-per-pipeline-rank {given} needs --pipeline-model-parallel-size 2 or more: leave it out",
    lambda s: s.num_virtual_stages_per_pipeline_rank and s.pipeline_model_parallel_size == 1,
)


def layout_stages(text: str) -> list[str]:
    """The layers of each stage in Megatron's notation, such as ["Ett", "tt", "tL"] of "Ett|t*2|tL"."""
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text.replace(",", ""))
    return text.split("|")


def layout(s: Args) -> str | None:
    """--pipeline-model-parallel-layout must have a stage for each of the pipeline, and all layers."""
    stages, depth = layout_stages(s.pipeline_model_parallel_layout), s.pipeline_model_parallel_size
    flag, layers = f"--pipeline-model-parallel-layout {s.pipeline_model_parallel_layout}", "".join(stages).count("t")
    if layers != s.num_layers:
        return f"{flag} has {layers} layers, but --num-layers is {s.num_layers}: give as many t"
    if len(stages) == depth:
        return None
    return f"{flag} has {len(stages)} stages, but --pipeline-model-parallel-size is {depth}: give as many"


def split(s: Args) -> str | None:
    """--num-layers must divide evenly over the stages, but for a first or last one with layers of its own."""
    flags = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")
    own = {flag: value(s, flag) for flag in flags if value(s, flag) is not None}
    layers, stages = s.num_layers - sum(own.values()), s.pipeline_model_parallel_size - len(own)
    if layers == 0 if stages == 0 else layers >= stages > 0 and layers % stages == 0:
        return None
    if own:
        given = " and ".join(f"{flag} {number}" for flag, number in own.items())
        return f"{given}: {stages} other stages cannot share the other {layers} of --num-layers {s.num_layers}"
    return (
        f"--num-layers {s.num_layers} cannot be split over --pipeline-model-parallel-size {stages}: use a multiple, "
        "or --decoder-first-pipeline-num-layers for an uneven split"
    )
