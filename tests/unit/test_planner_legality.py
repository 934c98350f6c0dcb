"""The planner's rules against Megatron's own parser, configuration, split of layers, and interleaved schedule."""

from __future__ import annotations

import argparse
import functools
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from megatron_2bw import cpu
from megatron_2bw.flags import checks
from megatron_2bw.flags.parse import check, parse_early, prepare
from megatron_2bw.models.model import PRESETS, Model
from megatron_2bw.models.plan import Plan
from megatron_2bw.planner.find.legality import FIELDS, RULES, is_legal, violations
from megatron_2bw.schedules import SCHEDULE_NAMES
from megatron_2bw.sizes import layout, layout_stages


class Stopped(Exception):
    """What `stop` raises here instead of ending the process."""


def stop(message: str):
    raise Stopped(message)


@pytest.fixture(scope="module", autouse=True)
def on_a_gpu_host():
    """Megatron looks for CUDA when it is imported and while it checks: the CPU answers. The flags are a GPU run's."""
    was_installed = cpu.installed()
    cpu.install()
    import megatron.training.arguments  # noqa: F401

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as the README says for tensor parallelism
        patch.setattr(cpu, "installed", lambda: False)
        patch.setattr(checks, "installed", lambda package: True)  # Transformer Engine
        yield
    if not was_installed:
        cpu.uninstall()


# --- one case a rule -------------------------------------------------------------------------------------------------

GPT = PRESETS["gpt-1.3b"]  # 24 layers, 16 heads, sequence 512
LEGAL = Plan(tensor=2, depth=4, width=2, microbatch=1, microbatches=8)


def broken(
    cause: str, words: str, model: Model = GPT, gpus: int = 16, precision: str = "bf16", bf16: bool = True, **plan
):
    """A plan that breaks one rule, its cause, and words of the message: flags and values."""
    return pytest.param(cause, words, (replace(LEGAL, **plan), model, gpus, precision, bf16), id=f"{cause}: {words}")


