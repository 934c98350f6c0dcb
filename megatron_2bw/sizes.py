"""Rules about the sizes of a model, its batch and its pipeline, each in one place: the checks of the command line and
the planner's legality use them.

Invariant: pure Python. A rule answers one line that names the flags, or None. It reads Megatron's names of the
arguments, so it takes the command line's arguments or what planner/find/legality.py makes of a plan.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from megatron_2bw.flags.rule import OUT, Args, Rule, line, value
from megatron_2bw.schedules import schedule_of

Check = Callable[[Args], str | None]

# --- the schedule's options ------------------------------------------------------------------------------------------

ONE_CHUNK = Rule(
    "--num-virtual-stages-per-pipeline-rank", f"interleaved stages are not supported, a stage is one model chunk; {OUT}"
)
SHARDS = Rule("--use-distributed-optimizer", f"its shards have one version; {OUT}", "pipedream")
SCALES = Rule(
    "--fp16",
    "each stage would scale the loss by itself; add --loss-scale N, or use --bf16",
    "pipedream",
    lambda s: s.fp16 and s.loss_scale is None,
)
TIES = Rule(
    "--untie-embeddings-and-output-weights",
    "it must be given: each stage clips and steps alone, so tied embeddings would drift apart",
    "pipedream",
    lambda s: s.pipeline_model_parallel_size > 1 and not s.untie_embeddings_and_output_weights,
)


def only(schedule: str, flag: str, default: object) -> Rule:
    """A flag that only `schedule` reads, so it must have its default with the others."""
    remedy = "leave it out" if default is None else f"leave it out, or add {flag} {default} after it"  # a script has it
    text = f"{flag} has no effect without --pipeline-schedule {schedule}: {remedy}"
    return line(text, lambda s: s.pipeline_schedule != schedule and value(s, flag) != default)


SLOTS = only("2bw", "--two-bw-gradient-slots", 2)
EXTRAPOLATES = only("2bw", "--two-bw-correction", "none")
ROUND = only("gpipe", "--gpipe-round", None)


def extra_warmup(s: Args) -> str | None:
    """--two-bw-extra-warmup needs 2bw and several stages, and one number or one for each boundary between stages."""
    extra, boundaries = s.two_bw_extra_warmup, s.pipeline_model_parallel_size - 1
    if extra and (s.pipeline_schedule != "2bw" or not boundaries):
        return "--two-bw-extra-warmup has no effect without --pipeline-schedule 2bw and several stages: leave it out"
    if len(extra) in (0, 1, boundaries):
        return None
    return (
        f"--two-bw-extra-warmup has {len(extra)} numbers: give one, or one for each of the {boundaries} boundaries "
        "between stages"
    )


# --- processes and the batch -----------------------------------------------------------------------------------------


def processes(s: Args) -> str | None:
    """The number of processes must be a multiple of --pipeline-model-parallel-size x --tensor-model-parallel-size x
    --context-parallel-size."""
    flags = ("--pipeline-model-parallel-size", "--tensor-model-parallel-size", "--context-parallel-size")
    sizes = [(flag, value(s, flag)) for flag in flags]
    needed = math.prod(size for _, size in sizes)
    if s.world_size % needed == 0:
        return None
    product = " x ".join(f"{flag} {size}" for flag, size in sizes if size > 1)
    return (
        f"{product} needs a multiple of {needed} processes, but there are {s.world_size}: "
        "change the sizes, or the number of processes (--nproc, torchrun's --nproc-per-node)"
    )


def _pipelines(s: Args) -> int:
    return s.world_size // (s.pipeline_model_parallel_size * s.tensor_model_parallel_size * s.context_parallel_size)


def _batch(s: Args) -> tuple[int, int]:
    """The samples of a batch, and those of one microbatch on each pipeline."""
    replica = s.micro_batch_size * _pipelines(s)
    return s.global_batch_size or replica, replica


def batch(s: Args) -> str | None:
    """--global-batch-size must be a multiple of --micro-batch-size x pipelines, and at most --train-samples."""
    size, replica = _batch(s)
    if s.train_samples and s.train_samples < size:
        return f"--train-samples {s.train_samples} is less than one --global-batch-size {size}"
    if size % replica and not s.decrease_batch_size_if_needed:
        return (
            f"--global-batch-size {size} is not a multiple of --micro-batch-size {s.micro_batch_size} "
            f"x {_pipelines(s)} pipelines: use a multiple of {replica}"
        )
    return None


EVALUATION = (
    line(
        "--full-validation takes one sample at a time: with several stages it needs --eval-micro-batch-size 1",
        lambda s: (
            s.full_validation
            and s.tensor_model_parallel_size * s.pipeline_model_parallel_size > 1
            and (s.eval_micro_batch_size or s.micro_batch_size) != 1
        ),
    ),
    line(
        "--eval-micro-batch-size {given} must equal --micro-batch-size {a.micro_batch_size} with tensor parallelism: "
        "leave it out",
        lambda s: s.tensor_model_parallel_size > 1 and s.eval_micro_batch_size not in (None, s.micro_batch_size),
    ),
)


def microbatches(s: Args) -> str | None:
    """--global-batch-size must give each pipeline the microbatches that the schedule needs: 2bw one for each stage, and
    more with --two-bw-extra-warmup."""
    stages, extra = s.pipeline_model_parallel_size, s.two_bw_extra_warmup
    schedule = schedule_of(s.pipeline_schedule, gradient_slots=s.two_bw_gradient_slots, extra_warmup=extra)
    if schedule is None or len(extra) not in (0, 1, stages - 1):
        return None
    size, replica = _batch(s)
    number, needed, pipelines = size // replica, schedule.min_microbatches(stages), _pipelines(s)
    if number >= needed:
        return None
    reason = "with --two-bw-extra-warmup needs" if extra else "needs as many as there are stages,"
    return (
        f"--global-batch-size {size} gives {number} microbatch{'es' * (number != 1)} on each of "
        f"{pipelines} pipeline{'s' * (pipelines != 1)}, but --pipeline-schedule {schedule.name} {reason} {needed}: use "
        f"--global-batch-size {needed * replica} or more"
    )


def gpipe_round(s: Args) -> str | None:
    """--gpipe-round must be at most the microbatches of a batch on each pipeline."""
    size, replica = _batch(s)
    number = size // replica
    if s.gpipe_round is None or s.gpipe_round <= number:
        return None
    return (
        f"--gpipe-round {s.gpipe_round} is more than the {number} microbatch{'es' * (number != 1)} of a batch on each "
        f"pipeline: give at most {number}, or leave it out to run all in one round"
    )


# --- the model -------------------------------------------------------------------------------------------------------

HEADS = line(
    "--tensor-model-parallel-size {given} does not divide --num-attention-heads {a.num_attention_heads}",
    lambda s: s.num_attention_heads % s.tensor_model_parallel_size,
)
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
FFN = line(
    "--tensor-model-parallel-size {given} does not divide --ffn-hidden-size {a.ffn_hidden_size}: use a size that does",
    lambda s: s.ffn_hidden_size % s.tensor_model_parallel_size,
)
SEQUENCE = line(
    "--tensor-model-parallel-size {given} with --sequence-parallel does not divide --seq-length {a.seq_length}: "
    "use a size that does, or leave --sequence-parallel out",
    lambda s: s.sequence_parallel and s.seq_length % s.tensor_model_parallel_size,
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
WIDTHS = (
    line(
        "--num-attention-heads {given} does not divide --hidden-size {a.hidden_size}",
        lambda s: s.hidden_size % s.num_attention_heads and s.kv_channels is None,
    ),
    line(
        "--num-query-groups {given} does not divide --num-attention-heads {a.num_attention_heads}",
        lambda s: s.group_query_attention and s.num_attention_heads % s.num_query_groups,
    ),
    HEADS,
    line(
        "--window-size takes two numbers, such as 128,0",
        lambda s: s.window_size is not None and len(s.window_size) != 2,
    ),
    line(
        "--padded-vocab-size {given} is less than --vocab-size {a.vocab_size}",
        lambda s: s.padded_vocab_size is not None and s.padded_vocab_size < (s.vocab_size or 0),
    ),
    line(
        "--seq-length {given} is more than --max-position-embeddings {a.max_position_embeddings}",
        lambda s: s.seq_length > s.max_position_embeddings,
    ),
    CONTEXT,
)


def layout_stages(text: str) -> list[str]:
    """The layers of each stage in Megatron's notation, such as ["Ett", "tt", "tL"] of "Ett|t*2|tL"."""
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text.replace(",", ""))
    return text.split("|")


