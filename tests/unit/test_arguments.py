"""Every check of the command line, on real command lines, without ranks.

`REFUSED`, `MISTAKEN` and `dataset` are used by the end-to-end test too.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import struct
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron_2bw import cpu
from megatron_2bw.flags import checks, combinations, early, environment, unsupported
from megatron_2bw.flags.checks import CHECKS
from megatron_2bw.flags.no_effect import NO_EFFECT
from megatron_2bw.flags.own import OWN
from megatron_2bw.flags.parse import check, explain, name_flags, parse_early, prepare, processes, repeated
from megatron_2bw.flags.rule import Rule
from megatron_2bw.flags.unsupported import UNSUPPORTED
from megatron_2bw.schedules import SCHEDULE_NAMES, SCHEDULES
from tests.distributed.training import BERT, command

FLUSH = tuple(name for name, schedule in SCHEDULES.items() if schedule.flushes)
UNTIED = "--untie-embeddings-and-output-weights"


class Stopped(Exception):
    """What `stop` raises here instead of ending the process."""


def stop(message: str):
    raise Stopped(message)


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu():
    """Megatron's modules look for CUDA when they are imported and while they check arguments."""
    was_installed = cpu.installed()
    cpu.install()
    for schedule in SCHEDULE_NAMES:
        for task in ("gpt", "bert"):
            parser_of(schedule, task)
    yield
    if not was_installed:
        cpu.uninstall()


@functools.cache
def parser_of(schedule: str, task: str) -> argparse.ArgumentParser:
    from megatron.core.extensions import kitchen
    from megatron.training.arguments import add_megatron_arguments

    with mock.patch.object(kitchen, "HAVE_KITCHEN", True):  # it brings flags
        parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return prepare(parser, parse_early(["--pipeline-schedule", schedule], stop, task), stop)


def parse(argv: list[str], world: int) -> argparse.Namespace:
    """`argv` may begin with the name of BERT's script."""
    schedule = argv[argv.index("--pipeline-schedule") + 1]
    bert = argv[0] == BERT
    args = parser_of(schedule, "bert" if bert else "gpt").parse_args(argv[bert:])
    args.world_size = world
    return args


def complaint(argv: list[str], world: int) -> str | None:
    """What the checks say to a command line for `world` processes; None if they accept it.

    The check before torch is imported must answer the same line, or none where the rule needs more than it has.
    """
    line = _complaint(argv, world)
    if "cpu" in argv and cpu.installed():
        bert = argv[0] == BERT
        found = early.mistakes(argv[bert:], "bert" if bert else "gpt", world)
        assert found[:1] in ([], [line]), "the check before the imports answers something else"
    return line


def _complaint(argv: list[str], world: int) -> str | None:
    try:
        check(parse(argv, world), stop, argv)
    except Stopped as stopped:
        return str(stopped)
    return None


def dataset(prefix: Path, lengths: tuple[int, ...] = (5, 7, 3), code: int = 4, width: int = 4) -> Path:
    """A dataset of Megatron's, one document a sequence: what the checks look at, written from its description."""
    starts = [width * sum(lengths[:i]) for i in range(len(lengths))]
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, code, len(lengths), len(lengths) + 1)
    tables = struct.pack(f"<{len(lengths)}i{len(lengths)}q", *lengths, *starts)
    Path(f"{prefix}.idx").write_bytes(header + tables + struct.pack(f"<{len(lengths) + 1}q", *range(len(lengths) + 1)))
    Path(f"{prefix}.bin").write_bytes(bytes(width * sum(lengths)))
    return prefix


# --- refused flags -------------------------------------------------------------------------------------------------


def each_value(rule: Rule) -> list[Rule]:
    """The rule for each of the values that it names."""
    flag, *values = rule.flag.split()
    return [replace(rule, flag=f"{flag} {value}") for value in values] or [rule]


REFUSED = [one for rule in UNSUPPORTED for one in each_value(rule)]
# What to type, where the flag alone does not ask for the feature and the rule names no value. "{}" is a folder.
VALUES: dict[str, str] = {
    "--num-layers-per-virtual-pipeline-stage": "1",
    "--num-virtual-stages-per-pipeline-rank": "2",
    "--yaml-cfg": "{}/run.yaml",
    "--hybrid-layer-pattern": "M*M*",
    "--hybrid-override-pattern": "M*M*",
    "--logits-load-dir": "{}",
    "--logits-save-dir": "{}",
    "--decoder-seq-length": "8",
    "--mtp-num-layers": "1",
    "--rampup-batch-size": "2 2 8",
    "--config-logger-dir": "{}",
    "--tensor-parallel-num-weight-shards": "2",
    "--num-experts": "4",
    "--fp8-format": "e4m3",
    "--fp4-format": "e2m1",
    "--te-precision-config-file": "{}/recipe.yaml",
    "--kitchen-config-file": "{}/recipe.yaml",
    "--kitchen-recipe-number": "0",
    "--pipeline-model-parallel-comm-backend": "nccl",
    "--cpu-offloading-num-layers": "1",
    "--step-batch-size-schedule": "8:4",
    "--timing-log-level": "1",
    "--optimizer": "dist_muon",
    "--iterations-to-skip": "2 3",
    "--result-rejected-tracker-filename": "{}/rejected",
    "--phase-transition-iterations": "2,4",
    "--save-activations-interval": "2",
    "--save-dgrads-interval": "2",
    "--num-distributed-optimizer-instances": "2",
    "--ddp-param-name-patterns-for-fp32-local-accumulation": "all",
    "--save-wgrads-interval": "2",
    "--save-params-interval": "2",
    "--context-parallel-size": "2",
    "--nccl-communicator-config-path": "{}/nccl.yaml",
    "--gpu-sniff-test-interval": "2",
    "--flash-attention-version": "2",
    "--symmetric-ar-type": "two_shot",
    "--experimental-attention-variant": "dsa",
    "--heterogeneous-layers-config-path": "{}/layers.json",
    "--window-size": "8,0",
}


def refused_command(rule: Rule, folder: str = "folder") -> tuple[list[str], int]:
    """A command line that is right but for the refused flag, and its number of processes."""
    schedule = {"ours": "pipedream-flush", "no flush": "2bw"}.get(rule.scope, rule.scope)
    schedule = schedule if schedule in SCHEDULES else "megatron"
    flags = [*rule.flag.split(), *VALUES.get(rule.flag, "").format(folder).split()]
    flags = {
        ("--fp16", "any"): [rule.flag, "--optimizer", "soap"],
        ("--loss-scale", "any"): [rule.flag, "64", "--optimizer", "muon"],
        ("--save", "any"): [rule.flag, folder, "--save-interval", "2", "--optimizer", "soap"],
        ("--use-distributed-optimizer", "no flush"): [rule.flag, "--optimizer", "lion"],
        ("--use-distributed-optimizer", "any"): [rule.flag, "--optimizer", "sgd"],
        ("--fp32-residual-connection", "local"): [rule.flag, "--bf16"],
    }.get((rule.flag, rule.scope), flags)
    if rule.flag.startswith("--muon"):
        flags += ["--optimizer", "muon"]
    if rule.flag == "--num-distributed-optimizer-instances":
        flags += ["--use-distributed-optimizer", "--overlap-grad-reduce"]
    if rule.flag == UNTIED:
        flags = []  # it is refused that the flag is not given
    elif schedule == "pipedream":
        flags.append(UNTIED)
    argv = command(2, 2, schedule, *flags)
    return [BERT, *argv] if rule.scope == "bert" else argv, 4 if rule.flag == "--context-parallel-size" else 2


