"""The planner's rules against Megatron's own parser, configuration, split of layers,
and interleaved schedule."""

import argparse
import functools
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_2bw.base.files import read_yaml
from megatron_2bw.mcore import cpu
from megatron_2bw.run.flags import checks
from megatron_2bw.run.flags.parse import check, parse_early, prepare
from megatron_2bw.run.flags.unsupported import layout_stages
from megatron_2bw.tools.planner.descriptions.model import PRESETS, Model
from megatron_2bw.tools.planner.descriptions.plan import ARGUMENTS, RECOMPUTE, Plan
from megatron_2bw.tools.planner.descriptions.reading import described
from megatron_2bw.tools.planner.find.legality import violations
from megatron_2bw.tools.planner.find.space import OTHERS, PLANNED
from tests.unit.test_planner_search import property_of


class Stopped(Exception):
    """What `stop` raises here instead of ending the process."""


def stop(message: str):
    raise Stopped(message)


@pytest.fixture(scope="module", autouse=True)
def on_a_gpu_host():
    """Megatron looks for CUDA when it is imported and while it checks: the CPU answers.
    The flags are a GPU run's."""
    was_installed = cpu.installed()
    cpu.install()
    import megatron.training.arguments  # noqa: F401

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "installed", lambda: False)
        patch.setattr(checks, "installed", lambda package: True)  # Transformer Engine
        yield
    if not was_installed:
        cpu.uninstall()


# --- rules
# --------------------------------------------------------------------------------------

GPT = PRESETS["gpt-1.3b"]  # 24 layers, 16 heads, sequence 512
LEGAL = Plan(tensor=2, depth=4, width=2, microbatch=1, microbatches=8)


# One case of a kind of rule: changes of a legal plan, its model and what it runs on,
# with which the rule is the first that is broken, by the begin of its cause.
CASES = [
    ("the sizes do not use every GPU", dict(width=1)),
    (
        "--tensor-model-parallel-size does not divide --num-att",
        dict(heads=18, groups=2, head_size=64, tensor=4),
    ),
    ("--sequence-parallel of a BERT", dict(kind="bert", sequence_parallel=True)),
    ("--seq-length is no multiple", dict(sequence=510, context=2)),
    ("--expert-model-parallel-size does not", dict(experts=6, expert=4, tensor=1)),
    ("the stages do not share", dict(stages=(8, 7, 6, 4))),
    ("--global-batch-size gives too few", dict(microbatches=0)),
    ("virtual stages do not divide", dict(virtual=4, schedule="megatron")),
    ("the GPU has no bf16", dict(bf16=False)),
    ("--use-precision-aware-optimizer w", dict(memory="host", schedule="megatron")),
]


def changed(changes: dict) -> tuple[Plan, Model, int, str, bool]:
    """What `violations` takes, with these changes, on as many GPUs as the plan needs;
    on 16 with the width changed."""
    on_plan, on_model = (
        {k: v for k, v in changes.items() if hasattr(x, k)} for x in (LEGAL, GPT)
    )
    plan = replace(LEGAL, **on_plan)
    host = [changes.get("precision", "bf16"), changes.get("bf16", True)]
    return (
        plan,
        replace(GPT, **on_model),
        16 if "width" in changes else plan.gpus,
        *host,
    )


@pytest.mark.parametrize("cause, changes", CASES)
def test_a_broken_rule_is_the_first_cause(cause, changes):
    assert not [*violations(*changed({}))]
    assert next(violations(*changed(changes))).startswith(cause)


# --- Megatron's parser and checks
# --------------------------------------------------------------------------------------

RUN = (
    "--mock-data --tokenizer-type NullTokenizer --train-iters 10 --lr 1e-4 --min-lr 1e-5 "
    "--eval-iters 0 --eval-interval 100 --num-workers 0 --device cuda"
).split()


@functools.cache
def parser_of(schedule: str) -> argparse.ArgumentParser:
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return prepare(parser, parse_early(["--pipeline-schedule", schedule], stop), stop)


def words_of(plan: Plan, model: Model, precision: str = "bf16") -> list[str]:
    return [
        *model.flags(),
        *plan.flags(precision),
        *RUN,
        "--vocab-size",
        str(model.vocab),
    ]


def parsed(argv: list[str], gpus: int, checked: bool = True) -> argparse.Namespace:
    """The arguments after this project's checks and Megatron's. Stopped, or Megatron's
    own error, if one refuses."""
    from megatron.training.arguments import validate_args

    args = parser_of(argv[argv.index("--pipeline-schedule") + 1]).parse_args(argv)
    args.rank = 0
    args.world_size = gpus
    if checked:
        check(args, stop)
    with mock.patch.dict(os.environ):
        os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
        # it sets the variable, for which Megatron asks
        parse_early([*argv, "--dry-run"], stop)
        validate_args(args)
    return args


# --- round trip
# --------------------------------------------------------------------------------------


def round_trips() -> Iterator:
    """(plan, model, precision) of plans.yaml."""
    for row in read_yaml(Path(__file__).with_name("plans.yaml")):
        model = replace(PRESETS[row.pop("model")], **row.pop("with", {}))
        precision = row.pop("precision", "bf16")
        plan = described(Plan, {"microbatch": 1} | row, "plans.yaml")
        yield pytest.param(plan, model, precision, id=f"{model.name} {row}")


def configuration(args: argparse.Namespace):
    """Megatron's configuration of the model, as it makes it from the arguments."""
    from megatron.training.argument_utils import core_transformer_config_from_args

    # of Transformer Engine, which need not be installed for this test
    args.apply_rope_fusion = False
    return core_transformer_config_from_args(args)