CASES = [
    broken("a size is not a positive whole number", "--tensor-model-parallel-size: 0", tensor=0),
    broken("a size is not a positive whole number", "--pipeline-model-parallel-size: -4", depth=-4),
    broken("a size is not a positive whole number", "data-parallel size (GPUs / (--tensor", width=0),
    broken("a size is not a positive whole number", "--micro-batch-size: 1.5", microbatch=1.5),
    broken("a size is not a positive whole number", "--global-batch-size: True", microbatches=True),
    broken("a size is not a positive whole number", "--num-virtual-stages-per-pipeline-rank: 0", virtual=0),
    broken(
        "layers of the first or last stage are not a positive whole number",
        "--decoder-first-pipeline-num-layers -1",
        first=-1,
    ),
    broken(
        "layers of the first or last stage are not a positive whole number",
        "--decoder-last-pipeline-num-layers 2.0",
        last=2.0,
    ),
    broken("unknown schedule", "--pipeline-schedule 3bw", schedule="3bw"),
    broken("unknown recompute granularity", "--recompute-granularity half", recompute="half"),
    broken("unknown recompute granularity", "--recompute-num-layers 3", recompute_layers=3),
    broken("unknown recompute granularity", "--recompute-num-layers 0", recompute="full", recompute_layers=0),
    broken("unknown recompute granularity", "--recompute-modules mlp: give some of", recompute_modules=("mlp",)),
    broken(
        "unknown recompute granularity", "--recompute-modules moe", recompute="selective", recompute_modules=("moe",)
    ),
    broken(
        "unknown recompute granularity", "--recompute-method block with --recompute-num-layers 2", recompute_block=2
    ),
    broken("unknown precision", "--fp4", precision="fp4"),
    broken(
        "fp8 only with Megatron's schedule", "--fp8-format does not work with --pipeline-schedule 2bw", precision="fp8"
    ),
    broken(
        "widths that fp8 does not divide",
        "--fp8-format needs widths that are multiples of 16",
        model=replace(GPT, ffn=8200),
        schedule="megatron",
        precision="fp8",
    ),
    broken(
        "precision-aware optimizer with a schedule that has no flush",
        "--use-precision-aware-optimizer does not work with --pipeline-schedule 2bw: its kernel",
        distributed_optimizer=True,
        numerics=("--use-precision-aware-optimizer",),
    ),
    broken(
        "sizes do not use every GPU", "--tensor-model-parallel-size 2 x --pipeline-model-parallel-size 4 x 1", width=1
    ),
    broken("sizes do not use every GPU", "but there are 17", gpus=17),
    broken(
        "heads not divisible by tensor size",
        "--tensor-model-parallel-size 4 does not divide --num-attention-heads 18",
        model=replace(GPT, heads=18, groups=2, head_size=64),
        tensor=4,
        width=1,
    ),
    broken(
        "query groups neither multiple nor divisor of tensor size",
        "--num-query-groups 6 is neither",
        model=replace(GPT, heads=24, groups=6, head_size=128),
        tensor=4,
        width=1,
    ),
    broken(
        "keys and values not divisible by tensor size",
        "--num-query-groups 1 x --kv-channels 3",
        model=replace(GPT, groups=1, head_size=3),
        tensor=4,
        width=1,
    ),
    broken(
        "feed-forward size not divisible by tensor size",
        "does not divide --ffn-hidden-size 8193",
        model=replace(GPT, ffn=8193),
    ),
    broken(
        "sequence not divisible by tensor size",
        "--sequence-parallel does not divide --seq-length 511",
        model=replace(GPT, sequence=511),
        sequence_parallel=True,
    ),
    broken(
        "sequence parallelism with one tensor rank",
        "--sequence-parallel has no effect with --tensor-model-parallel-size",
        sequence_parallel=True,
        tensor=1,
        width=4,
    ),
    broken(
        "sequence parallelism of BERT without Apex",
        "--sequence-parallel does not work with BERT: the norm of its head needs Apex",
        model=PRESETS["bert-24"],
        sequence_parallel=True,
    ),
    broken(
        "sequence not divisible by context size",
        "--context-parallel-size 2 needs a --seq-length, now 510, that is a multiple of twice that",
        model=replace(GPT, sequence=510),
        width=1,
        context=2,
    ),
    broken(
        "sequence not divisible by context size",
        "with --sequence-parallel of --tensor-model-parallel-size times that",
        model=replace(GPT, sequence=528),
        tensor=8,
        context=4,
        width=1,
        gpus=128,
        sequence_parallel=True,
    ),
    broken(
        "context parallelism of BERT",
        "--context-parallel-size 2 does not work with BERT: ",
        model=PRESETS["bert-24"],
        width=1,
        context=2,
    ),
    broken(
        "more stages than layers",
        "--pipeline-model-parallel-size 4 is more than --num-layers 3",
        model=replace(GPT, layers=3),
    ),
    broken("more stages than layers", "is more than --num-layers 3", model=replace(GPT, layers=3), first=1, last=1),
    broken(
        "layers not divisible by stages",
        "--num-layers 26 cannot be split over --pipeline-model-parallel-size 4",
        model=replace(GPT, layers=26),
    ),
    broken(
        "uneven split leaves no equal middle stages", "--decoder-first-pipeline-num-layers 5: 3 other stages", first=5
    ),
    broken(
        "uneven split leaves no equal middle stages", "--decoder-last-pipeline-num-layers 7: 3 other stages", last=7
    ),
    broken(
        "uneven split leaves no equal middle stages",
        "first-pipeline-num-layers 12 and --decoder-last-pipeline-num-layer",
        first=12,
        last=12,
    ),
    broken("uneven split leaves no equal middle stages", "cannot share the other -2", first=13, last=13),
    broken(
        "uneven split leaves no equal middle stages",
        "--decoder-last-pipeline-num-layers 11: 0 other stages cannot share the other 2",
        first=11,
        last=11,
        depth=2,
        width=4,
    ),
    broken(
        "uneven split leaves no equal middle stages",
        "--pipeline-model-parallel-size 1: the only stage has all",
        first=12,
        depth=1,
        width=8,
    ),
    broken(
        "uneven split leaves no equal middle stages",
        "--decoder-last-pipeline-num-layers 24 with --pipeline-model-",
        last=24,
        depth=1,
        width=8,
    ),
    broken(
        "too few microbatches for the schedule",
        "--pipeline-schedule 2bw needs as many as there are stages, 4: use --global-batch-size 8 or more",
        microbatches=3,
    ),
    broken(
        "virtual stages only with Megatron's schedule",
        "does not work with --pipeline-schedule 2bw: interleaved stages are not supported",
        virtual=2,
    ),
    broken(
        "virtual stages with one pipeline stage",
        "needs --pipeline-model-parallel-size 2 or more",
        virtual=2,
        depth=1,
        width=8,
        schedule="megatron",
    ),
    broken(
        "layers of a stage not divisible by virtual stages",
        "--num-virtual-stages-per-pipeline-rank 4 does not divide the 6 layers",
        virtual=4,
        schedule="megatron",
    ),
    broken(
        "layers of a stage not divisible by virtual stages",
        "does not divide the 3 or 7 layers",
        virtual=7,
        schedule="megatron",
        first=3,
    ),
    broken(
        "microbatches not divisible by stages with virtual stages",
        "--global-batch-size 20 gives 10 microbatches a pipeline, but --num-virtual",
        virtual=2,
        schedule="megatron",
        microbatches=10,
    ),
    broken(
        "microbatches not divisible by stages with virtual stages",
        "use a multiple of --global-batch-size 8",
        virtual=2,
        schedule="megatron",
        microbatches=2,
    ),
    broken(
        "a layout of other layers or stages",
        "--pipeline-model-parallel-layout Et*8|t*7|t*6|t*4L has 25 layers, but --num-layers is 24",
        stages=(8, 7, 6, 4),
    ),
    broken(
        "a layout of other layers or stages",
        "Et*12|t*7|t*5L has 3 stages, but --pipeline-model-parallel-size is 4",
        stages=(12, 7, 5),
    ),
    broken("a layout of other layers or stages", "give each of several stages a layer", stages=(12, 7, 5, 0)),
    broken("bf16 not on this GPU", "--bf16: the GPU has no bfloat16; use --fp16", bf16=False),
    broken(
        "gradient slots only with 2bw",
        "--two-bw-gradient-slots has no effect without --pipeline-schedule 2bw",
        schedule="gpipe",
        gradient_slots=1,
    ),
    broken("gradient slots only with 2bw", "--two-bw-gradient-slots 3: use 1 or 2", gradient_slots=3),
    broken(
        "extra warm-up is not whole numbers",
        "--two-bw-extra-warmup 1,-1,0: give whole numbers",
        extra_warmup=(1, -1, 0),
    ),
    broken("extra warm-up is not whole numbers", "--two-bw-extra-warmup 0.5", extra_warmup=(0.5,)),
    broken("a round is not a positive whole number", "--gpipe-round 0: give a whole", schedule="gpipe", gpipe_round=0),
    broken("rounds only with gpipe", "--gpipe-round has no effect without --pipeline-schedule gpipe", gpipe_round=2),
    broken(
        "a round of more microbatches than a batch has",
        "--gpipe-round 9 is more than the 8 microbatches",
        schedule="gpipe",
        gpipe_round=9,
    ),
    broken("extrapolation only with 2bw", "--two-bw-correction has no effect", schedule="gpipe", extrapolate=True),
    broken(
        "extra warm-up only with 2bw, for each boundary",
        "--two-bw-extra-warmup has no effect without",
        schedule="gpipe",
        extra_warmup=(1,),
    ),
    broken(
        "extra warm-up only with 2bw, for each boundary",
        "and several stages: leave it out",
        depth=1,
        width=8,
        extra_warmup=(1,),
    ),
    broken("extra warm-up only with 2bw, for each boundary", "has 2 numbers: give one or ", extra_warmup=(0, 1)),
    broken(
        "too few microbatches for the schedule",
        "with --two-bw-extra-warmup needs 6: use --global-batch-size 12 or more",
        microbatches=5,
        extra_warmup=(0, 2, 0),
    ),
    broken(
        "pipedream with the distributed optimizer",
        "--use-distributed-optimizer does not work with --pipeline-schedule",
        model=replace(GPT, tied=False),
        schedule="pipedream",
        distributed_optimizer=True,
    ),
    broken(
        "pipedream with tied embeddings",
        "--untie-embeddings-and-output-weights does not work with --pipeline-schedule pipedream: it must be given",
        schedule="pipedream",
    ),
    broken(
        "pipedream with fp16 and dynamic loss scale",
        "--fp16 does not work with --pipeline-schedule pipedream",
        model=replace(GPT, tied=False),
        precision="fp16",
        schedule="pipedream",
    ),
]