REFUSED_CASES = [pytest.param(rule, id=f"{rule.flag[2:]} {rule.scope}") for rule in REFUSED]


@pytest.mark.parametrize("rule", REFUSED_CASES)
def test_every_refused_flag_is_refused_with_its_reason(rule, monkeypatch):
    """In its own scope: on a GPU, unless it is the CPU that refuses."""
    monkeypatch.setattr(cpu, "installed", lambda: rule.scope == "cpu")
    message = complaint(*refused_command(rule))
    assert message is not None and message.startswith(rule.flag.split()[0]) and message.endswith(rule.why)
    assert "\n" not in message


@pytest.mark.parametrize("rule", REFUSED_CASES)
def test_the_command_line_is_right_but_for_the_refused_flag(rule):
    argv, world = refused_command(rule)
    right = [*argv[: argv.index("--mock-data") + 1], UNTIED]
    assert complaint(right, world) is None


def test_every_entry_has_a_reason_a_scope_and_a_place_of_its_own():
    assert len({(rule.flag, rule.scope) for rule in REFUSED}) == len(REFUSED)
    assert {rule.scope for rule in REFUSED} <= {"any", "ours", "no flush", "cpu", "local", "bert", *SCHEDULES}
    assert all(rule.flag.startswith("--") and rule.why.strip() for rule in REFUSED)
    assert set(VALUES) <= {rule.flag for rule in REFUSED}


def test_every_flag_and_value_that_a_rule_names_exists():
    """In the parser of Megatron's pretraining, with this project's flags in it."""
    known = parser_of("2bw", "gpt")._option_string_actions
    for rule in (*UNSUPPORTED, *CHECKS, *OWN, *NO_EFFECT):
        if not isinstance(rule, Rule):
            continue
        flag, *values = rule.flag.split()
        if rule.typed and flag.endswith("-"):
            assert any(name.startswith(flag) for name in known), flag
        else:
            assert set(values) <= {getattr(choice, "name", choice) for choice in known[flag].choices or ()}


# Where a rule refuses all values of a flag but these, so that it must learn of a new one.
FINE = {
    ("--cuda-graph-impl", "ours"): {"none"},
    ("--cuda-graph-impl", "cpu"): {"none"},
    ("--rerun-mode", "no flush"): {"disabled"},
    ("--position-embedding-type", "bert"): {"learned_absolute", "rope"},
    ("--attention-backend", "bert"): {"auto", "local"},
}


@pytest.mark.parametrize("place", FINE, ids=" ".join)
def test_a_rule_knows_all_values_of_its_flag(place):
    (named,) = [{*rule.flag.split()[1:]} for rule in UNSUPPORTED if (rule.flag.split()[0], rule.scope) == place]
    choices = {
        getattr(choice, "name", choice) for choice in parser_of("2bw", "gpt")._option_string_actions[place[0]].choices
    }
    assert choices - named == FINE[place]


@pytest.mark.parametrize("rule", REFUSED_CASES)
def test_a_flag_is_refused_in_its_scope_only(rule, monkeypatch):
    monkeypatch.setattr(cpu, "installed", lambda: False)
    argv, world = refused_command(rule)
    for schedule in SCHEDULE_NAMES:
        chosen = SCHEDULES.get(schedule)
        argv[argv.index("--pipeline-schedule") + 1] = schedule
        expected = {
            "any": True,
            "local": True,
            "bert": True,
            "cpu": False,
            "ours": chosen is not None,
            "no flush": chosen is not None and not chosen.flushes,
        }.get(rule.scope, rule.scope == schedule)
        assert bool(rule.message(parse(argv, world))) == expected, schedule


@pytest.mark.parametrize("rule", [case for case in REFUSED_CASES if case.values[0].scope == "bert"])
def test_what_only_a_bert_refuses(rule):
    argv, world = refused_command(rule)
    assert rule.message(parse(argv[1:], world)) is None


@pytest.mark.parametrize("schedule", FLUSH)
@pytest.mark.parametrize(
    "flags",
    [
        ["--use-distributed-optimizer"],
        ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"],
        ["--iterations-to-skip", "2"],
        ["--rerun-mode", "validate_results"],
        ["--decrease-batch-size-if-needed"],
        ["--fp16"],
        ["--save-params-interval", "2", "--save", "folder", "--save-interval", "4"],
        ["--save-wgrads-interval", "2", "--save", "folder", "--save-interval", "4"],
    ],
    ids=" ".join,
)
def test_flush_schedules_allow_what_needs_an_empty_pipeline(schedule, flags):
    assert complaint(command(2, 2, schedule, *flags), 2) is None


@pytest.mark.parametrize("rule", [case for case in REFUSED_CASES if case.values[0].scope == "cpu"])
@pytest.mark.parametrize("schedule", ["megatron", "2bw"])
def test_every_flag_that_a_host_without_cuda_cannot_honour(rule, schedule):
    argv, world = refused_command(rule)
    argv[argv.index("--pipeline-schedule") + 1] = schedule
    message = rule.message(parse(argv, world))
    assert message.startswith(rule.flag.split()[0]) and "CPU" in message and rule.why in message
    assert complaint(argv, world).startswith(rule.flag.split()[0])


# --- mistakes ------------------------------------------------------------------------------------------------------


def line(
    expected: str, *flags: str, world: int = 2, stages: int = 2, microbatches: int = 2, schedule: str = "2bw", **changes
):
    """A wrong command line and what the answer must contain."""
    name = " ".join((*flags, *(f"{key}={value}" for key, value in changes.items()))) or expected
    return pytest.param(command(stages, microbatches, schedule, *flags, **changes), world, expected, id=name)