def stages_of(config) -> list[int]:
    """Layers that Megatron builds on each stage."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    layout = config.pipeline_model_parallel_layout
    stages = []
    for stage in range(config.pipeline_model_parallel_size):
        if layout:
            stages.append(layout.get_num_layers_to_build(vp_stage=0, pp_rank=stage))
            continue
        chunks = range(config.virtual_pipeline_model_parallel_size or 1)
        layers = [get_num_layers_to_build(config, chunk, stage) for chunk in chunks]
        stages.append(sum(layers))
    return stages


@pytest.mark.parametrize("plan, model, precision", round_trips())
def test_a_legal_plans_flags_come_back_as_the_plan(plan, model, precision):
    assert not [*violations(plan, model, plan.gpus, precision)]
    args = parsed(words_of(plan, model, precision), plan.gpus)
    expected = {}
    for field, argument in ARGUMENTS.items():
        expected[argument] = getattr(plan, field)
    for name in ("first", "last"):
        expected[ARGUMENTS[name]] = getattr(plan, name) or None
    extra = plan.extra if any(plan.extra) else ()
    full = plan.recompute == "full"
    late = "25%"  # by default
    if plan.schedule == "2bw":
        late = "all" if plan.late is None else plan.late
    two_bytes = plan.grad_reduce_in_bf16
    expected |= {
        "virtual_pipeline_model_parallel_size": plan.virtual
        if plan.virtual > 1
        else None,
        "two_bw_correction": "none"
        if plan.schedule == "2bw" and not plan.corrected
        else "auto",
        "two_bw_extra_warmup": extra[:1] if len(set(extra)) == 1 else extra,
        "two_bw_late": late,
        "fp16": precision == "fp16",
        "bf16": precision == "bf16",
        "grad_reduce_in_bf16": two_bytes,
        "accumulate_allreduce_grads_in_fp32": precision == "bf16" and not two_bytes,
        "untie_embeddings_and_output_weights": not model.tied,
        "seq_length": model.sequence,
        "recompute_granularity": None if plan.recompute == "none" else plan.recompute,
        "recompute_method": "uniform" if full else None,
        "recompute_num_layers": plan.recompute_layers if full else None,
    }
    assert {name: getattr(args, name) for name in expected} == expected
    config = configuration(args)
    assert stages_of(config) == plan.layers_of(model)
    assert config.num_layers == model.layers
    assert config.hidden_size == model.hidden
    assert config.ffn_hidden_size == model.ffn
    assert config.num_attention_heads == model.heads
    assert config.num_query_groups == model.groups
    assert config.kv_channels == model.head_size
    assert config.gated_linear_unit == model.gated


# Rules of this project's schedules, by the begin of their causes.
OURS = ("--global-batch-size", "virtual stages only")


@st.composite
def plans(draw) -> tuple[Plan, Model]:
    """Plans and models that are legal about as often as not."""

    def one_of(*values):
        return draw(st.sampled_from(values))

    tensor = one_of(1, 1, 1, 2, 2, 3, 4, 8)
    depth = draw(st.integers(1, 6))
    virtual = one_of(1, 1, 2, 3) if depth > 1 else 1
    first = one_of(0, 0, 0, 1, 2, 3, 4, 6) if depth > 1 else 0
    last = one_of(0, 0, 0, 1, 2, 3, 4, 6) if depth > 1 else 0
    chunks = virtual * draw(st.integers(1, 4))
    uneven = chunks * (depth - (first > 0) - (last > 0)) + first + last
    layers = one_of(draw(st.integers(1, 24)), chunks * depth, max(1, uneven))
    groups = one_of(1, 2, 3, 4, 6, 8)
    schedule = "megatron"
    microbatches = depth * draw(st.integers(1, 3))
    if virtual == 1:
        schedule = one_of(*PLANNED, *OTHERS)
        microbatches = draw(st.integers(1, 12))
    plan = Plan(
        tensor,
        depth,
        width=draw(st.integers(1, 3)),
        microbatch=draw(st.integers(1, 4)),
        microbatches=microbatches,
        virtual=virtual,
        first=first,
        last=last,
        schedule=schedule,
        sequence_parallel=one_of(False, True, tensor > 1),
        recompute=one_of(*RECOMPUTE),
        distributed_optimizer=draw(st.booleans()),
        pipeline_inside=draw(st.booleans()),
    )
    model = Model(
        "drawn",
        layers,
        96,
        heads=groups * one_of(4, 8, 1, 2, 3),
        sequence=48,
        groups=groups,
        head_size=one_of(1, 3, 16, 64),
        ffn=one_of(384, 384, 384, 384, 100, 97),
        tied=draw(st.booleans()),
    )
    return plan, model


@property_of(40)
@given(plans())
@pytest.mark.filterwarnings("ignore")
def test_the_checks_of_the_command_line_accept_every_legal_plan(drawn):
    plan, model = drawn
    broken = [*violations(plan, model, plan.gpus)]
    assume(not broken or all(cause.startswith(OURS) for cause in broken))
    try:
        args = parsed(words_of(plan, model), plan.gpus)
    except Stopped as stopped:
        assert broken, stopped
    else:
        assert not broken
        assert args.global_batch_size == plan.global_batch


@pytest.mark.parametrize("text, depth", [("E|(tt|)*3L", 5), ("Et*2|t,t|t*2L", 3)])
def test_layouts_are_read_as_megatron_reads_them(text, depth):
    from megatron.core.transformer.pipeline_parallel_layer_layout import (
        PipelineParallelLayerLayout as Layout,
    )

    read = [
        Layout(text, depth).get_num_layers_to_build(vp_stage=0, pp_rank=stage)
        for stage in range(depth)
    ]
    assert [stage.count("t") for stage in layout_stages(text)] == read