@pytest.mark.parametrize("cause, words, arguments", CASES)
def test_a_broken_rule_is_the_only_one_named_with_its_flag(cause, words, arguments):
    found = violations(*arguments)
    assert [violation.rule for violation in found] == [cause]
    message = found[0].message
    assert words in message and "--" in message and "\n" not in message and len(message) < 300
    assert not is_legal(*arguments)


def test_every_rule_has_a_case_and_a_cause_of_its_own():
    causes = [rule.cause for rule in FIELDS + RULES]
    assert {*causes} > BUILDING | OURS
    assert len(set(causes)) == len(causes) and set(causes) == {case.values[0] for case in CASES}


def test_all_broken_rules_are_told():
    plan = replace(LEGAL, tensor=3, depth=5, microbatches=4, first=2, gradient_slots=0, sequence_parallel=True)
    assert [violation.rule for violation in violations(plan, GPT, 64, bf16=False)] == [
        "sizes do not use every GPU",
        "heads not divisible by tensor size",
        "feed-forward size not divisible by tensor size",
        "sequence not divisible by tensor size",
        "uneven split leaves no equal middle stages",
        "too few microbatches for the schedule",
        "bf16 not on this GPU",
        "gradient slots only with 2bw",
    ]


@pytest.mark.parametrize(
    "plan",
    [
        LEGAL,
        replace(LEGAL, first=3),
        replace(LEGAL, stages=(8, 7, 5, 4)),
        replace(LEGAL, first=2, last=4),
        replace(LEGAL, depth=2, width=4, first=5, last=19),
        replace(LEGAL, depth=1, width=8),
        replace(LEGAL, microbatches=4),
        replace(LEGAL, gradient_slots=1),
        replace(LEGAL, microbatches=7, extra_warmup=(1,)),
        replace(LEGAL, microbatches=6, extra_warmup=(0, 2, 0)),
        replace(LEGAL, schedule="pipedream-flush", microbatches=1),
        replace(LEGAL, schedule="gpipe", gpipe_round=8),
        replace(LEGAL, schedule="megatron", microbatches=3),
        replace(LEGAL, schedule="megatron", virtual=3),
        replace(LEGAL, schedule="megatron", virtual=2, first=4, last=8),
        replace(LEGAL, tensor=16, depth=1, width=1),
        replace(LEGAL, sequence_parallel=True),
        replace(LEGAL, context=2, width=1),
    ],
    ids=str,
)
def test_limits_are_legal(plan):
    assert violations(plan, GPT, 16) == [] and is_legal(plan, GPT, 16)


