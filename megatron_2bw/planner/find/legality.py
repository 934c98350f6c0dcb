"""Whether a plan is one that Megatron 0.19 and this project's schedules run, and if not, why. Pure Python.

Invariant: what is legal here trains; Megatron's own check of its arguments (validate_args) accepts much that fails, or
builds another model, later. Each rule answers one line, which names the flags and says what to do, or None; those that
the command line shares stand in `megatron_2bw/sizes.py`. The cause in the table is the same for every plan, so that
rejections can be counted by cause.
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
from megatron_2bw.planner.describe.model import Model
from megatron_2bw.planner.describe.plan import MODULES, PRECISION_AWARE, RECOMPUTE, Plan
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


Rule = tuple[str, Callable[[Case], str | None]]


def violations(plan: Plan, model: Model, gpus: int, precision: str = "bf16", bf16: bool = True) -> list[Violation]:
    """All rules that `plan` breaks; [] if it is legal.

    Where a field has no meaning (a negative size, an unknown schedule), the rules between fields are not looked at.
    """
    case = _case(plan, model, gpus, precision, bf16)
    return _broken(FIELDS, case) or _broken(RULES, case)


def is_legal(plan: Plan, model: Model, gpus: int, precision: str = "bf16", bf16: bool = True) -> bool:
    """Whether `violations` would be empty. It stops at the first, for a search that asks this of many plans."""
    case = _case(plan, model, gpus, precision, bf16)
    for check in _CHECKS:
        if check(case) is not None:
            return False
    return True


def _broken(rules: tuple[Rule, ...], case: Case) -> list[Violation]:
    answers = ((cause, check(case)) for cause, check in rules)
    return [Violation(cause, message) for cause, message in answers if message is not None]


def _case(plan: Plan, model: Model, gpus: int, precision: str, bf16: bool) -> Case:
    asked = SimpleNamespace(  # under Megatron's names; None: the flag is not given
        pipeline_schedule=plan.schedule,
        world_size=plan.gpus,
        tensor_model_parallel_size=plan.tensor,
        pipeline_model_parallel_size=plan.depth,
        micro_batch_size=plan.microbatch,
        global_batch_size=plan.global_batch,
        num_layers=model.layers,
        num_attention_heads=model.heads,
        num_query_groups=model.groups,
        kv_channels=model.head_size,
        ffn_hidden_size=model.ffn,
        seq_length=model.sequence,
        sequence_parallel=plan.sequence_parallel,
        decoder_first_pipeline_num_layers=plan.first or None,
        decoder_last_pipeline_num_layers=plan.last or None,
        num_virtual_stages_per_pipeline_rank=plan.virtual if plan.virtual > 1 else None,
        two_bw_gradient_slots=plan.gradient_slots,
        two_bw_extra_warmup=plan.extra_warmup,
        two_bw_correction="auto" if plan.extrapolate else "none",
        gpipe_round=plan.gpipe_round,
        use_distributed_optimizer=plan.distributed_optimizer,
        untie_embeddings_and_output_weights=not model.tied,
        context_parallel_size=plan.context,
        pipeline_model_parallel_layout=plan.layout,
        fp16=precision == "fp16",
        loss_scale=None,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
    )
    return Case(plan, model, gpus, precision, bf16, asked)


# --- single fields ---------------------------------------------------------------------------------------------------


def _sizes(case: Case) -> str | None:
    plan = case.plan
    numbers = (plan.tensor, plan.depth, plan.width, plan.microbatch, plan.microbatches, plan.virtual, plan.context)
    if {*map(type, numbers)} == {int} and min(numbers) > 0:
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
    name, number = next((n, x) for n, x in zip(names, numbers) if type(x) is not int or x < 1)
    return f"{name}: {number!r} is not a whole number of 1 or more; use one"


def _ends(case: Case) -> str | None:
    first, last = case.plan.first, case.plan.last
    if type(first) is int and type(last) is int and first >= 0 and last >= 0:
        return None
    return (
        f"--decoder-first-pipeline-num-layers {first!r}, --decoder-last-pipeline-num-layers {last!r}: "
        "give whole numbers of 1 or more, or leave the flags out"
    )


def _warmup(case: Case) -> str | None:
    extra = case.plan.extra_warmup
    if {*map(type, extra)} <= {int} and min(extra, default=0) >= 0:
        return None
    listed = ",".join(map(str, extra))
    return f"--two-bw-extra-warmup {listed}: give whole numbers of 0 or more, or leave the flag out"


def _round(case: Case) -> str | None:
    size = case.plan.gpipe_round
    if size is None or (type(size) is int and size > 0):
        return None
    return f"--gpipe-round {size!r}: give a whole number of 1 or more, or leave the flag out"


def _schedule(case: Case) -> str | None:
    if case.plan.schedule in SCHEDULE_NAMES:
        return None
    return f"--pipeline-schedule {case.plan.schedule}: use one of {', '.join(SCHEDULE_NAMES)}"


def _recompute(case: Case) -> str | None:
    if case.plan.recompute_layers != 1 and (case.plan.recompute != "full" or not case.plan.recompute_layers > 1):
        return (
            f"--recompute-num-layers {case.plan.recompute_layers}: give a number of 1 or more, "
            "with --recompute-granularity full"
        )
    modules, block = case.plan.recompute_modules, case.plan.recompute_block
    if modules and (case.plan.recompute != "selective" or not {*modules} <= {*MODULES}):
        return f"--recompute-modules {' '.join(modules)}: give some of {', '.join(MODULES)}, with selective recompute"
    if block and (
        case.plan.recompute != "full" or block < 1 or case.plan.recompute_layers > 1 or case.plan.virtual > 1
    ):
        return (
            f"--recompute-method block with --recompute-num-layers {block}: give a number of 1 or more, with "
            "--recompute-granularity full and without virtual stages"
        )
    if case.plan.recompute in RECOMPUTE:
        return None
    return f"--recompute-granularity {case.plan.recompute}: use selective or full, or leave the flag out (none)"


def _precision(case: Case) -> str | None:
    if case.precision in PRECISIONS:
        return None
    return f"--{case.precision} is no precision of Megatron's dense models here: use --bf16, --fp16, or neither (fp32)"


FIELDS: tuple[Rule, ...] = (
    ("a size is not a positive whole number", _sizes),
    ("layers of the first or last stage are not a positive whole number", _ends),
    ("extra warm-up is not whole numbers", _warmup),
    ("a round is not a positive whole number", _round),
    ("unknown schedule", _schedule),
    ("unknown recompute granularity", _recompute),
    ("unknown precision", _precision),
)


# --- the GPUs and the batch ------------------------------------------------------------------------------------------


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


def _has_bf16(case: Case) -> str | None:
    if case.bf16 or case.precision not in ("bf16", "fp8"):
        return None
    return "--bf16: the GPU has no bfloat16; use --fp16 instead"


# --- BERT ---------------------------------------------------------------------------------------------------------


def may_divide_sequences(model: Model) -> bool:
    """Whether the entry script takes --sequence-parallel: with BERT only where Apex is installed."""
    return model.kind != "bert" or installed("apex")


def _why(scope: str, flag: str) -> str:
    """Why the entry script refuses the flag."""
    return next(rule.why for rule in UNSUPPORTED if rule.scope == scope and rule.flag == flag)


def _divided_bert(case: Case) -> str | None:
    if not case.plan.sequence_parallel or may_divide_sequences(case.model):
        return None
    return f"--sequence-parallel does not work with BERT: {_why('bert', '--sequence-parallel')}"


def _context_of_bert(case: Case) -> str | None:
    if case.plan.context == 1 or case.model.kind != "bert":
        return None
    why = _why("bert", "--context-parallel-size")
    return f"--context-parallel-size {case.plan.context} does not work with BERT: {why}"


# --- precisions ------------------------------------------------------------------------------------------------------


def _fp8(case: Case) -> str | None:
    if case.precision != "fp8" or case.plan.schedule == "megatron":
        return None
    return f"--fp8-format does not work with --pipeline-schedule {case.plan.schedule}: {_why('ours', '--fp8-format')}"


def _fp8_sizes(case: Case) -> str | None:
    model, tensor = case.model, case.plan.tensor
    if case.precision != "fp8" or all(
        size / tensor % 16 == 0 for size in (model.query_size, model.key_size, model.ffn)
    ):
        return None
    return (
        f"--fp8-format needs widths that are multiples of 16 on each of --tensor-model-parallel-size {tensor}: use less"
    )


def _precision_aware(case: Case) -> str | None:
    plan = case.plan
    if PRECISION_AWARE not in plan.numerics or SCHEDULES.get(plan.schedule) is None or SCHEDULES[plan.schedule].flushes:
        return None
    return (
        f"{PRECISION_AWARE} does not work with --pipeline-schedule {plan.schedule}: {_why('no flush', PRECISION_AWARE)}"
    )


# --- layers and stages -----------------------------------------------------------------------------------------------


def _layer_a_stage(case: Case) -> str | None:
    if case.plan.depth <= case.model.layers:
        return None
    return (
        f"--pipeline-model-parallel-size {case.plan.depth} is more than --num-layers {case.model.layers}: "
        "every stage needs a layer; use fewer stages"
    )


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


# --- Megatron's interleaved stages -----------------------------------------------------------------------------------


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


# --- this project's schedules ----------------------------------------------------------------------------------------


def _enough_microbatches(case: Case) -> str | None:
    return sizes.microbatches(case.sizes) if case.plan.virtual == 1 else None  # _whole_groups


def _slots(case: Case) -> str | None:
    slots = case.plan.gradient_slots
    return sizes.SLOTS.message(case.sizes) or (
        None if slots in (1, 2) else f"--two-bw-gradient-slots {slots}: use 1 or 2"
    )


def _shared(rule: FlagRule) -> Callable[[Case], str | None]:
    return lambda case: rule.message(case.sizes)


# The rules that a search breaks most often come first.
RULES: tuple[Rule, ...] = (
    ("sizes do not use every GPU", _all_gpus),
    ("heads not divisible by tensor size", _shared(sizes.HEADS)),
    ("query groups neither multiple nor divisor of tensor size", _shared(sizes.GROUPS)),
    ("keys and values not divisible by tensor size", _shared(sizes.KEYS)),
    ("feed-forward size not divisible by tensor size", _shared(sizes.FFN)),
    ("sequence not divisible by tensor size", _shared(sizes.SEQUENCE)),
    ("sequence parallelism with one tensor rank", _shared(sizes.SEQUENCE_RANKS)),
    ("sequence parallelism of BERT without Apex", _divided_bert),
    ("sequence not divisible by context size", _shared(sizes.CONTEXT)),
    ("context parallelism of BERT", _context_of_bert),
    ("more stages than layers", _layer_a_stage),
    ("layers not divisible by stages", _even_split),
    ("uneven split leaves no equal middle stages", _uneven_split),
    ("a layout of other layers or stages", _layout),
    ("too few microbatches for the schedule", _enough_microbatches),
    ("virtual stages only with Megatron's schedule", _shared(sizes.ONE_CHUNK)),
    ("virtual stages with one pipeline stage", _shared(sizes.CHUNKS)),
    ("layers of a stage not divisible by virtual stages", _whole_chunks),
    ("microbatches not divisible by stages with virtual stages", _whole_groups),
    ("bf16 not on this GPU", _has_bf16),
    ("fp8 only with Megatron's schedule", _fp8),
    ("widths that fp8 does not divide", _fp8_sizes),
    ("precision-aware optimizer with a schedule that has no flush", _precision_aware),
    ("gradient slots only with 2bw", _slots),
    ("extra warm-up only with 2bw, for each boundary", lambda case: sizes.extra_warmup(case.sizes)),
    ("extrapolation only with 2bw", _shared(sizes.EXTRAPOLATES)),
    ("rounds only with gpipe", _shared(sizes.ROUND)),
    ("a round of more microbatches than a batch has", lambda case: sizes.gpipe_round(case.sizes)),
    ("pipedream with the distributed optimizer", _shared(sizes.SHARDS)),
    ("pipedream with tied embeddings", _shared(sizes.TIES)),
    ("pipedream with fp16 and dynamic loss scale", _shared(sizes.SCALES)),
)

_CHECKS = tuple(check for _, check in FIELDS + RULES)