MISTAKEN = [
    line("--lr is missing", lr=None),
    line("--num-layers is missing", num_layers=None),
    line("--micro-batch-size is missing", micro_batch_size=None),
    line("--seq-length is missing", seq_length=None),
    line("--train-iters is missing", train_iters=None),
    line("--train-iters -3: it must be greater than 0", train_iters=-3),
    line("--num-layers 0: it must be greater than 0", num_layers=0),
    line("--eval-iters -1: it must not be negative", eval_iters=-1),
    line("--hidden-dropout 1.5: it must be", hidden_dropout=1.5),
    line("--log-interval 0: it must be greater than 0", log_interval=0),
    line("--lr inf: it must be less than 1e38", lr="inf"),
    line("--lr 1e+308: it must be less than 1e38", lr="1e308"),
    line("--weight-decay inf: it must be less than 1e38", weight_decay="inf"),
    line("--adam-eps inf: it must be less than 1e38", adam_eps="inf"),
    line("--init-method-std nan: it must not be negative", init_method_std="nan"),
    line("--num-workers 1000000: it must be at most 1000", num_workers=1000000),
    line("--loss-scale inf: it must be finite", "--fp16", loss_scale="inf"),
    line("--seed 0: it must be from 1 to 4e9", seed=0),
    line("--seed 99999999999: it must be from 1 to 4e9", seed=99999999999),
    line("--expert-model-parallel-size -1: it must be greater than 0", expert_model_parallel_size=-1),
    line("--save xxxx", save="x" * 300, save_interval=2),
    line(": File name too long", save="x" * 300, save_interval=2, train_iters=7),
    line("--load xxxx", load="x" * 300),
    line("--tensorboard-dir xxxx", tensorboard_dir="x" * 300),
    line("--vocab-file xxxx", tokenizer_type="GPT2BPETokenizer", vocab_file="x" * 300, merge_file="no.txt"),
    line("--fp16 and --bf16 exclude each other", "--fp16", "--bf16"),
    line("--train-iters and --train-samples exclude each other", train_samples=64),
    line("--mock-data and --data-path exclude each other", data_path="some/data"),
    line("--lr-warmup-fraction and --lr-warmup-iters exclude each other", lr_warmup_fraction=0.1),
    line("--swiglu and --squared-relu exclude each other", "--swiglu", "--squared-relu"),
    line("--save needs --save-interval", save="folder"),
    line("--full-validation needs --multiple-validation-sets", "--full-validation"),
    line("--use-pytorch-profiler needs --profile", "--use-pytorch-profiler"),
    line("--num-query-groups 2 needs --group-query-attention", num_query_groups=2),
    line("--no-initialization needs --load", "--no-initialization"),
    line("--no-pad-vocab-size needs --padded-vocab-size", "--no-pad-vocab-size"),
    line("--wandb-project needs --wandb-save-dir", wandb_project="project"),
    line(
        "--num-distributed-optimizer-instances needs --use-dist",
        schedule="gpipe",
        num_distributed_optimizer_instances=2,
    ),
    line("--pipeline-model-parallel-size 3 needs a multiple of 3 processes, but there are 2", stages=3, microbatches=3),
    line("--tensor-model-parallel-size 2 needs a multiple of 4 processes", tensor_model_parallel_size=2),
    line("--global-batch-size 5 is not a multiple of --micro-batch-size 2 x 1 pipelines", global_batch_size=5),
    line(
        "--train-samples 3 is less than one --global-batch-size 4",
        train_iters=None,
        lr_warmup_iters=None,
        train_samples=3,
    ),
    line(
        "--eval-micro-batch-size 1 must equal --micro-batch-size 2",
        world=4,
        tensor_model_parallel_size=2,
        eval_micro_batch_size=1,
    ),
    line("--full-validation takes one sample at a time", "--full-validation", "--multiple-validation-sets"),
    line("--window-size takes two numbers", window_size=2),
    line("--padded-vocab-size 100 is less than --vocab-size 127", padded_vocab_size=100),
    line("--num-attention-heads 5 does not divide --hidden-size 32", num_attention_heads=5),
    line("--num-query-groups 3 does not divide --num-attention-heads 4", "--group-query-attention", num_query_groups=3),
    line(
        "--tensor-model-parallel-size 8 does not divide --num-attention-heads 4", world=16, tensor_model_parallel_size=8
    ),
    line("--seq-length 32 is more than --max-position-embeddings 16", seq_length=32),
    line("--num-layers 5 cannot be split over --pipeline-model-parallel-size 2", num_layers=5),
    line(
        "--decoder-first-pipeline-num-layers 2: 3 other stages cannot share the other 2 of --num-layers 4",
        world=4,
        stages=4,
        microbatches=4,
        decoder_first_pipeline_num_layers=2,
    ),
    line("--recompute-granularity full needs --recompute-method", recompute_granularity="full"),
    line("--recompute-method uniform needs --recompute-granularity full", recompute_method="uniform"),
    line(
        "--recompute-method block needs --recompute-num-layers", recompute_granularity="full", recompute_method="block"
    ),
    line("--min-lr 0.1 is more than --lr 0.01", min_lr=0.1),
    line("--lr-warmup-init 0.1 is more than --lr 0.01", lr_warmup_init=0.1),
    line("--lr-warmup-iters 6 must be less than --lr-decay-iters 6", lr_warmup_iters=6),
    line("--lr-decay-style WSD needs --lr-wsd-decay-iters", lr_decay_style="WSD"),
    line("--load no/such: there is no checkpoint", load="no/such"),
    line(
        "--load new: there is no checkpoint", "--exit-on-missing-checkpoint", load="new", save="./new", save_interval=2
    ),
    line("--save /dev/null/x: /dev/null is not a folder", save="/dev/null/x", save_interval=2),
    line("--split 98,x,1: give three shares", split="98,x,1"),
    line("--split 0,0,100 leaves nothing to train on", split="0,0,100"),
    line("--tokenizer-type NullTokenizer needs --vocab-size", vocab_size=None),
    line("--tokenizer-type GPT2BPETokenizer needs --vocab-file and --merge-file", tokenizer_type=None),
    line("--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model", tokenizer_type="HuggingFaceTokenizer"),
    line(
        "--tokenizer-model ./no/such: there is no such",
        tokenizer_type="HuggingFaceTokenizer",
        tokenizer_model="./no/such",
    ),
    line(
        "--vocab-file no.json: there is no such",
        tokenizer_type="GPT2BPETokenizer",
        vocab_file="no.json",
        merge_file="no.txt",
    ),
    line("--spec no.module layer: No module named", "--spec", "no.module", "layer"),
    line("--spec one: give a module", "--spec", "one"),
    line("--two-bw-exchange nccl needs --distributed-backend nccl", two_bw_exchange="nccl"),
    line(
        "--two-bw-exchange has no effect with --pipeline-schedule megatron", schedule="megatron", two_bw_exchange="gloo"
    ),
    line("--two-bw-trace has no effect with --pipeline-schedule megatron", schedule="megatron", two_bw_trace="folder"),
    line("--two-bw-trace /proc/version/trace: /proc/version is not a folder", two_bw_trace="/proc/version/trace"),
    line(
        "--two-bw-gradient-slots has no effect without --pipeline-schedule 2bw",
        schedule="gpipe",
        two_bw_gradient_slots=1,
    ),
    line(
        "--two-bw-sync-iterations has no effect without --pipeline-schedule 2bw",
        schedule="pipedream-flush",
        two_bw_sync_iterations=3,
    ),
    line("--two-bw-sync-iterations: -1: must be a whole number", two_bw_sync_iterations=-1),
    line("--two-bw-sync-iterations: 1.5: must be a whole number", two_bw_sync_iterations=1.5),
    line("--two-bw-sync-iterations: 101%: must be a whole number of 0 or more, or", two_bw_sync_iterations="101%"),
    line("--two-bw-sync-iterations: 1.5%: must be a whole number of 0 or more, or", two_bw_sync_iterations="1.5%"),
    line("--two-bw-sync-iterations: %: must be a whole number of 0 or more, or", two_bw_sync_iterations="%"),
    line(
        "--two-bw-correction has no effect without --pipeline-schedule 2bw",
        schedule="megatron",
        two_bw_correction="extrapolate",
    ),
    line(
        "--two-bw-correction-factor has no effect without --two-bw-correction extrapolate", two_bw_correction_factor=0.5
    ),
    line(
        "--two-bw-correction extrapolate has no effect: --two-bw-sync-iterations 6 is not below --train-iters 6",
        two_bw_correction="extrapolate",
        two_bw_sync_iterations=6,
    ),
    line(
        "--two-bw-sync-iterations 100% is not below --train-iters 6",
        two_bw_correction="extrapolate",
        two_bw_sync_iterations="100%",
    ),
    line(
        "--two-bw-sync-iterations 3 is not below --train-samples / --global-batch-size 3",
        train_iters=None,
        lr_warmup_iters=None,
        train_samples=12,
        two_bw_correction="extrapolate",
        two_bw_sync_iterations=3,
    ),
    line(
        "--two-bw-correction-factor: 2.5: must be between 0 and 2",
        two_bw_correction="extrapolate",
        two_bw_correction_factor=2.5,
    ),
    line(
        "--two-bw-correction-factor: 1:sine:0: must be a number such as 1, or a schedule such as 1.5:cosine:0.9",
        two_bw_correction="extrapolate",
        two_bw_correction_factor="1:sine:0",
    ),
    line(
        "--two-bw-correction-gradient has no effect without --two-bw-correction extrapolate",
        two_bw_correction="auto",
        two_bw_correction_gradient=1,
    ),
    line(
        "--two-bw-correction-gradient nan must be between 0 and 10",
        two_bw_correction="extrapolate",
        two_bw_correction_gradient="nan",
    ),
    line(
        "--two-bw-correction-gradient has no effect with --muon-scalar-optimizer lion",
        optimizer="muon",
        muon_scalar_optimizer="lion",
        two_bw_correction="extrapolate",
        two_bw_correction_gradient=2,
    ),
    line(
        "--two-bw-correction auto has no effect: --two-bw-sync-iterations 6 is not below --train-iters 6",
        two_bw_correction="auto",
        two_bw_sync_iterations=6,
    ),
    line(
        "--two-bw-extra-warmup has no effect without --pipeline-schedule 2bw and several stages",
        schedule="gpipe",
        two_bw_extra_warmup=1,
    ),
    line("--two-bw-extra-warmup has no effect without", stages=1, world=1, two_bw_extra_warmup=1),
    line(
        "--two-bw-extra-warmup has 2 numbers: give one, or one for each of the 1 boundaries",
        microbatches=8,
        two_bw_extra_warmup="1,1",
    ),
    line(
        "gives 3 microbatches on each of 1 pipeline, but --pipeline-schedule 2bw with --two-bw-extra-warmup needs 4: "
        "use --global-batch-size 8 or more",
        microbatches=3,
        two_bw_extra_warmup="2",
    ),
    line("use --global-batch-size 4 or more", microbatches=1),
    line("--gpipe-round has no effect without --pipeline-schedule gpipe: leave it out", gpipe_round=2),
    line("--gpipe-round has no effect without", schedule="megatron", gpipe_round=1),
    line("--gpipe-round: 0: must be a whole number of 1 or more", schedule="gpipe", gpipe_round=0),
    line("--gpipe-round: -1: must be a whole number of 1 or more", schedule="gpipe", gpipe_round=-1),
    line("--gpipe-round: 1.5: must be a whole number of 1 or more", schedule="gpipe", gpipe_round=1.5),
    line(
        "--gpipe-round 4 is more than the 3 microbatches of a batch on each pipeline: give at most 3, or leave it out",
        schedule="gpipe",
        microbatches=3,
        gpipe_round=4,
    ),
    line("--rotary-percent has no effect without --position-embedding-type rope", rotary_percent=0.5),
    line("--save-interval has no effect without --save", save_interval=2),
    line("--finetune has no effect without --load", "--finetune"),
    line("--moe-router-topk has no effect without --num-experts", moe_router_topk=1),
]