# --- Megatron's parser and checks ------------------------------------------------------------------------------------

RUN = [
    "--mock-data",
    "--tokenizer-type",
    "NullTokenizer",
    "--train-iters",
    "10",
    "--lr",
    "1e-4",
    "--min-lr",
    "1e-5",
    "--eval-iters",
    "0",
    "--eval-interval",
    "100",
    "--num-workers",
    "0",
    "--device",
    "cuda",
]


@functools.cache
def parser_of(schedule: str) -> argparse.ArgumentParser:
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return prepare(parser, parse_early(["--pipeline-schedule", schedule], stop), stop)


def words_of(plan: Plan, model: Model, precision: str = "bf16") -> list[str]:
    return [*model.flags(), *plan.flags(precision), *RUN, "--vocab-size", str(model.vocab)]


def parsed(argv: list[str], gpus: int, checked: bool = True) -> argparse.Namespace:
    """The arguments after this project's checks and Megatron's. Stopped, or Megatron's own error, if one refuses."""
    from megatron.training.arguments import validate_args

    args = parser_of(argv[argv.index("--pipeline-schedule") + 1]).parse_args(argv)
    args.rank, args.world_size = 0, gpus
    if checked:
        check(args, stop)
    validate_args(args)
    return args


# What Megatron's validate_args accepts and what fails later, or trains another model (plan, model).
ACCEPTED_BUT_ILLEGAL = {
    "virtual stages, m % depth != 0": (replace(LEGAL, schedule="megatron", virtual=3, microbatches=6), GPT),
    "virtual stages, m < depth": (replace(LEGAL, schedule="megatron", virtual=3, microbatches=2), GPT),
    "virtual stages do not divide the layers of a stage": (replace(LEGAL, schedule="megatron", virtual=4), GPT),
    "uneven split, first = 5 of 24 on 4 stages": (replace(LEGAL, first=5), GPT),
    "uneven split, no layers for the middle": (replace(LEGAL, first=12, last=12), GPT),
    "uneven split, fewer than none for the middle": (replace(LEGAL, first=13, last=13), GPT),
    "uneven split, two stages that do not add up": (replace(LEGAL, depth=2, width=4, first=11, last=11), GPT),
    "uneven split of one stage": (replace(LEGAL, depth=1, width=8, first=12), GPT),
    "m < depth with 2bw": (replace(LEGAL, microbatches=3), GPT),
    "heads % tensor": (LEGAL, replace(GPT, heads=15, groups=15, head_size=64)),
    "query groups": (replace(LEGAL, tensor=4, width=1), replace(GPT, heads=24, groups=6, head_size=128)),
    "sequence % tensor": (replace(LEGAL, sequence_parallel=True), replace(GPT, sequence=511)),
    "feed-forward % tensor": (LEGAL, replace(GPT, ffn=8193)),
}


@pytest.mark.parametrize("plan, model", ACCEPTED_BUT_ILLEGAL.values(), ids=ACCEPTED_BUT_ILLEGAL)
def test_what_megatrons_check_wrongly_accepts_is_illegal(plan, model):
    gpus = plan.gpus
    assert parsed(words_of(plan, model), gpus, checked=False).data_parallel_size == plan.width
    assert len(violations(plan, model, gpus)) == 1 and not is_legal(plan, model, gpus)


def test_full_recompute_without_a_method_passes_megatrons_check_and_is_never_printed():
    plan = replace(LEGAL, recompute="full")
    argv = words_of(plan, GPT)
    place = argv.index("--recompute-method")
    assert argv[place + 1] == "uniform" and argv[place + 2 : place + 4] == ["--recompute-num-layers", "1"]
    args = parsed(argv[:place] + argv[place + 4 :], 16, checked=False)
    assert (args.recompute_granularity, args.recompute_method) == ("full", None)
    with pytest.raises(ValueError, match="recompute_method must be"):
        configuration(args)


# --- round trip ------------------------------------------------------------------------------------------------------

LLAMA, LLAMA70, BERT = PRESETS["llama-8b"], PRESETS["llama-70b"], PRESETS["bert-48"]
UNTIED = replace(GPT, tied=False)
QWEN = replace(LLAMA, name="qwen", layers=28, hidden=3584, heads=28, groups=4, ffn=18944, head_size=128, qkv_bias=True)
WIDE = replace(GPT, name="wide heads", head_size=256)
ONE_GROUP = replace(LLAMA, name="one group", groups=1)


