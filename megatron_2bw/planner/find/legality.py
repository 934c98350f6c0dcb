"""Whether a plan is one that Megatron 0.19 and this project's schedules run, and if not, why. Pure Python.

Invariant: what is legal here trains; Megatron's own check of its arguments (validate_args) accepts much that fails, or
builds another model, later. Each rule answers one line, which names the flags and says what to do; those that the
command line shares stand in `megatron_2bw/sizes.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace

from megatron_2bw import sizes
from megatron_2bw.flags.rule import installed, line
from megatron_2bw.models import model as models
from megatron_2bw.models import plan as plans
from megatron_2bw.models.model import Model
from megatron_2bw.models.plan import PRECISION_AWARE, Plan
from megatron_2bw.schedules import SCHEDULES

PRECISIONS = ("bf16", "fp16", "fp32", "fp8")


@dataclass(frozen=True)
class Violation:
    """A broken rule: its cause, the same for every plan, and one line for this plan."""

    rule: str
    message: str


def violations(plan: Plan, model: Model, gpus: int, precision: str = "bf16", bf16: bool = True) -> list[Violation]:
    """All rules that `plan` breaks; [] if it is legal. bf16: whether the GPUs have it."""
    return [*_broken(plan, model, gpus, precision, bf16)]


def is_legal(plan: Plan, model: Model, gpus: int, precision: str = "bf16", bf16: bool = True) -> bool:
    """Whether `violations` would be empty. It stops at the first, for a search that asks this of many plans."""
    return next(_broken(plan, model, gpus, precision, bf16), None) is None


def _broken(plan: Plan, model: Model, gpus: int, precision: str, bf16: bool) -> Iterator[Violation]:
    """By Megatron's names of the arguments, None where a flag is not given; and the plan and what it runs on."""
    given = {argument: getattr(plan, field) for field, argument in plans.ARGUMENTS.items()}
    given |= {argument: getattr(model, field) for field, argument in models.ARGUMENTS.items()}
    given |= dict(
        world_size=plan.gpus,
        decoder_first_pipeline_num_layers=plan.first or None,
        decoder_last_pipeline_num_layers=plan.last or None,
        num_virtual_stages_per_pipeline_rank=plan.virtual if plan.virtual > 1 else None,
        two_bw_correction="auto" if plan.extrapolate else "none",
        untie_embeddings_and_output_weights=not model.tied,
        pipeline_model_parallel_layout=plan.layout,
        fp16=precision == "fp16",
        fp8_format=precision == "fp8",
        loss_scale=None,
        use_precision_aware_optimizer=PRECISION_AWARE in plan.numerics,
    )
    case = SimpleNamespace(**given, plan=plan, model=model, gpus=gpus, precision=precision, has_bf16=bf16)
    for cause, rule in RULES.items():
        message = rule(case)
        if message:
            yield Violation(cause, message)


def _all_gpus(s: SimpleNamespace) -> str | None:
    # Megatron fills what it is given: with other sizes the data-parallel size, and the batch, would be others.
    plan, gpus = s.plan, s.gpus
    if plan.gpus == gpus:
        return None
    context = f"--context-parallel-size {plan.context} x " if plan.context > 1 else ""
    return (
        f"--tensor-model-parallel-size {plan.tensor} x {context}--pipeline-model-parallel-size {plan.depth} x "
        f"{plan.width} pipelines need {plan.gpus} GPUs, but there are {gpus}: choose sizes whose product is {gpus}"
    )


def may_divide_sequences(model: Model) -> bool:
    """Whether a run divides sequences over tensor-parallel ranks: a BERT's only where Apex is installed."""
    return model.kind != "bert" or installed("apex")


def _split(s: SimpleNamespace) -> str | None:
    """Megatron does not look at the sizes of the middle stages: none, or less than none, would pass."""
    plan = s.plan
    if plan.depth > s.num_layers:
        return f"--pipeline-model-parallel-size {plan.depth} is more than --num-layers {s.num_layers}: use fewer stages"
    if not plan.stages:
        return sizes.split(s)
    if plan.first or plan.last or plan.virtual > 1 or min(plan.stages) < 1 or plan.depth == 1:
        return (
            f"--pipeline-model-parallel-layout {plan.layout}: give each of several stages a layer, and neither "
            "--decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers nor virtual stages"
        )
    return sizes.layout(s)