@pytest.mark.parametrize("argv, world, expected", MISTAKEN)
def test_a_mistake_is_answered_with_its_flag(argv, world, expected):
    message = complaint(argv, world)
    assert message is not None and expected in message and "\n" not in message


# What does work, and must stay accepted.
ACCEPTED = [
    ["--bf16"],
    ["--fp16", "--loss-scale", "128"],
    [UNTIED],
    ["--calculate-per-token-loss"],
    ["--overlap-grad-reduce"],
    ["--recompute-granularity", "selective"],
    ["--recompute-activations"],
    ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"],
    [
        "--position-embedding-type",
        "rope",
        "--rotary-percent",
        "0.5",
        "--normalization",
        "RMSNorm",
        "--swiglu",
        "--disable-bias-linear",
        "--group-query-attention",
        "--num-query-groups",
        "2",
    ],
    ["--save", "folder", "--save-interval", "2", "--load", "folder"],
    ["--exit-interval", "3"],
    ["--exit-signal-handler"],
    ["--exit-duration-in-mins", "5"],
    ["--dataloader-type", "cyclic"],
    ["--decoder-first-pipeline-num-layers", "3"],
    ["--skip-train"],
    ["--log-params-norm", "--log-num-zeros-in-grad"],
    ["--timing-log-level", "2", "--no-barrier-with-level-1-timing", "--log-throughput"],
    ["--use-mcore-models"],
    ["--optimizer", "sgd", "--sgd-momentum", "0.5"],
    ["--optimizer", "muon", "--muon-tp-mode", "duplicated"],
    ["--optimizer", "muon", "--bf16"],
    ["--optimizer", "lion", "--adam-beta1", "0.8"],
    ["--check-weight-hash-across-dp-replicas-interval", "2"],
    ["--attention-softmax-in-fp32"],
    ["--manual-gc"],
    ["--distributed-backend", "gloo", "--transformer-impl", "local"],
    ["--rerun-mode", "disabled"],
    ["--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss"],
]

ACCEPTED_BY_2BW = [
    ["--two-bw-sync-iterations", "3"],
    ["--two-bw-sync-iterations", "1000"],
    ["--two-bw-sync-iterations", "100%"],
    ["--two-bw-correction", "extrapolate", "--two-bw-sync-iterations", "20%"],
    ["--two-bw-correction", "none"],
    ["--two-bw-correction", "auto"],
    ["--two-bw-correction", "extrapolate", "--two-bw-correction-gradient", "2"],
    ["--two-bw-correction", "extrapolate", "--two-bw-correction-factor", "1.5:cosine:0.9"],
    ["--two-bw-correction", "extrapolate", "--two-bw-correction-factor", "0.9", "--two-bw-sync-iterations", "3"],
]


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
@pytest.mark.parametrize("flags", [[], *ACCEPTED], ids=" ".join)
def test_sane_command_lines_are_accepted(schedule, flags):
    if schedule == "pipedream":
        flags = [*flags, UNTIED]
    assert complaint(command(2, 2, schedule, *flags), 2) is None


DISTRIBUTED = ["--use-distributed-optimizer"]
OVERLAPPED = [*DISTRIBUTED, "--overlap-grad-reduce", "--overlap-param-gather"]


@pytest.mark.parametrize(
    "flags",
    [
        DISTRIBUTED,
        OVERLAPPED,
        *ACCEPTED_BY_2BW,
        ["--two-bw-gradient-slots", "1"],
        ["--two-bw-trace", "folder"],
        ["--two-bw-exchange", "gloo"],
    ],
    ids=" ".join,
)
def test_flags_of_2bw_are_accepted(flags):
    assert complaint(command(2, 2, "2bw", *flags), 2) is None