def case(model: Model, tensor: int, depth: int, width: int, microbatches: int, precision: str = "bf16", **fields):
    fields = {"sequence_parallel": tensor in (4, 8)} | fields
    plan = Plan(tensor, depth, width, fields.pop("microbatch", 1), microbatches, **fields)
    name = f"{model.name} {plan.name} {precision} " + " ".join(f"{key}={value}" for key, value in fields.items())
    return pytest.param(plan, model, precision, id=name)


ROUND_TRIP = [
    case(GPT, 1, 1, 1, 1),
    case(GPT, 1, 1, 8, 2, microbatch=4),
    case(GPT, 1, 8, 8, 8),
    case(GPT, 1, 4, 2, 4, "fp16", gradient_slots=1),
    case(GPT, 2, 4, 2, 9, recompute="full"),
    case(GPT, 2, 4, 2, 9, extra_warmup=(0, 1, 0)),
    case(GPT, 1, 4, 2, 10, extra_warmup=(2, 2, 2)),
    case(GPT, 1, 4, 2, 10, gradient_slots=1, extra_warmup=(1,)),
    case(GPT, 1, 4, 2, 8, extra_warmup=(0, 0, 0)),
    case(GPT, 1, 4, 2, 8, extrapolate=True, distributed_optimizer=True),
    case(GPT, 1, 4, 2, 8, schedule="gpipe", gpipe_round=3),
    case(GPT, 2, 4, 2, 4, "fp32", recompute="selective"),
    case(GPT, 2, 4, 2, 16, distributed_optimizer=True),
    case(GPT, 2, 4, 2, 16, pipeline_inside=True, gradient_slots=1, distributed_optimizer=True, recompute="full"),
    case(GPT, 1, 4, 1, 4, first=3),
    case(GPT, 1, 4, 1, 4, last=9),
    case(GPT, 1, 4, 1, 8, first=5, last=7, microbatch=2),
    case(GPT, 1, 2, 1, 8, first=11, last=13),
    case(GPT, 16, 3, 2, 12),
    case(WIDE, 2, 2, 2, 2),
    case(replace(GPT, name="odd sequence", sequence=511), 2, 2, 2, 2),
    case(LLAMA, 8, 4, 2, 32, recompute="selective", distributed_optimizer=True),
    case(LLAMA, 4, 2, 2, 8, first=15, pipeline_inside=True),
    case(LLAMA70, 8, 8, 4, 64, recompute="full", microbatch=2),
    case(QWEN, 4, 7, 1, 14, "fp16"),
    case(ONE_GROUP, 8, 2, 1, 2),
    case(BERT, 1, 8, 8, 8, "fp16"),
    case(BERT, 4, 16, 1, 16, recompute="full", sequence_parallel=False),
    case(GPT, 1, 4, 2, 1, schedule="pipedream-flush"),
    case(GPT, 2, 4, 2, 7, "fp16", schedule="pipedream-flush", recompute="full", distributed_optimizer=True),
    case(LLAMA, 2, 8, 2, 4, schedule="pipedream-flush", first=2, last=6),
    case(GPT, 1, 4, 2, 8, schedule="gpipe"),
    case(GPT, 2, 2, 2, 1, "fp32", schedule="gpipe", distributed_optimizer=True, microbatch=8),
    case(LLAMA, 4, 2, 1, 3, schedule="gpipe", recompute="full", recompute_layers=16, pipeline_inside=True),
    case(GPT, 1, 4, 2, 2, schedule="no-pipelining"),
    case(GPT, 4, 3, 2, 5, "fp16", schedule="no-pipelining", recompute="selective"),
    case(UNTIED, 1, 4, 2, 1, schedule="pipedream"),
    case(UNTIED, 2, 4, 2, 2, "fp32", schedule="pipedream", recompute="full", first=9),
    case(LLAMA, 2, 8, 1, 3, schedule="pipedream", pipeline_inside=True),
    case(GPT, 2, 1, 4, 3, schedule="pipedream"),
    case(GPT, 1, 4, 2, 2, schedule="megatron"),
    case(GPT, 2, 4, 2, 8, "fp16", schedule="megatron", recompute="full", distributed_optimizer=True),
    case(GPT, 1, 4, 2, 8, schedule="megatron", virtual=2),
    case(GPT, 2, 4, 2, 4, schedule="megatron", virtual=3, recompute="selective", pipeline_inside=True),
    case(GPT, 1, 2, 1, 6, schedule="megatron", virtual=12, microbatch=2),
    case(GPT, 1, 4, 1, 8, schedule="megatron", virtual=2, first=4, last=8),
    case(LLAMA70, 8, 4, 2, 16, schedule="megatron", virtual=5, recompute="full", distributed_optimizer=True),
    case(BERT, 2, 4, 2, 8, schedule="megatron", virtual=6),
    case(LLAMA, 2, 4, 2, 8, schedule="megatron", context=4, distributed_optimizer=True),
    case(LLAMA, 4, 2, 1, 8, context=2),
    case(GPT, 1, 4, 2, 8, stages=(8, 7, 5, 4)),
    case(GPT, 1, 4, 2, 8, recompute="selective", recompute_modules=("core_attn", "mlp")),
    case(GPT, 2, 4, 2, 8, schedule="megatron", recompute="selective", recompute_modules=("layernorm",)),
    case(GPT, 1, 4, 2, 8, recompute="full", recompute_block=5),
    case(LLAMA, 2, 4, 2, 8, "fp8", schedule="megatron"),
    case(GPT, 1, 4, 2, 8, numerics=("--grad-reduce-in-bf16", "--cross-entropy-loss-fusion")),
    case(
        GPT,
        *(1, 4, 2, 8),
        schedule="megatron",
        distributed_optimizer=True,
        numerics=("--use-precision-aware-optimizer", "--main-grads-dtype bf16", "--exp-avg-dtype fp8"),
    ),
    case(GPT, 1, 4, 2, 8, schedule="megatron", stages=(2, 9, 5, 8)),
    case(LLAMA, 1, 1, 8, 1, "fp32", schedule="megatron", distributed_optimizer=True),
]


