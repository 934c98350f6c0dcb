"""Whether a plan is one that Megatron 0.19 and this project's schedules run, and if not, why. Pure Python.

Invariant: what is legal here trains; Megatron's own check of its arguments (validate_args) accepts much that fails, or
builds another model, later. Each rule has one line, which names the flags and says what to do; those that the command
line shares stand in `megatron_2bw/sizes.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

from megatron_2bw import sizes
from megatron_2bw.flags.rule import Rule as FlagRule
from megatron_2bw.flags.rule import installed
from megatron_2bw.flags.unsupported import UNSUPPORTED
from megatron_2bw.models import model as models
from megatron_2bw.models import plan as plans
from megatron_2bw.models.model import Model
from megatron_2bw.models.plan import MODULES, PRECISION_AWARE, RECOMPUTE, Plan
from megatron_2bw.schedules import SCHEDULE_NAMES, SCHEDULES

PRECISIONS = ("bf16", "fp16", "fp32", "fp8")


@dataclass(frozen=True)
class Violation:
    """A broken rule: its cause, the same for every plan, and one line for this plan."""

    rule: str
    message: str


class Case(NamedTuple):
    """A plan, its model, and what it runs on: the number of GPUs, the floats of the weights, whether GPUs have bf16."""

    plan: Plan
    model: Model
    gpus: int
    precision: str
    bf16: bool
    sizes: SimpleNamespace


class Rule(NamedTuple):
    """What a legal plan does not break.

    cause   the same for every plan, so that rejections can be counted by cause
    breaks  the line for a case that breaks the rule, or None; with `line`, whether the case breaks it
    line    the line, with the case's fields in braces
    """

    cause: str
    breaks: Callable[[Case], object]
    line: str = ""


def violations(plan: Plan, model: Model, gpus: int, precision: str = "bf16", bf16: bool = True) -> list[Violation]:
    """All rules that `plan` breaks; [] if it is legal.

    Where a field has no meaning (a negative size, an unknown schedule), the rules between fields are not looked at.
    """
    case = _case(plan, model, gpus, precision, bf16)
    return _broken(FIELDS, case) or _broken(RULES, case)


def is_legal(plan: Plan, model: Model, gpus: int, precision: str = "bf16", bf16: bool = True) -> bool:
    """Whether `violations` would be empty. It stops at the first, for a search that asks this of many plans."""
    case = _case(plan, model, gpus, precision, bf16)
    for breaks in _CHECKS:
        if breaks(case):
            return False
    return True


def _broken(rules: tuple[Rule, ...], case: Case) -> list[Violation]:
    answers = ((rule, rule.breaks(case)) for rule in rules)
    return [Violation(rule.cause, rule.line.format(**case._asdict()) or str(found)) for rule, found in answers if found]


def _case(plan: Plan, model: Model, gpus: int, precision: str, bf16: bool) -> Case:
    given = {argument: getattr(plan, field) for field, argument in plans.ARGUMENTS.items()}
    given |= {argument: getattr(model, field) for field, argument in models.ARGUMENTS.items()}
    given |= dict(  # None: the flag is not given
        world_size=plan.gpus,
        decoder_first_pipeline_num_layers=plan.first or None,
        decoder_last_pipeline_num_layers=plan.last or None,
        num_virtual_stages_per_pipeline_rank=plan.virtual if plan.virtual > 1 else None,
        two_bw_correction="auto" if plan.extrapolate else "none",
        untie_embeddings_and_output_weights=not model.tied,
        pipeline_model_parallel_layout=plan.layout,
        fp16=precision == "fp16",
        loss_scale=None,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
    )
    return Case(plan, model, gpus, precision, bf16, SimpleNamespace(**given))


# --- single fields ---------------------------------------------------------------------------------------------------


def _whole(least: int, *numbers: object) -> bool:
    """Whether all are whole numbers of `least` or more."""
    for number in numbers:  # a search asks this often
        if type(number) is not int or number < least:
            return False
    return True


def _sizes(case: Case) -> str | None:
    plan = case.plan
    numbers = (plan.tensor, plan.depth, plan.width, plan.microbatch, plan.microbatches, plan.virtual, plan.context)
    if _whole(1, *numbers):
        return None
    names = (
        "--tensor-model-parallel-size",
        "--pipeline-model-parallel-size",
        "the data-parallel size (GPUs / (--tensor-model-parallel-size x --pipeline-model-parallel-size))",
        "--micro-batch-size",
        "the microbatches of a --global-batch-size",
        "--num-virtual-stages-per-pipeline-rank",
        "--context-parallel-size",
    )
    name, number = next((name, number) for name, number in zip(names, numbers) if not _whole(1, number))
    return f"{name}: {number!r} is not a whole number of 1 or more; use one"


def _warmup(case: Case) -> str | None:
    extra = case.plan.extra_warmup
    if _whole(0, *extra):
        return None
    listed = ",".join(map(str, extra))
    return f"--two-bw-extra-warmup {listed}: give whole numbers of 0 or more, or leave the flag out"


def _recompute(case: Case) -> str | None:
    plan, full = case.plan, case.plan.recompute == "full"
    layers, modules, block = plan.recompute_layers, plan.recompute_modules, plan.recompute_block
    if layers != 1 and not (full and layers > 1):
        return f"--recompute-num-layers {layers}: give a number of 1 or more, with --recompute-granularity full"
    if modules and (plan.recompute != "selective" or not {*modules} <= {*MODULES}):
        return f"--recompute-modules {' '.join(modules)}: give some of {', '.join(MODULES)}, with selective recompute"
    if block and (not full or block < 1 or layers > 1 or plan.virtual > 1):
        return (
            f"--recompute-method block with --recompute-num-layers {block}: give a number of 1 or more, with "
            "--recompute-granularity full and without virtual stages"
        )
    if plan.recompute in RECOMPUTE:
        return None
    return f"--recompute-granularity {plan.recompute}: use selective or full, or leave the flag out (none)"


FIELDS: tuple[Rule, ...] = (
    Rule("a size is not a positive whole number", _sizes),
    Rule(
        "layers of the first or last stage are not a positive whole number",
        lambda case: not _whole(0, case.plan.first, case.plan.last),
        "--decoder-first-pipeline-num-layers {plan.first!r}, --decoder-last-pipeline-num-layers {plan.last!r}: "
        "give whole numbers of 1 or more, or leave the flags out",
    ),
    Rule("extra warm-up is not whole numbers", _warmup),
    Rule(
        "a round is not a positive whole number",
        lambda case: case.plan.gpipe_round is not None and not _whole(1, case.plan.gpipe_round),
        "--gpipe-round {plan.gpipe_round!r}: give a whole number of 1 or more, or leave the flag out",
    ),
    Rule(
        "unknown schedule",
        lambda case: case.plan.schedule not in SCHEDULE_NAMES,
        f"--pipeline-schedule {{plan.schedule}}: use one of {', '.join(SCHEDULE_NAMES)}",
    ),
    Rule("unknown recompute granularity", _recompute),
    Rule(
        "unknown precision",
        lambda case: case.precision not in PRECISIONS,
        "--{precision} is no precision of Megatron's dense models here: use --bf16, --fp16, or neither (fp32)",
    ),
)


# --- between fields --------------------------------------------------------------------------------------------------


def _all_gpus(case: Case) -> str | None:
    # Megatron fills what it is given: with other sizes the data-parallel size, and the batch, would be others.
    plan, gpus = case.plan, case.gpus
    if plan.gpus == gpus:
        return None
    context = f"--context-parallel-size {plan.context} x " if plan.context > 1 else ""
    return (
        f"--tensor-model-parallel-size {plan.tensor} x {context}--pipeline-model-parallel-size {plan.depth} x "
        f"{plan.width} pipelines need {plan.gpus} GPUs, but there are {gpus}: choose sizes whose product is {gpus}"
    )


def may_divide_sequences(model: Model) -> bool:
    """Whether the entry script takes --sequence-parallel: with BERT only where Apex is installed."""
    return model.kind != "bert" or installed("apex")


def _why(scope: str, flag: str) -> str:
    """Why the entry script refuses the flag."""
    return next(rule.why for rule in UNSUPPORTED if rule.scope == scope and rule.flag == flag)


def _wide_enough_for_fp8(case: Case) -> bool:
    model = case.model
    return all(size / case.plan.tensor % 16 == 0 for size in (model.query_size, model.key_size, model.ffn))


def _is_late(case: Case) -> bool:
    schedule = SCHEDULES.get(case.plan.schedule)
    return schedule is not None and not schedule.flushes


def _even_split(case: Case) -> str | None:
    uneven = case.plan.first or case.plan.last or case.plan.stages or case.plan.depth > case.model.layers
    return None if uneven else sizes.split(case.sizes)


def _uneven_split(case: Case) -> str | None:
    """Megatron does not look at the sizes of the middle stages: none, or less than none, would pass."""
    plan = case.plan
    if not (plan.first or plan.last) or plan.depth > case.model.layers:
        return None
    if plan.depth > 1:
        return sizes.split(case.sizes)
    flags = (("--decoder-first-pipeline-num-layers", plan.first), ("--decoder-last-pipeline-num-layers", plan.last))
    given = " and ".join(f"{flag} {number}" for flag, number in flags if number)
    return f"{given} with --pipeline-model-parallel-size 1: the only stage has all layers; leave it out"


def _layout(case: Case) -> str | None:
    plan = case.plan
    if not plan.stages:
        return None
    if plan.first or plan.last or plan.virtual > 1 or min(plan.stages) < 1 or plan.depth == 1:
        return (
            f"--pipeline-model-parallel-layout {plan.layout}: give each of several stages a layer, and neither "
            "--decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers nor virtual stages"
        )
    return sizes.layout(case.sizes)


def _whole_chunks(case: Case) -> str | None:
    plan, model = case.plan, case.model
    if plan.virtual == 1 or plan.stages or sizes.split(case.sizes) or _uneven_split(case):
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


def _whole_groups(case: Case) -> str | None:
    # By default a chunk runs as many microbatches in a row as there are stages; fewer would make it wait for itself.
    plan = case.plan
    if plan.virtual == 1 or plan.microbatches % plan.depth == 0:
        return None
    return (
        f"--global-batch-size {plan.global_batch} gives {plan.microbatches} microbatches a pipeline, but "
        f"--num-virtual-stages-per-pipeline-rank {plan.virtual} with --pipeline-model-parallel-size {plan.depth} "
        f"needs a multiple of {plan.depth}: use a multiple of --global-batch-size "
        f"{plan.depth * plan.microbatch * plan.width}"
    )


def _slots(case: Case) -> str | None:
    wrong = case.plan.gradient_slots not in (1, 2)
    return sizes.SLOTS.message(case.sizes) or (
        f"--two-bw-gradient-slots {case.plan.gradient_slots}: use 1 or 2" if wrong else None
    )


def _shared(cause: str, rule: FlagRule) -> Rule:
    return Rule(cause, lambda case: rule.message(case.sizes))


# The rules that a search breaks most often come first.
RULES: tuple[Rule, ...] = (
    Rule("sizes do not use every GPU", _all_gpus),
    _shared("heads not divisible by tensor size", sizes.HEADS),
    _shared("query groups neither multiple nor divisor of tensor size", sizes.GROUPS),
    _shared("keys and values not divisible by tensor size", sizes.KEYS),
    _shared("feed-forward size not divisible by tensor size", sizes.FFN),
    _shared("sequence not divisible by tensor size", sizes.SEQUENCE),
    _shared("sequence parallelism with one tensor rank", sizes.SEQUENCE_RANKS),
    Rule(
        "sequence parallelism of BERT without Apex",
        lambda case: case.plan.sequence_parallel and not may_divide_sequences(case.model),
        "--sequence-parallel does not work with BERT: the norm of its head needs Apex, which is not installed; leave "
        "the flag out",
    ),
    _shared("sequence not divisible by context size", sizes.CONTEXT),
    Rule(
        "context parallelism of BERT",
        lambda case: case.plan.context > 1 and case.model.kind == "bert",
        "--context-parallel-size {plan.context} does not work with BERT: " + _why("bert", "--context-parallel-size"),
    ),
    Rule(
        "more stages than layers",
        lambda case: case.plan.depth > case.model.layers,
        "--pipeline-model-parallel-size {plan.depth} is more than --num-layers {model.layers}: every stage needs a "
        "layer; use fewer stages",
    ),
    Rule("layers not divisible by stages", _even_split),
    Rule("uneven split leaves no equal middle stages", _uneven_split),
    Rule("a layout of other layers or stages", _layout),
    Rule(
        "too few microbatches for the schedule",
        lambda case: sizes.microbatches(case.sizes) if case.plan.virtual == 1 else None,  # _whole_groups
    ),
    _shared("virtual stages only with Megatron's schedule", sizes.ONE_CHUNK),
    _shared("virtual stages with one pipeline stage", sizes.CHUNKS),
    Rule("layers of a stage not divisible by virtual stages", _whole_chunks),
    Rule("microbatches not divisible by stages with virtual stages", _whole_groups),
    Rule(
        "bf16 not on this GPU",
        lambda case: not case.bf16 and case.precision in ("bf16", "fp8"),
        "--bf16: the GPU has no bfloat16; use --fp16 instead",
    ),
    Rule(
        "fp8 only with Megatron's schedule",
        lambda case: case.precision == "fp8" and case.plan.schedule != "megatron",
        "--fp8-format does not work with --pipeline-schedule {plan.schedule}: " + _why("ours", "--fp8-format"),
    ),
    Rule(
        "widths that fp8 does not divide",
        lambda case: case.precision == "fp8" and not _wide_enough_for_fp8(case),
        "--fp8-format needs widths that are multiples of 16 on each of --tensor-model-parallel-size {plan.tensor}: use "
        "less",
    ),
    Rule(
        "precision-aware optimizer with a schedule that has no flush",
        lambda case: PRECISION_AWARE in case.plan.numerics and _is_late(case),
        f"{PRECISION_AWARE} does not work with --pipeline-schedule {{plan.schedule}}: "
        + _why("no flush", PRECISION_AWARE),
    ),
    Rule("gradient slots only with 2bw", _slots),
    Rule("extra warm-up only with 2bw, for each boundary", lambda case: sizes.extra_warmup(case.sizes)),
    _shared("extrapolation only with 2bw", sizes.EXTRAPOLATES),
    _shared("rounds only with gpipe", sizes.ROUND),
    Rule("a round of more microbatches than a batch has", lambda case: sizes.gpipe_round(case.sizes)),
    _shared("pipedream with the distributed optimizer", sizes.SHARDS),
    _shared("pipedream with tied embeddings", sizes.TIES),
    _shared("pipedream with fp16 and dynamic loss scale", sizes.SCALES),
)

_CHECKS = tuple(rule.breaks for rule in FIELDS + RULES)