def test_the_late_step_gathers_in_megatrons_stead():
    """Megatron's hooks, which would gather a second time, are not installed."""
    for schedule, hooks in (("2bw", False), ("pipedream-flush", True), ("megatron", True)):
        argv = command(2, 2, schedule, *OVERLAPPED)
        args = parse(argv, 2)
        check(args, stop, argv)
        assert args.overlap_param_gather is hooks


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
@pytest.mark.parametrize("stages, width, tensor", [(1, 1, 1), (1, 2, 2), (2, 3, 1), (4, 1, 2)])
def test_all_shapes_of_the_world_are_accepted(schedule, stages, width, tensor):
    argv = command(stages, 4, schedule, UNTIED, width=width, tensor_model_parallel_size=tensor)
    assert complaint(argv, stages * width * tensor) is None


@pytest.mark.parametrize(
    "stages, width, micro, batch, needed",
    [(2, 1, 2, 2, 4), (4, 1, 2, 6, 8), (4, 3, 2, 18, 24), (2, 2, 1, None, 4), (4, 1, 5, 5, 20)],
)
def test_too_few_microbatches_says_which_batch_would_do(stages, width, micro, batch, needed):
    def answer(size, schedule="2bw"):
        changes = dict(micro_batch_size=micro, global_batch_size=size)
        return complaint(command(stages, 1, schedule, width=width, **changes), stages * width)

    message = answer(batch)
    assert message.endswith(f"use --global-batch-size {needed} or more") and f"there are stages, {stages}" in message
    assert answer(needed) is None
    assert f"use --global-batch-size {needed} or more" in answer(needed - micro * width)
    assert answer(batch, "pipedream-flush") is None


# --- data ----------------------------------------------------------------------------------------------------------


def with_data(*flags: str) -> str | None:
    words = [word for word in command(2, 2, split="100,0,0") if word != "--mock-data"]
    return complaint([*words, *map(str, flags)], 2)


def damage(prefix: Path, how: str) -> None:
    index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    if how == "garbage":
        index.write_bytes(b"this is no index, but long enough to look at" * 9)
    elif how == "short":
        index.write_bytes(b"MMIDIDX")
    elif how == "cut":
        index.write_bytes(index.read_bytes()[:-3])
    elif how == "documents":
        index.write_bytes(index.read_bytes()[:-8] + bytes(8))
    elif how == "sequences":  # one is of -1 token
        index.write_bytes(index.read_bytes()[:38] + b"\xff" * 4 + index.read_bytes()[42:])
    elif how == "order":  # of the documents
        index.write_bytes(index.read_bytes()[:-16] + (2**40).to_bytes(8, "little") + index.read_bytes()[-8:])
    elif how == "tokens cut":
        tokens.write_bytes(tokens.read_bytes()[:-1])
    elif how == "of another dataset":
        tokens.write_bytes(bytes(1000))
    elif how == "gone":
        tokens.unlink()