def configuration(args: argparse.Namespace):
    """Megatron's configuration of the model, as it makes it from the arguments."""
    from megatron.training.argument_utils import core_transformer_config_from_args

    args.apply_rope_fusion = False  # of Transformer Engine, which need not be installed for this test
    return core_transformer_config_from_args(args)


def stages_of(config) -> list[int]:
    """Layers that Megatron builds on each stage."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    chunks, layout = range(config.virtual_pipeline_model_parallel_size or 1), config.pipeline_model_parallel_layout
    if layout:
        depth = range(config.pipeline_model_parallel_size)
        return [layout.get_num_layers_to_build(vp_stage=0, pp_rank=stage) for stage in depth]
    return [
        sum(get_num_layers_to_build(config, chunk, stage) for chunk in chunks)
        for stage in range(config.pipeline_model_parallel_size)
    ]


@pytest.mark.parametrize("plan, model, precision", ROUND_TRIP)
def test_a_legal_plans_flags_come_back_as_the_plan(plan, model, precision):
    assert violations(plan, model, plan.gpus, precision) == [] and is_legal(plan, model, plan.gpus, precision)
    args = parsed(words_of(plan, model, precision), plan.gpus)
    recompute = {
        "none": (None, None, None),
        "selective": ("selective", None, None),
        "full": ("full", "block" if plan.recompute_block else "uniform", plan.recompute_block or plan.recompute_layers),
    }
    expected = {
        "pipeline_schedule": plan.schedule,
        "tensor_model_parallel_size": plan.tensor,
        "pipeline_model_parallel_size": plan.depth,
        "data_parallel_size": plan.width,
        "context_parallel_size": plan.context,
        "recompute_modules": [*plan.recompute_modules] or None,
        "micro_batch_size": plan.microbatch,
        "global_batch_size": plan.global_batch,
        "decoder_first_pipeline_num_layers": plan.first or None,
        "decoder_last_pipeline_num_layers": plan.last or None,
        "virtual_pipeline_model_parallel_size": plan.virtual if plan.virtual > 1 else None,
        "sequence_parallel": plan.sequence_parallel,
        "two_bw_gradient_slots": plan.gradient_slots,
        "two_bw_correction": "auto" if plan.extrapolate else "none",
        "gpipe_round": plan.gpipe_round,
        "two_bw_extra_warmup": ()
        if not any(plan.extra)
        else plan.extra[:1]
        if len(set(plan.extra)) == 1
        else plan.extra,
        "use_distributed_optimizer": plan.distributed_optimizer,
        "use_tp_pp_dp_mapping": plan.pipeline_inside,
        "fp16": precision == "fp16",
        "bf16": precision in ("bf16", "fp8"),
        "fp8": "hybrid" if precision == "fp8" else None,
        "grad_reduce_in_bf16": "--grad-reduce-in-bf16" in plan.numerics,
        "cross_entropy_loss_fusion": "--cross-entropy-loss-fusion" in plan.numerics,
        "use_precision_aware_optimizer": "--use-precision-aware-optimizer" in plan.numerics,
        "accumulate_allreduce_grads_in_fp32": precision in ("bf16", "fp8")
        and not {"--grad-reduce-in-bf16", "--main-grads-dtype bf16"} & {*plan.numerics},
        "untie_embeddings_and_output_weights": not model.tied,
        "seq_length": model.sequence,
    } | dict(zip(("recompute_granularity", "recompute_method", "recompute_num_layers"), recompute[plan.recompute]))
    assert {name: getattr(args, name) for name in expected} == expected
    config = configuration(args)
    assert stages_of(config) == plan.layers_of(model)
    assert (config.num_layers, config.hidden_size, config.ffn_hidden_size) == (model.layers, model.hidden, model.ffn)
    assert (config.num_attention_heads, config.num_query_groups) == (model.heads, model.groups)
    assert (config.kv_channels, config.gated_linear_unit) == (model.head_size, model.gated)


def test_the_round_trip_covers_every_field():
    plans, models, precisions = (Counter(param.values[i] for param in ROUND_TRIP) for i in range(3))
    assert len(ROUND_TRIP) >= 40 and set(precisions) == {"bf16", "fp16", "fp32", "fp8"}
    assert {plan.schedule for plan in plans} == set(SCHEDULE_NAMES) and {model.kind for model in models} == {
        "gpt",
        "bert",
    }
    for name, least in (
        ("tensor", 4),
        ("depth", 6),
        ("virtual", 5),
        ("recompute", 3),
        ("gradient_slots", 2),
        ("distributed_optimizer", 2),
        ("pipeline_inside", 2),
        ("sequence_parallel", 2),
        ("first", 4),
        ("last", 4),
        ("extrapolate", 2),
        ("gpipe_round", 2),
        ("context", 3),
        ("stages", 3),
    ):
        assert len({getattr(plan, name) for plan in plans}) >= least, name


# Rules of this project's schedules.
OURS = {
    "too few microbatches for the schedule",
    "virtual stages only with Megatron's schedule",
    "pipedream with the distributed optimizer",
    "pipedream with tied embeddings",
    "pipedream with fp16 and dynamic loss scale",
}


@pytest.mark.parametrize("cause, words, arguments", [case for case in CASES if case.values[0] in OURS])
def test_this_projects_checks_refuse_it_too(cause, words, arguments):
    plan, model, gpus, precision, _ = arguments
    with pytest.raises(Stopped, match="--"):
        parsed(words_of(plan, model, precision), gpus)


# --- Megatron's own verdict ------------------------------------------------------------------------------------------


def configured(plan: Plan, model: Model):
    """Megatron's configuration of the plan, without its command line."""
    import torch
    from megatron.core.transformer import TransformerConfig

    full = plan.recompute == "full"
    return TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        ffn_hidden_size=model.ffn,
        num_query_groups=model.groups,
        kv_channels=model.head_size,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        tensor_model_parallel_size=plan.tensor,
        sequence_parallel=plan.sequence_parallel,
        pipeline_model_parallel_size=plan.depth,
        virtual_pipeline_model_parallel_size=plan.virtual if plan.virtual > 1 else None,
        num_layers_in_first_pipeline_stage=plan.first or None,
        num_layers_in_last_pipeline_stage=plan.last or None,
        recompute_granularity=None if plan.recompute == "none" else plan.recompute,
        recompute_method="uniform" if full else None,
        recompute_num_layers=plan.recompute_layers if full else None,
    )