def _whole_chunks(s: SimpleNamespace) -> str | None:
    plan = s.plan
    if plan.virtual == 1 or _split(s) or all(number % plan.virtual == 0 for number in plan.layers_of(s.model)):
        return None
    return (
        f"--num-virtual-stages-per-pipeline-rank {plan.virtual} does not divide the layers of a stage, with "
        f"--num-layers {s.num_layers} and --pipeline-model-parallel-size {plan.depth}: use a number that does"
    )


def _enough(s: SimpleNamespace) -> str | None:
    # By default a chunk runs as many microbatches in a row as there are stages; fewer would make it wait for itself.
    plan = s.plan
    if plan.virtual == 1:
        return sizes.microbatches(s)
    if plan.microbatches % plan.depth == 0:
        return None
    return (
        f"--global-batch-size {plan.global_batch} gives {plan.microbatches} microbatches a pipeline: "
        f"--num-virtual-stages-per-pipeline-rank {plan.virtual} needs a multiple of --pipeline-model-parallel-size "
        f"{plan.depth}; use a multiple of --global-batch-size {plan.depth * plan.microbatch * plan.width}"
    )


def _slots(s: SimpleNamespace) -> str | None:
    wrong = s.plan.gradient_slots not in (1, 2)
    return f"--two-bw-gradient-slots {s.plan.gradient_slots}: use 1 or 2" if wrong else sizes.SLOTS.message(s)


# By cause, which is the same for every plan, so that a search can count what it rejects. The rules that it breaks most
# often come first.
RULES: dict[str, Callable[[SimpleNamespace], str | None]] = {
    "sizes do not use every GPU": _all_gpus,
    "heads not divisible by tensor size": sizes.HEADS.message,
    "query groups neither multiple nor divisor of tensor size": sizes.GROUPS.message,
    "keys and values not divisible by tensor size": sizes.KEYS.message,
    "feed-forward size not divisible by tensor size": sizes.FFN.message,
    "sequence not divisible by tensor size": sizes.SEQUENCE.message,
    "sequence parallelism with one tensor rank": sizes.SEQUENCE_RANKS.message,
    "sequence parallelism of BERT without Apex": line(
        "--sequence-parallel needs Apex for the norm of a BERT's head, and Apex is not installed: leave the flag out",
        lambda s: s.sequence_parallel and not may_divide_sequences(s.model),
    ).message,
    "sequence not divisible by context size": sizes.CONTEXT.message,
    "context parallelism of BERT": line(
        "--context-parallel-size {given} does not work with BERT, whose sequences are not split: leave it out",
        lambda s: s.context_parallel_size > 1 and s.model.kind == "bert",
    ).message,
    "layers that the stages do not share": _split,
    "too few microbatches, or a part of a round": _enough,
    "virtual stages only with Megatron's schedule": sizes.ONE_CHUNK.message,
    "virtual stages with one pipeline stage": sizes.CHUNKS.message,
    "layers of a stage not divisible by virtual stages": _whole_chunks,
    "bf16 not on this GPU": line(
        "--bf16: the GPU has no bfloat16; use --fp16 instead",
        lambda s: not s.has_bf16 and s.precision in ("bf16", "fp8"),
    ).message,
    "fp8 only with Megatron's schedule": line(
        "--fp8-format does not work with --pipeline-schedule {a.pipeline_schedule}: fp8 weights are not versioned",
        lambda s: s.fp8_format and s.pipeline_schedule != "megatron",
    ).message,
    "widths that fp8 does not divide": line(
        "--fp8-format needs widths that are multiples of 16 on each tensor-parallel rank: use fewer",
        lambda s: (
            s.fp8_format
            and any(width / s.plan.tensor % 16 for width in (s.model.query_size, s.model.key_size, s.model.ffn))
        ),
    ).message,
    "precision-aware optimizer with a schedule that has no flush": line(
        f"{PRECISION_AWARE} does not work with --pipeline-schedule {{a.pipeline_schedule}}: its kernel writes one "
        "weight store only",
        lambda s: (
            s.use_precision_aware_optimizer
            and s.pipeline_schedule in SCHEDULES
            and not SCHEDULES[s.pipeline_schedule].flushes
        ),
    ).message,
    "gradient slots only with 2bw": _slots,
    "extra warm-up only with 2bw, for each boundary": sizes.extra_warmup,
    "extrapolation only with 2bw": sizes.EXTRAPOLATES.message,
    "rounds only with gpipe": sizes.ROUND.message,
    "a round of more microbatches than a batch has": sizes.gpipe_round,
    "pipedream with the distributed optimizer": sizes.SHARDS.message,
    "pipedream with tied embeddings": sizes.TIES.message,
    "pipedream with fp16 and dynamic loss scale": sizes.SCALES.message,
}
