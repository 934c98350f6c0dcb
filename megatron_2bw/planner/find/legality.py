"""Whether a plan is one that Megatron 0.19 and this project's schedules run, and if not, why. Pure Python.

Invariant: what is legal here trains; Megatron's own check of its arguments (validate_args) accepts much that fails, or
builds another model, later. Each rule is one function that answers one line, which names the flags and says what to
do, or None. The cause beside it in the table is the same for every plan, so that rejections can be counted by cause.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from megatron_2bw.planner.describe.model import Model
from megatron_2bw.planner.describe.plan import RECOMPUTE, Plan
from megatron_2bw.schedules import SCHEDULE_NAMES

PRECISIONS = ("bf16", "fp16", "fp32")


@dataclass(frozen=True)
class Violation:
    """A broken rule: its cause, the same for every plan, and one line for this plan."""

    rule: str
    message: str


class Host(NamedTuple):
    """What a plan runs on: the number of GPUs, the floats of the weights, and whether the GPUs have bf16."""

    gpus: int
    precision: str
    bf16: bool


Rule = tuple[str, Callable[[Plan, Model, Host], str | None]]


def violations(plan: Plan, model: Model, gpus: int, precision: str = "bf16", bf16: bool = True) -> list[Violation]:
    """All rules that `plan` breaks; [] if it is legal.

    Where a field has no meaning (a negative size, an unknown schedule), the rules between fields are not looked at.
    """
    host = Host(gpus, precision, bf16)
    return _broken(FIELDS, plan, model, host) or _broken(RULES, plan, model, host)


def is_legal(plan: Plan, model: Model, gpus: int, precision: str = "bf16", bf16: bool = True) -> bool:
    """Whether `violations` would be empty. It stops at the first, for a search that asks this of many plans."""
    host = Host(gpus, precision, bf16)
    for check in _CHECKS:
        if check(plan, model, host) is not None:
            return False
    return True


def _broken(rules: tuple[Rule, ...], plan: Plan, model: Model, host: Host) -> list[Violation]:
    answers = ((cause, check(plan, model, host)) for cause, check in rules)
    return [Violation(cause, message) for cause, message in answers if message is not None]


# --- fields, each by itself ------------------------------------------------------------------------------------------


def _sizes(plan: Plan, model: Model, host: Host) -> str | None:
    numbers = (plan.tensor, plan.depth, plan.width, plan.microbatch, plan.microbatches, plan.virtual)
    if {*map(type, numbers)} == {int} and min(numbers) > 0:
        return None
    names = (
        "--tensor-model-parallel-size",
        "--pipeline-model-parallel-size",
        "the data-parallel size (GPUs / (--tensor-model-parallel-size x --pipeline-model-parallel-size))",
        "--micro-batch-size",
        "the microbatches of a --global-batch-size",
        "--num-virtual-stages-per-pipeline-rank",
    )
    name, number = next((n, x) for n, x in zip(names, numbers) if type(x) is not int or x < 1)
    return f"{name}: {number!r} is not a whole number of 1 or more; use one"


def _ends(plan: Plan, model: Model, host: Host) -> str | None:
    first, last = plan.first, plan.last
    if type(first) is int and type(last) is int and first >= 0 and last >= 0:
        return None
    return (
        f"--decoder-first-pipeline-num-layers {first!r}, --decoder-last-pipeline-num-layers {last!r}: "
        "give whole numbers of 1 or more, or leave the flags out"
    )


def _warmup(plan: Plan, model: Model, host: Host) -> str | None:
    if {*map(type, plan.extra_warmup)} <= {int} and min(plan.extra_warmup, default=0) >= 0:
        return None
    return f"--two-bw-extra-warmup {_listed(plan.extra_warmup)}: give whole numbers of 0 or more, or leave the flag out"


def _listed(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


def _schedule(plan: Plan, model: Model, host: Host) -> str | None:
    if plan.schedule in SCHEDULE_NAMES:
        return None
    return f"--pipeline-schedule {plan.schedule}: use one of {', '.join(SCHEDULE_NAMES)}"


def _recompute(plan: Plan, model: Model, host: Host) -> str | None:
    if plan.recompute in RECOMPUTE:
        return None
    return f"--recompute-granularity {plan.recompute}: use selective or full, or leave the flag out (none)"


def _precision(plan: Plan, model: Model, host: Host) -> str | None:
    if host.precision in PRECISIONS:
        return None
    return f"--{host.precision} is no precision of Megatron's dense models here: use --bf16, --fp16, or neither (fp32)"


FIELDS: tuple[Rule, ...] = (
    ("a size is not a positive whole number", _sizes),
    ("layers of the first or last stage are not a positive whole number", _ends),
    ("extra warm-up is not whole numbers", _warmup),
    ("unknown schedule", _schedule),
    ("unknown recompute granularity", _recompute),
    ("unknown precision", _precision),
)


# --- the GPUs and the batch ------------------------------------------------------------------------------------------


def _all_gpus(plan: Plan, model: Model, host: Host) -> str | None:
    # Megatron fills what it is given: with other sizes the data-parallel size, and the batch, would be others.
    if plan.gpus == host.gpus:
        return None
    return (
        f"--tensor-model-parallel-size {plan.tensor} x --pipeline-model-parallel-size {plan.depth} x {plan.width} "
        f"pipelines need {plan.gpus} GPUs, but there are {host.gpus}: choose sizes whose product is {host.gpus}"
    )


def _has_bf16(plan: Plan, model: Model, host: Host) -> str | None:
    if host.bf16 or host.precision != "bf16":
        return None
    return "--bf16: the GPU has no bfloat16; use --fp16 instead"


def _enough_microbatches(plan: Plan, model: Model, host: Host) -> str | None:
    if plan.virtual > 1 or _extra_warmup(plan, model, host):
        return None  # _whole_groups
    needed = plan.pipeline.min_microbatches(plan.depth)
    if plan.microbatches >= needed:
        return None
    extra = f" and --two-bw-extra-warmup {_listed(plan.extra_warmup)}" if any(plan.extra_warmup) else ""
    return (
        f"--global-batch-size {plan.global_batch} gives {plan.microbatches} microbatches on each of {plan.width} "
        f"pipelines, but --pipeline-schedule {plan.schedule} with --pipeline-model-parallel-size {plan.depth}{extra} "
        f"needs {needed}: use --global-batch-size {needed * plan.microbatch * plan.width} or more, or fewer stages"
    )


# --- tensor parallelism ----------------------------------------------------------------------------------------------


def _undivided(tensor: int, flag: str, size: int) -> str | None:
    if size % tensor == 0:
        return None
    return f"--tensor-model-parallel-size {tensor} does not divide {flag} {size}: use a size that does"


def _heads(plan: Plan, model: Model, host: Host) -> str | None:
    return _undivided(plan.tensor, "--num-attention-heads", model.heads)


def _groups(plan: Plan, model: Model, host: Host) -> str | None:
    groups, tensor = model.groups, plan.tensor
    if groups == model.heads or groups % tensor == 0 or tensor % groups == 0:
        return None
    return (
        f"--num-query-groups {groups} is neither a multiple nor a divisor of --tensor-model-parallel-size {tensor}: "
        "use a size for which it is"
    )


def _keys(plan: Plan, model: Model, host: Host) -> str | None:
    # Fewer groups than ranks are allowed, but the columns of the linear layer of queries, keys and values must divide.
    if 2 * model.key_size % plan.tensor == 0 or model.heads % plan.tensor or _groups(plan, model, host):
        return None
    return (
        f"--num-query-groups {model.groups} x --kv-channels {model.head_size}: --tensor-model-parallel-size "
        f"{plan.tensor} does not divide the {2 * model.key_size} columns of keys and values; use a smaller size"
    )


def _ffn(plan: Plan, model: Model, host: Host) -> str | None:
    return _undivided(plan.tensor, "--ffn-hidden-size", model.ffn)


def _sequence(plan: Plan, model: Model, host: Host) -> str | None:
    if not plan.sequence_parallel or model.sequence % plan.tensor == 0:
        return None
    return (
        f"--tensor-model-parallel-size {plan.tensor} with --sequence-parallel does not divide --seq-length "
        f"{model.sequence}: use a size that does, or leave --sequence-parallel out"
    )


def _sequence_ranks(plan: Plan, model: Model, host: Host) -> str | None:
    # Megatron's arguments drop the flag with a warning, its configuration raises an error.
    if not plan.sequence_parallel or plan.tensor > 1:
        return None
    return "--sequence-parallel has no effect with --tensor-model-parallel-size 1: leave it out"


# --- layers and stages -----------------------------------------------------------------------------------------------


def _layer_a_stage(plan: Plan, model: Model, host: Host) -> str | None:
    if plan.depth <= model.layers:
        return None
    return (
        f"--pipeline-model-parallel-size {plan.depth} is more than --num-layers {model.layers}: "
        "every stage needs a layer; use fewer stages"
    )


def _even_split(plan: Plan, model: Model, host: Host) -> str | None:
    if plan.first or plan.last or plan.depth > model.layers or model.layers % plan.depth == 0:
        return None
    return (
        f"--num-layers {model.layers} cannot be split evenly over --pipeline-model-parallel-size {plan.depth}: use "
        "a size that divides it, or --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers"
    )


def _uneven_split(plan: Plan, model: Model, host: Host) -> str | None:
    """Megatron does not look at the sizes of the middle stages: none, or less than none, would pass."""
    if not (plan.first or plan.last) or plan.depth > model.layers:
        return None
    stages = plan.depth - (plan.first > 0) - (plan.last > 0)
    layers = model.layers - plan.first - plan.last
    if plan.depth > 1 and (layers == 0 if stages == 0 else layers >= stages and layers % stages == 0):
        return None
    flags = (("--decoder-first-pipeline-num-layers", plan.first), ("--decoder-last-pipeline-num-layers", plan.last))
    given = " and ".join(f"{flag} {number}" for flag, number in flags if number)
    if plan.depth == 1:
        return f"{given} with --pipeline-model-parallel-size 1: the only stage has all layers; leave it out"
    return (
        f"{given}: {stages} other stages of --pipeline-model-parallel-size {plan.depth} cannot share the other "
        f"{layers} of --num-layers {model.layers}; choose numbers that leave each as many"
    )


# --- Megatron's interleaved stages -----------------------------------------------------------------------------------


def _interleaves(plan: Plan, model: Model, host: Host) -> str | None:
    if plan.virtual == 1 or plan.schedule == "megatron":
        return None
    return (
        f"--num-virtual-stages-per-pipeline-rank {plan.virtual} does not work with --pipeline-schedule "
        f"{plan.schedule}, whose stages are one model chunk: use --pipeline-schedule megatron, or leave it out"
    )


def _interleaves_stages(plan: Plan, model: Model, host: Host) -> str | None:
    if plan.virtual == 1 or plan.depth > 1:
        return None
    return (
        f"--num-virtual-stages-per-pipeline-rank {plan.virtual} needs --pipeline-model-parallel-size 2 or more: "
        "leave it out"
    )


def _whole_chunks(plan: Plan, model: Model, host: Host) -> str | None:
    if plan.virtual == 1 or any(rule(plan, model, host) for rule in (_layer_a_stage, _even_split, _uneven_split)):
        return None
    layers = plan.layers_of(model)
    if all(number % plan.virtual == 0 for number in layers):
        return None
    numbers = " or ".join(map(str, sorted(set(layers))))
    return (
        f"--num-virtual-stages-per-pipeline-rank {plan.virtual} does not divide the {numbers} "
        f"layers that a stage has with --num-layers {model.layers} and --pipeline-model-parallel-size {plan.depth}: "
        "use a number that does"
    )


def _whole_groups(plan: Plan, model: Model, host: Host) -> str | None:
    # By default a chunk runs as many microbatches in a row as there are stages; fewer would make it wait for itself.
    if plan.virtual == 1 or plan.microbatches % plan.depth == 0:
        return None
    batch = plan.depth * plan.microbatch * plan.width
    return (
        f"--global-batch-size {plan.global_batch} gives {plan.microbatches} microbatches a pipeline, but "
        f"--num-virtual-stages-per-pipeline-rank {plan.virtual} with --pipeline-model-parallel-size {plan.depth} "
        f"needs a multiple of {plan.depth}: use a multiple of --global-batch-size {batch}"
    )


# --- this project's schedules (arguments.py, REFUSED) ----------------------------------------------------------------


def _slots(plan: Plan, model: Model, host: Host) -> str | None:
    if plan.gradient_slots == 2 or (plan.gradient_slots == 1 and plan.schedule == "2bw"):
        return None
    advice = "use 1 or 2" if plan.schedule == "2bw" else "it has no effect; leave it out (2)"
    return f"--two-bw-gradient-slots {plan.gradient_slots} with --pipeline-schedule {plan.schedule}: {advice}"


def _extra_warmup(plan: Plan, model: Model, host: Host) -> str | None:
    if not plan.extra_warmup:
        return None
    flag = f"--two-bw-extra-warmup {_listed(plan.extra_warmup)}"
    if plan.schedule != "2bw" or plan.depth == 1:
        return f"{flag} has no effect without --pipeline-schedule 2bw and several stages: leave it out"
    if len(plan.extra_warmup) in (1, plan.depth - 1):
        return None
    return f"{flag}: give one number, or one for each of the {plan.depth - 1} boundaries between stages"


def _extrapolates(plan: Plan, model: Model, host: Host) -> str | None:
    if plan.schedule == "2bw" or not plan.extrapolate:
        return None
    return "--two-bw-correction extrapolate has no effect without --pipeline-schedule 2bw: leave it out"


def _pipedream_shards(plan: Plan, model: Model, host: Host) -> str | None:
    if plan.schedule != "pipedream" or not plan.distributed_optimizer:
        return None
    return (
        "--use-distributed-optimizer does not work with --pipeline-schedule pipedream: its shards have one version; "
        "leave it out"
    )


def _pipedream_ties(plan: Plan, model: Model, host: Host) -> str | None:
    if plan.schedule != "pipedream" or plan.depth == 1 or not model.tied:
        return None
    return (
        f"--pipeline-schedule pipedream with --pipeline-model-parallel-size {plan.depth}: each stage steps alone, so "
        "tied embeddings would drift apart; add --untie-embeddings-and-output-weights"
    )


def _pipedream_scales(plan: Plan, model: Model, host: Host) -> str | None:
    if plan.schedule != "pipedream" or host.precision != "fp16":
        return None
    return "--fp16 with --pipeline-schedule pipedream: each stage would scale the loss by itself; use --bf16, or fp32"


# The rules that a search breaks most often come first.
RULES: tuple[Rule, ...] = (
    ("sizes do not use every GPU", _all_gpus),
    ("heads not divisible by tensor size", _heads),
    ("query groups neither multiple nor divisor of tensor size", _groups),
    ("keys and values not divisible by tensor size", _keys),
    ("feed-forward size not divisible by tensor size", _ffn),
    ("sequence not divisible by tensor size", _sequence),
    ("sequence parallelism with one tensor rank", _sequence_ranks),
    ("more stages than layers", _layer_a_stage),
    ("layers not divisible by stages", _even_split),
    ("uneven split leaves no equal middle stages", _uneven_split),
    ("too few microbatches for the schedule", _enough_microbatches),
    ("virtual stages only with Megatron's schedule", _interleaves),
    ("virtual stages with one pipeline stage", _interleaves_stages),
    ("layers of a stage not divisible by virtual stages", _whole_chunks),
    ("microbatches not divisible by stages with virtual stages", _whole_groups),
    ("bf16 not on this GPU", _has_bf16),
    ("gradient slots only with 2bw", _slots),
    ("extra warm-up only with 2bw, for each boundary", _extra_warmup),
    ("extrapolation only with 2bw", _extrapolates),
    ("pipedream with the distributed optimizer", _pipedream_shards),
    ("pipedream with tied embeddings", _pipedream_ties),
    ("pipedream with fp16 and dynamic loss scale", _pipedream_scales),
)

_CHECKS = tuple(check for _, check in FIELDS + RULES)