def builds(plan: Plan, model: Model) -> bool:
    """Whether Megatron configures the plan, gives every stage layers, all of the model's, and divides the matrices."""
    from megatron.core.utils import divide

    try:
        stages = stages_of(configured(plan, model))
        divide(model.query_size + 2 * model.key_size, plan.tensor)
        divide(model.ffn, plan.tensor)
    except (ValueError, AssertionError):
        return False
    return min(stages) > 0 and sum(stages) == model.layers


@st.composite
def plans(draw) -> tuple[Plan, Model]:
    """Plans and models that are legal about as often as not."""
    tensor, depth = draw(st.sampled_from((1, 1, 1, 2, 2, 3, 4, 8))), draw(st.integers(1, 6))
    virtual = draw(st.sampled_from((1, 1, 2, 3))) if depth > 1 else 1
    first, last = (draw(st.sampled_from((0, 0, 0, 1, 2, 3, 4, 6))) if depth > 1 else 0 for _ in range(2))
    layers = draw(
        st.one_of(
            st.integers(1, 24),
            st.integers(1, 4).map(lambda k: max(1, k * virtual * depth)),
            st.integers(1, 4).map(lambda k: max(1, k * virtual * (depth - (first > 0) - (last > 0)) + first + last)),
        )
    )
    groups = draw(st.sampled_from((1, 2, 3, 4, 6, 8)))
    heads = groups * draw(st.sampled_from((4, 8, 1, 2, 3)))
    model = Model(
        "drawn",
        layers,
        96,
        heads,
        sequence=48,
        groups=groups,
        head_size=draw(st.sampled_from((1, 3, 16, 64))),
        ffn=draw(st.sampled_from((384, 384, 384, 384, 100, 97))),
        tied=draw(st.booleans()),
    )
    schedule = "megatron" if virtual > 1 else draw(st.sampled_from(SCHEDULE_NAMES))
    microbatches = depth * draw(st.integers(1, 3)) if virtual > 1 else draw(st.integers(1, 12))
    plan = Plan(
        tensor,
        depth,
        draw(st.integers(1, 3)),
        draw(st.integers(1, 4)),
        microbatches,
        virtual=virtual,
        first=first,
        last=last,
        schedule=schedule,
        sequence_parallel=draw(st.sampled_from((False, True, tensor > 1))),
        recompute=draw(st.sampled_from(("none", "selective", "full"))),
        distributed_optimizer=draw(st.booleans()),
        pipeline_inside=draw(st.booleans()),
    )
    return plan, model