DAMAGES = {
    "garbage": "is not an index of Megatron's",
    "short": "is not an index of Megatron's",
    "cut": "is damaged",
    "documents": "its documents end at sequence 0 of 3",
    "sequences": "do not follow one another",
    "order": "do not follow one another",
    "tokens cut": "but its index describes 60",
    "of another dataset": "but its index describes 60",
    "gone": "there is no file",
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_dataset_is_found_before_training(how, tmp_path):
    good, bad = dataset(tmp_path / "good"), dataset(tmp_path / "bad")
    damage(bad, how)
    assert with_data("--data-path", good) is None
    for flags in (["--data-path", bad], ["--data-path", "0.3", good, "0.7", bad], ["--train-data-path", bad]):
        message = with_data(*flags)
        assert message.startswith(f"{flags[0]} {bad}: ") and DAMAGES[how] in message
    (tmp_path / "list").write_text(f"0.5 {good} 0.5 {bad}")
    assert str(bad) in with_data("--data-args-path", tmp_path / "list")


@pytest.mark.parametrize(
    "split, empty",
    [
        ("98,1,1", "validation"),
        ("1,1,1", None),
        ("2,1,0", None),
        ("1,100,100", "training"),
        ("100,0,0", None),
        ("60,39,1", "test"),
    ],
)
def test_a_split_that_leaves_a_share_without_documents(split, empty, tmp_path):
    """Megatron 0.19 would look for its first token for ever."""
    data = dataset(tmp_path / "data")  # three documents
    message = with_data("--data-path", data, "--split", split)
    if empty is None:
        assert message is None
    else:
        assert message == (
            f"--split {split} leaves no document of --data-path {data} for {empty}, it has 3: give that share 0 or more"
        )


@pytest.mark.parametrize(
    "flags, expected",
    [
        (
            [],
            "--data-path {} has no document for training of 2 sentences or more, each of 512 tokens or fewer: prepare it "  # noqa: E501
            "with scripts/preprocess_data.py for BERT, or add --bert-no-binary-head",
        ),
        (["--bert-no-binary-head"], None),
        (
            ["--bert-no-binary-head", "--split", "98,1,1"],
            "--split 98,1,1 leaves no document of --data-path {} for validation, it has 3: give that share 0 or more",
        ),
        (
            ["--bert-no-binary-head", "--tokenizer-type", "NullTokenizer"],
            "--tokenizer-type NullTokenizer has no words to mask: give the WordPiece tokenizer of --data-path",
        ),
    ],
    ids=lambda case: " ".join(case) if isinstance(case, list) else None,
)
def test_data_that_a_bert_finds_no_sentences_in(flags, expected, tmp_path):
    """Three documents of a sentence each; Megatron 0.19 would look through them two thousand million times."""
    data, vocabulary = dataset(tmp_path / "data"), tmp_path / "vocab.txt"
    vocabulary.write_text("[PAD]\n")
    argv = command(2, 2, split="100,0,0", tokenizer_type="BertWordPieceCase", vocab_file=vocabulary, data_path=data)
    argv = [word for word in argv if word != "--mock-data"]
    assert complaint([BERT, *argv, *flags], 2) == (expected and expected.format(data))


def test_megatrons_own_datasets_are_accepted(tmp_path):
    import numpy
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    for kind in (numpy.uint16, numpy.int32):
        builder = IndexedDatasetBuilder(str(tmp_path / "data.bin"), dtype=kind)
        for length in (4, 9):
            builder.add_document(torch.arange(length), [length])
        builder.finalize(str(tmp_path / "data.idx"))
        assert with_data("--data-path", tmp_path / "data") is None


def test_an_entry_script_of_the_users_own_has_no_default_interval():
    args = parse(command(1, 1, eval_interval=None), 1)
    assert args.eval_interval == 1000
    args.eval_interval = None
    with pytest.raises(Stopped, match="--eval-interval is missing"):
        check(args, stop)


@pytest.mark.parametrize(
    "flags, expected",
    [
        ([], "--data-path is missing (or --mock-data)"),
        (["--data-path", "no/such"], "--data-path no/such: there is no file no/such.idx"),
        (["--data-path", "x" * 300], f"--data-path {'x' * 300}: File name too long"),
        (["--data-args-path", "no/such"], "--data-args-path no/such: there is no such file"),
        (["--per-split-data-args-path", "no/such"], "--per-split-data-args-path no/such: there is no such file"),
    ],
    ids=lambda case: " ".join(case) if isinstance(case, list) else None,
)
def test_missing_data(flags, expected):
    assert with_data(*flags) == expected


# --- flags without effect ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", NO_EFFECT, ids=lambda rule: f"{rule.flag} {rule.why}")
def test_flags_without_effect_are_refused_when_typed(rule):
    argv = command(2, 2, tokenizer_type="NullTokenizer" if "with --tokenizer-type" in rule.why else None)
    if "with --loss-scale" in rule.why:
        argv += ["--fp16", "--loss-scale", "64"]
    if "with --optimizer sgd" in rule.why:
        argv += ["--optimizer", "sgd"]
    if "with --muon-scalar-optimizer lion" in rule.why:
        argv += ["--optimizer", "muon", "--muon-scalar-optimizer", "lion"]
    if "without GeLU" in rule.why:
        argv.append("--swiglu")
    parser, args = parser_of("2bw", "gpt"), parse([BERT, *argv] if "BERT" in rule.why else argv, 2)
    if "entry script" in rule.why:
        args.task = None
    begins = rule.flag.endswith("-")
    flags = [f for f in parser._option_string_actions if f == rule.flag or (begins and f.startswith(rule.flag))]
    assert flags, f"Megatron has no flag that begins with {rule.flag}"
    for flag in flags:
        message = rule.message(args, [flag])
        assert message.startswith(f"{flag} has no effect ") and message.endswith(": leave it out")
        assert (
            message == rule.message(args, [f"{flag}=1"]) and rule.message(args, [f"{flag}x"[begins:], "--lr"]) is None
        )


@pytest.mark.parametrize(
    "flags",
    [
        ["--position-embedding-type", "rope", "--rotary-base", "100"],
        ["--optimizer", "sgd", "--sgd-momentum", "0.5"],
        ["--optimizer", "muon", "--muon-momentum", "0.8", "--adam-beta2", "0.95"],
        ["--optimizer", "muon", "--muon-scalar-optimizer", "lion", "--lion-beta1", "0.9"],
        ["--lr-decay-style", "WSD", "--lr-wsd-decay-iters", "2"],
        ["--use-mup", "--mup-base-hidden-size", "16"],
        ["--recompute-activations", "--recompute-modules", "core_attn"],
        ["--manual-gc", "--manual-gc-interval", "2"],
        ["--null-tokenizer-pad-id", "3"],
        ["--reset-position-ids", "--eod-mask-loss"],
        ["--rotary-percent=0.5", "--use-rotary-position-embeddings"],
        ["--fp16", "--initial-loss-scale", "64", "--min-loss-scale", "2", "--loss-scale-window", "5", "--hysteresis=1"],
        ["--bf16", "--loss-scale", "64"],
        ["--use-distributed-optimizer", "--loss-scale", "64"],
        ["--swiglu", "--no-bias-swiglu-fusion"],
        ["--save", "folder", "--save-interval", "2", "--ckpt-format", "torch"],
        [
            "--save",
            "new",
            "--save-interval=2",
            "--load",
            "new",
            "--no-load-optim",
            "--no-load-rng",
            "--ckpt-format=torch",
        ],
        ["--clip-grad", "inf"],
        ["--seed", "1"],
    ],
    ids=" ".join,
)
def test_flags_with_effect_are_accepted(flags):
    assert complaint(command(2, 2, "2bw", *flags), 2) is None


@pytest.mark.parametrize(
    "flags, expected",
    [
        (["--mask-prob", "0"], "--mask-prob 0.0: it must be greater than 0 and less than 1"),
        (["--short-seq-prob", "1.5"], "--short-seq-prob 1.5: it must be at least 0 and at most 1"),
        (
            ["--seq-length", "4"],
            "--seq-length 4 is too short for a pair of sentences: --mock-data of a BERT needs 5 or more",
        ),
        (["--seq-length", "5"], None),
    ],
    ids=lambda case: " ".join(case) if isinstance(case, list) else None,
)
def test_numbers_of_a_bert(flags, expected):
    assert complaint([BERT, *command(2, 2, "2bw", *flags)], 2) == expected


@pytest.mark.parametrize(
    "extra, level, backend, fits",
    [(2, 2, "nccl", False), (1, 2, "nccl", True), (2, 1, "nccl", True), (2, 2, "gloo", True)],
)
def test_timers_that_wait_for_the_gpu_allow_one_more_forward_ahead(extra, level, backend, fits, monkeypatch):
    monkeypatch.setattr(cpu, "installed", lambda: False)
    argv = command(
        2,
        6,
        "2bw",
        "--no-barrier-with-level-1-timing",
        two_bw_extra_warmup=extra,
        timing_log_level=level,
        distributed_backend=backend,
    )
    message = complaint(argv, 2)
    assert message is None if fits else message.startswith("--two-bw-extra-warmup of 2 or more does not work with")


@pytest.mark.parametrize(
    "flags",
    [
        ["--bert-no-binary-head"],
        ["--mask-prob", "0.2", "--short-seq-prob", "0"],
        ["--position-embedding-type", "rope", "--rotary-percent", "0.5"],
        ["--swiglu", "--normalization", "RMSNorm"],
    ],
    ids=" ".join,
)
def test_flags_with_effect_in_a_bert_are_accepted(flags):
    assert complaint([BERT, *command(2, 2, "2bw", *flags)], 2) is None


@pytest.mark.parametrize("schedule", ["2bw", "pipedream-flush", "megatron"])
@pytest.mark.parametrize("name", ["pp", "dp_cp", "embd", "tp"])
@pytest.mark.parametrize("flag", ["--nccl-communicator-config-path", "--high-priority-stream-groups"])
def test_settings_of_communicators_that_a_schedule_replaces(flag, name, schedule, tmp_path, monkeypatch):
    monkeypatch.setattr(cpu, "installed", lambda: False)
    (tmp_path / "nccl.yaml").write_text(f"{name}:\n  max_ctas: 4\n")
    given = name if flag.endswith("groups") else str(tmp_path / "nccl.yaml")
    message = complaint(command(2, 2, schedule, flag, given), 2)
    replaced = {"2bw": {"pp", "dp_cp", "embd"}, "pipedream-flush": {"pp"}, "megatron": set()}[schedule]
    assert (message is not None) == (name in replaced)
    assert message is None or message.startswith(flag) and message.endswith(f"take {name} out")


def test_settings_of_communicators_that_are_no_yaml(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu, "installed", lambda: False)
    (tmp_path / "nccl.yaml").write_text("{dp_cp: [")
    message = complaint(command(2, 2, "2bw", nccl_communicator_config_path=tmp_path / "nccl.yaml"), 2)
    assert message.startswith(f"--nccl-communicator-config-path {tmp_path}/nccl.yaml: ") and "\n" not in message


# --- environment variables -----------------------------------------------------------------------------------------

NAMES = ("CUDA_LAUNCH_BLOCKING", "NCCL_LAUNCH_ORDER_IMPLICIT", "PYTORCH_NO_CUDA_MEMORY_CACHING")


@pytest.fixture
def on_gpus(monkeypatch):
    """The checks of a GPU host, with no variable set."""
    monkeypatch.setattr(cpu, "installed", lambda: False)
    for name in (*NAMES, *environment.SET):
        monkeypatch.setenv(name, "")  # restored at the end even where a check sets it
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "stages, world, schedule, flags, hangs",
    [
        (2, 2, "2bw", {}, True),
        (2, 2, "gpipe", {}, True),
        (2, 2, "megatron", {}, False),
        (1, 2, "2bw", {}, True),  # the late step's collectives
        (1, 1, "2bw", {}, False),
        (1, 2, "pipedream-flush", {}, False),
        (2, 2, "2bw", {"two_bw_exchange": "gloo"}, True),
        (2, 2, "gpipe", {"two_bw_exchange": "gloo"}, False),
        (2, 2, "2bw", {"distributed_backend": "gloo"}, False),
    ],
)
def test_variables_with_which_a_run_over_nccl_would_hang(name, stages, world, schedule, flags, hangs, on_gpus):
    argv = command(stages, 2, schedule, **{"distributed_backend": "nccl"} | flags)
    for text in ("", "0"):
        on_gpus.setenv(name, text)
        assert complaint(argv, world) is None
    on_gpus.setenv(name, "1")
    message = complaint(argv, world)
    assert (message is not None) == hangs
    assert not hangs or message.startswith(f"{name}=1 does not work with --pipeline-schedule {schedule}: ")
    assert not hangs or message.endswith("; unset it, or give --distributed-backend gloo")