def layout(s: Args) -> str | None:
    """--pipeline-model-parallel-layout must have all layers; this project's schedules take one chunk a stage."""
    stages, depth = layout_stages(s.pipeline_model_parallel_layout), s.pipeline_model_parallel_size
    flag, whole = f"--pipeline-model-parallel-layout {s.pipeline_model_parallel_layout}", "".join(stages)
    if {*whole} > {*"EtmL"} or whole.strip("t") not in ("EL", "E" + "t" * whole.count("t") + "L"):
        return f"{flag}: write the stages as Ett|tt|tL, with one E at the begin and one L at the end"
    if whole.count("t") != s.num_layers:
        return f"{flag} has {whole.count('t')} layers, but --num-layers is {s.num_layers}: give as many t"
    if len(stages) == depth or (s.pipeline_schedule == "megatron" and len(stages) % depth == 0):
        return None
    return (
        f"{flag} has {len(stages)} stages, but --pipeline-model-parallel-size is {depth}: give as many, with | between"
    )


def split(s: Args) -> str | None:
    """--num-layers must divide evenly over the stages, but for a first or last one with layers of its own."""
    if s.pipeline_model_parallel_layout:
        return layout(s)
    flags = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")
    own = {flag: value(s, flag) for flag in flags if value(s, flag) is not None}
    extra = s.account_for_embedding_in_pipeline_split + s.account_for_loss_in_pipeline_split
    layers, stages = s.num_layers + extra - sum(own.values()), s.pipeline_model_parallel_size - len(own)
    if layers == 0 if stages == 0 else layers >= stages > 0 and layers % stages == 0:
        return None
    if own:
        given = " and ".join(f"{flag} {number}" for flag, number in own.items())
        return f"{given}: {stages} other stages cannot share the other {layers} of --num-layers {s.num_layers}"
    return (
        f"--num-layers {s.num_layers} cannot be split over --pipeline-model-parallel-size {stages}: use a multiple, "
        "or --decoder-first-pipeline-num-layers for an uneven split"
    )


# Those of the command line, in their order. The planner's others Megatron finds later.
RULES = (processes, batch, *EVALUATION, microbatches, *WIDTHS, split)