BOUNDED = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
# Rules between plan and model that Megatron holds a configuration or its layers to.
BUILDING = {
    "heads not divisible by tensor size",
    "query groups neither multiple nor divisor of tensor size",
    "keys and values not divisible by tensor size",
    "feed-forward size not divisible by tensor size",
    "sequence parallelism with one tensor rank",
    "more stages than layers",
    "layers not divisible by stages",
    "uneven split leaves no equal middle stages",
    "layers of a stage not divisible by virtual stages",
}


@BOUNDED
@given(plans())
@pytest.mark.filterwarnings("ignore")
def test_megatron_builds_every_legal_plan(drawn):
    plan, model = drawn
    assume(is_legal(plan, model, plan.gpus))
    assert stages_of(configured(plan, model)) == plan.layers_of(model)
    assert builds(plan, model)


@settings(BOUNDED, max_examples=250)
@given(plans())
@pytest.mark.filterwarnings("ignore")
def test_the_rules_of_sizes_and_layers_refuse_what_megatron_does_not_build_and_nothing_else(drawn):
    plan, model = drawn
    broken = {violation.rule for violation in violations(plan, model, plan.gpus)}
    assert is_legal(plan, model, plan.gpus) == (not broken)
    assert builds(plan, model) == (not broken & BUILDING), broken


@settings(BOUNDED, max_examples=40)
@given(plans())
@pytest.mark.filterwarnings("ignore")
def test_the_checks_of_the_command_line_accept_every_legal_plan(drawn):
    plan, model = drawn
    broken = {violation.rule for violation in violations(plan, model, plan.gpus)}
    assume(not broken or broken & OURS)
    try:
        args = parsed(words_of(plan, model), plan.gpus)
    except Stopped as stopped:
        assert broken, stopped
    else:
        assert not broken and args.global_batch_size == plan.global_batch


class Group:
    """A process group of which only the size and the rank are asked."""

    def __init__(self, size: int):
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_megatrons_interleaved_schedule_starts_with_the_legal_numbers_of_microbatches(depth, monkeypatch):
    import torch
    from megatron.core.pipeline_parallel import schedules

    def start(*args, **kwargs):  # what it does next, after it has looked at the microbatches
        raise Stopped("started")

    monkeypatch.setattr(schedules, "get_pp_rank_microbatches", start)
    for microbatches in range(1, 3 * depth + 1):
        plan = Plan(1, depth, 1, 1, microbatches, schedule="megatron", virtual=2)
        config = configured(plan, GPT)
        chunk = torch.nn.Module()
        chunk.config, chunk.model_type = config, None
        try:
            schedules.forward_backward_pipelining_with_interleaving(
                forward_step_func=None,
                data_iterator=[None] * 2,
                model=[chunk] * 2,
                num_microbatches=microbatches,
                seq_length=512,
                micro_batch_size=1,
                p2p_communicator=SimpleNamespace(config=config, pp_group=Group(depth)),
                pg_collection=SimpleNamespace(tp=Group(1), cp=Group(1)),
            )
        except (Stopped, ValueError, RuntimeError) as error:
            assert isinstance(error, Stopped) == is_legal(plan, replace(GPT, layers=2 * depth), depth), microbatches
            assert isinstance(error, Stopped) or "micro-batches" in str(error)
        else:
            pytest.fail("the schedule did not stop")


@pytest.mark.parametrize(
    "text, depth, words",
    [
        ("Ett|t|tttL", 3, None),
        ("E|(tt|)*3L", 5, None),
        ("Et*2|t,t|t*2L", 3, None),
        ("Ett|tt|tL", 3, "has 5 layers, but --num-layers is 6"),
        ("Ett|tt|ttL", 2, "has 3 stages, but --pipeline-model-parallel-size is 2"),
        ("Et|t|tt|tt|L", 5, None),
    ],
)
def test_layouts_are_read_as_megatron_reads_them(text, depth, words):
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout as Layout

    asked = {"pipeline_model_parallel_size": depth, "num_layers": 6}
    asked["pipeline_model_parallel_layout"] = text
    answer = layout(SimpleNamespace(**asked))
    assert answer is None if words is None else words in answer
    if words is None:
        read = Layout(text, depth)
        read.validate_layer_layout(6, None)
        assert [stage.count("t") for stage in layout_stages(text)] == [
            read.get_num_layers_to_build(vp_stage=0, pp_rank=stage) for stage in range(depth)
        ]