@pytest.mark.parametrize("name", ["TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"])
def test_a_warning_where_the_cpu_would_wait_for_each_message(name, monkeypatch):
    over_nccl = parse(command(2, 2, "2bw", distributed_backend="nccl"), 2)
    assert environment.warning(over_nccl) is None
    monkeypatch.setenv(name, "1")
    assert environment.warning(over_nccl).startswith(f"> {name}=1: ")
    for argv in (command(2, 2, "2bw"), command(2, 2, "megatron", distributed_backend="nccl")):
        assert environment.warning(parse(argv, 2)) is None


@pytest.mark.parametrize(
    "flags, expected",
    [
        (["--pipeline-schedule", "2bw"], "32"),
        (["--pipeline-schedule", "gpipe", "--tensor-model-parallel-size", "1"], "32"),
        (["--pipeline-schedule", "2bw", "--tensor-model-parallel-size", "2"], None),
        (["--pipeline-schedule", "2bw", "--context-parallel-size=2"], None),
        (["--pipeline-schedule", "megatron"], None),
        ([], None),
    ],
)
def test_a_hardware_queue_for_each_stream(flags, expected, on_gpus):
    parse_early(flags, stop)
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == expected
    on_gpus.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    parse_early(flags, stop)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"


def test_the_queues_are_set_before_anything_asks_cuda(on_gpus):
    seen = []
    on_gpus.setattr(cpu, "wanted", lambda device: seen.append(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")))
    parse_early(["--pipeline-schedule", "2bw", "--device", "cuda"], stop)
    assert seen == ["32"]


@pytest.mark.parametrize(
    "schedule, stages, flags, expected",
    [
        ("2bw", 2, {}, "4"),
        ("gpipe", 2, {}, "4"),
        ("2bw", 1, {}, None),
        ("2bw", 2, {"two_bw_exchange": "gloo"}, None),
        ("2bw", 2, {"distributed_backend": "gloo"}, None),
        ("2bw", 2, {"context_parallel_size": 2, "transformer_impl": "transformer_engine"}, None),
        ("megatron", 2, {}, None),
    ],
)
def test_a_bound_on_the_channels_of_a_message(schedule, stages, flags, expected, on_gpus):
    on_gpus.setattr(combinations, "installed", lambda package: True)
    argv = command(stages, 2, schedule, **{"distributed_backend": "nccl"} | flags)
    assert complaint(argv, 4 if "context_parallel_size" in flags else stages) is None
    assert os.environ.get("NCCL_MAX_P2P_NCHANNELS") == expected
    on_gpus.setenv("NCCL_MAX_P2P_NCHANNELS", "16")
    assert complaint(argv, 4 if "context_parallel_size" in flags else stages) is None
    assert os.environ["NCCL_MAX_P2P_NCHANNELS"] == "16"


# --- messages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, expected",
    [
        ("num_layers (5) must be divisible", "--num-layers (5) must be divisible"),
        ("args.fp16 and not args.bf16", "--fp16 and not --bf16"),
        ("self.num_layers and config.hidden_size", "--num-layers and --hidden-size"),
        ("expected seq-length to be a multiple", "expected --seq-length to be a multiple"),
        ("--num-layers is a flag, save and load are words", "--num-layers is a flag, save and load are words"),
        ("masked_softmax_fusion fails", "--no-masked-softmax-fusion fails"),
        ("fp8 needs fp8_format", "fp8 needs fp8_format"),
        ("unknown_name stays", "unknown_name stays"),
    ],
)
def test_name_flags(text, expected):
    assert name_flags(text, parser_of("2bw", "gpt")) == expected
    assert name_flags(text, None) == text


def caught(action) -> Exception:
    try:
        action()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_explain_names_the_flag_of_a_value_that_megatron_cannot_convert():
    error = caught(lambda: parse(command(2, 2, "2bw", "--cuda-graph-modules", "nonsense"), 2))
    assert explain(error, parser_of("2bw", "gpt")) == "argument --cuda-graph-modules: invalid value: 'nonsense'"


@pytest.mark.parametrize(
    "flags, start, end",
    [
        (["--fp16-lm-cross-entropy"], "lm cross entropy in fp16", "it must be that --fp16)"),
        (
            ["--weight-decay-incr-style", "linear"],
            "Megatron refuses",
            "it must be that --start-weight-decay is not None)",
        ),
        (["--distribute-saved-activations"], "can distribute", "it must be that --tensor-model-parallel-size > 1)"),
        (["--overlap-param-gather"], "--overlap-param-gather only supported with", "dist_muon"),
        (["--fp32-residual-connection"], "residual connection", "it must be that --fp16 or --bf16)"),
    ],
    ids=" ".join,
)
def test_explain_names_a_flag_in_megatrons_errors(flags, start, end):
    from megatron.training.arguments import validate_args

    args = parse(command(2, 2, "gpipe", *flags), 2)
    args.rank = 0
    message = explain(caught(lambda: validate_args(args)), parser_of("gpipe", "gpt"))
    assert message.startswith(start) and message.endswith(end)


@pytest.mark.parametrize(
    "error, typed, expected",
    [
        (lambda: json.loads("four"), ["--some-json", "four"], "--some-json four: Expecting value"),
        (lambda: open("no/such"), ["--some-file", "no/such"], "--some-file no/such: [Errno 2]"),
        (lambda: torch.empty(2**60), ["--vocab-size", "9" * 20], "the model does not fit into the memory: check --num"),
        (lambda: bytearray(2**62), [], "the model does not fit into the memory: check --num-layers"),
    ],
)
def test_explain_names_the_flag_by_the_value_that_the_error_holds(error, typed, expected, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt_2bw.py", "--bf16", *typed])
    assert explain(caught(error), parser_of("2bw", "gpt")).startswith(expected)


def test_explain_says_where_an_error_comes_from_that_names_no_flag():
    error = caught(lambda: sum(["no", "numbers"]))
    line_number = error.__traceback__.tb_next.tb_lineno
    assert explain(error, parser_of("2bw", "gpt")).endswith(f"(TypeError in test_arguments.py:{line_number})")


@pytest.mark.parametrize(
    "flags, expected",
    [
        (
            ["--pipeline-schedle", "2bw"],
            "unrecognized arguments: --pipeline-schedle 2bw (did you mean --pipeline-schedule?)",
        ),
        (["--num-layer", "4"], "unrecognized arguments: --num-layer 4 (did you mean --num-layers?)"),
        (["--lr", "fast"], "argument --lr: invalid float value: 'fast'"),
        (["--num-layers"], "argument --num-layers: expected one argument"),
        (["--ckpt-format", "zip"], "argument --ckpt-format: invalid choice: 'zip'"),
    ],
    ids=" ".join,
)
def test_argparse_errors_are_one_line(flags, expected):
    with pytest.raises(Stopped) as stopped:
        parse([*command(2, 2), *flags], 2)
    assert str(stopped.value).startswith(expected) and "\n" not in str(stopped.value)


@pytest.mark.parametrize(
    "argv, line",
    [
        (["--lr", "1", "--lr", "2", "--on"], "--lr 1, then 2"),
        (["--lr=1", "--lr", "2", "--lr", "3"], "--lr 1, then 2, then 3"),
        (["--sizes", "1", "2", "--lr", "1", "--sizes", "1"], "--sizes 1 2, then 1"),
        (["--lr", "1", "--lr", "1", "--on", "--on"], None),
        (["--lr", "1", "--row", "a", "--row", "b", "-v", "-v"], None),
    ],
)
def test_a_flag_that_is_typed_twice(argv, line):
    """The last value counts, as in Megatron, so that a job script's defaults can be overridden; one line says so."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float)
    parser.add_argument("--on", action="store_true")
    parser.add_argument("--sizes", nargs="+")
    parser.add_argument("--row", action="append")
    parser.add_argument("-v", action="count")
    assert repeated(parser, argv) == (line and f"typed several times, the last one counts: {line}")


def test_help_can_be_printed():
    text = parser_of("2bw", "bert").format_help()
    assert "--pipeline-schedule" in text and "--bert-no-binary-head" in text


@pytest.mark.parametrize(
    "flags, expected",
    [
        (["--pipeline-schedule", "3bw"], "argument --pipeline-schedule: invalid choice: '3bw'"),
        (["--pipeline-schedule"], "argument --pipeline-schedule: expected one argument"),
        (["--two-bw-extra-warmup", "1,x"], "argument --two-bw-extra-warmup: 1,x: must be whole numbers of 0 or more"),
        (["--two-bw-extra-warmup", "1,-1"], "argument --two-bw-extra-warmup: 1,-1: must be whole numbers of 0 or more"),
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (["--device", "cuda"], "--device cuda: no GPU is visible to torch; use --device cpu"),
    ],
    ids=" ".join,
)
def test_flags_of_this_project_are_checked_before_megatron_is_imported(flags, expected):
    with pytest.raises(Stopped, match=expected.replace("?", r"\?")):  # the CPU answers for CUDA here
        parse_early(flags, stop)


def test_number_of_processes():
    assert processes({}, stop) == 1 and processes({"RANK": "3", "WORLD_SIZE": "4"}, stop) == 4
    for variables in ({"WORLD_SIZE": "two"}, {"RANK": "-1"}, {"LOCAL_RANK": ""}):
        with pytest.raises(Stopped, match="start the processes with torchrun"):
            processes(variables, stop)


def test_a_missing_package_is_named(monkeypatch):
    for module in (checks, combinations):
        monkeypatch.setattr(module, "installed", lambda package: False)
    for flags, package in (
        (["--tensorboard-dir", "folder"], "tensorboard"),
        (["--log-energy"], "pynvml"),
        (["--wandb-project", "p", "--wandb-save-dir", "folder"], "wandb"),
        (["--optimizer", "muon"], "emerging_optimizers"),
        (["--async-save", "--use-persistent-ckpt-worker"], "nvidia_resiliency_ext"),
        (["--tokenizer-type", "TikTokenizer", "--tokenizer-model", "m"], "tiktoken"),
    ):
        message = complaint(command(2, 2, "gpipe", *flags), 2)
        assert message.startswith(flags[0]) and package in message and "not installed" in message
    monkeypatch.setattr(cpu, "installed", lambda: False)
    message = complaint(command(2, 2, "2bw", "--transformer-impl", "transformer_engine"), 2)
    assert message.startswith("--transformer-impl transformer_engine") and "--transformer-impl local" in message
    assert all(flag in message for flag in ("persist-layer-norm", "gradient-acc", "masked-softmax", "rope-fusion"))


@pytest.mark.parametrize("modules, real", [((), False), (("apex",), False), (("apex", "amp_C"), True)])
def test_apex_is_nvidias(modules, real, tmp_path, monkeypatch):
    """The registry has another package of the name, which Megatron would take for it."""
    for module in modules:
        (tmp_path / f"{module}.py").write_text("raise ImportError('it is only looked for')")
    monkeypatch.syspath_prepend(tmp_path)
    assert unsupported.installed("apex") == real
    for argv, local in ((command(2, 2), "local"), ([BERT, *command(2, 2)], "local")):
        message = complaint(argv, 2)
        assert (message is not None) == (bool(modules) and not real)
        assert message is None or message.startswith(f"--transformer-impl {local}: Megatron takes the installed")


@pytest.mark.parametrize(
    "vocabulary, merges, expected",
    [
        ('{"a": 0, "b": 1, "ab": 2}', "#version: 0.2\na b\n", None),
        ('{"a": 0, "b": 1, "ab": 2}', "#version: 0.2\na b\nb b\n", "line 3, 'b b', makes no token of it"),
        ('{"a": 0, "b": 1, "ab": 2}', "a b\nthree words here\n", "line 2, 'three words here', makes no token of it"),
        ("not JSON", "a b\n", "it is no vocabulary"),
        ("[]", "a b\n", "it is no vocabulary"),
    ],
)
def test_a_vocabulary_and_merges_that_do_not_fit(vocabulary, merges, expected, tmp_path):
    names = tmp_path / "vocab.json", tmp_path / "merges.txt"
    for name, text in zip(names, (vocabulary, merges)):
        name.write_text(text)
    message = complaint(
        command(2, 2, tokenizer_type="GPT2BPETokenizer", vocab_size=None, vocab_file=names[0], merge_file=names[1]), 2
    )
    assert message is None if expected is None else expected in message


def test_a_checkpoint_that_is_cut_short_is_found_before_training(tmp_path):
    (tmp_path / "iter_0000004").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    expected = f"--load {tmp_path}: iter_0000004 was not written to its end, or not by Megatron"
    assert expected in complaint(command(2, 2, load=tmp_path), 2)
    assert expected in complaint(command(2, 2, load=tmp_path, save=tmp_path, save_interval=2), 2)
    assert f"--load {tmp_path}: there is no iter_0000002" in complaint(command(2, 2, load=tmp_path, ckpt_step=2), 2)
    message = complaint(
        command(2, 2, "2bw", "--use-distributed-optimizer", load=tmp_path, ckpt_format="torch", ckpt_step=2), 2
    )
    assert message.startswith("--ckpt-step does not work with --ckpt-format torch and --use-distributed-optimizer")
