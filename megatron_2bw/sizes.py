"""Rules about the sizes of a batch and its pipeline that a schedule of this project adds.

Invariant: pure Python. A rule answers one line that names the flags, or None. (The planner's rules about a plan are in
planner/find/legality.py.)
"""

from __future__ import annotations

import re
from collections.abc import Callable

from megatron_2bw.flags.rule import OUT, Args, Rule, asks, line, value
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


# --- the layers ------------------------------------------------------------------------------------------------------


def layout_stages(text: str) -> list[str]:
    """The layers of each stage in Megatron's notation, such as ["Ett", "tt", "tL"] of "Ett|t*2|tL"."""
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text.replace(",", ""))
    return text.split("|")
