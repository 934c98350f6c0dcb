"""Flags that a run cannot honour are refused by name in their scope only; what a schedule does without is named."""

from __future__ import annotations

import pytest

from megatron_2bw.flags.rule import Rule
from megatron_2bw.flags.unsupported import UNSUPPORTED, WITHOUT
from megatron_2bw.schedules import SCHEDULE_NAMES, SCHEDULES
from tests.distributed.training import BERT, command
from tests.unit.command_lines import UNTIED, complaint, parse, parser_of

pytestmark = pytest.mark.usefixtures("on_the_cpu")

# What to type, where the flag alone does not ask for the feature and the rule names no value.
VALUES = {
    "--num-layers-per-virtual-pipeline-stage": "1",
    "--num-virtual-stages-per-pipeline-rank": "2",
    "--pipeline-model-parallel-layout": "Et|t|t|tL",
    "--yaml-cfg": "run.yaml",
    "--hybrid-layer-pattern": "M*M*",
    "--hybrid-override-pattern": "M*M*",
    "--logits-load-dir": "folder",
    "--logits-save-dir": "folder",
    "--mtp-num-layers": "1",
    "--rampup-batch-size": "2 2 8",
    "--tensor-parallel-num-weight-shards": "2",
    "--num-experts": "4",
    "--fp8-format": "e4m3",
    "--fp4-format": "e2m1",
    "--te-precision-config-file": "recipe.yaml",
    "--kitchen-config-file": "recipe.yaml",
    "--kitchen-recipe-number": "0",
    "--cpu-offloading-num-layers": "1",
    "--step-batch-size-schedule": "8:4",
    "--optimizer": "dist_muon",
    "--iterations-to-skip": "2 3",
    "--result-rejected-tracker-filename": "rejected",
    "--phase-transition-iterations": "2,4",
    "--save-activations-interval": "2",
    "--save-dgrads-interval": "2",
    "--save-wgrads-interval": "2",
    "--save-params-interval": "2",
    "--num-distributed-optimizer-instances": "2",
    "--ddp-param-name-patterns-for-fp32-local-accumulation": "all",
    "--context-parallel-size": "2",
    "--loss-scale": "1024",
}


def refused_command(rule: Rule) -> tuple[list[str], int]:
    """A command line that is right but for the refused flag, and its number of processes."""
    flag, *values = rule.flag.split()
    schedule = {"ours": "pipedream-flush", "no flush": "2bw", "script": "megatron", "bert": "megatron"}.get(
        rule.scope, rule.scope
    )
    flags = [flag, *(values[:1] or VALUES.get(flag, "").split())]
    if flag.startswith("--muon") or flag == "--loss-scale":
        flags += ["--optimizer", "muon"]
    if flag == UNTIED:
        flags = []  # it is refused that the flag is not given
    elif schedule == "pipedream":
        flags.append(UNTIED)
    argv = command(2, 2, schedule, *flags)
    return [BERT, *argv] if rule.scope == "bert" else argv, 4 if flag == "--context-parallel-size" else 2


@pytest.mark.parametrize("rule", UNSUPPORTED, ids=lambda rule: f"{rule.flag[2:]} {rule.scope}")
def test_a_refused_flag_is_named_with_its_reason_in_its_scope_only(rule):
    argv, world = refused_command(rule)
    message = complaint(argv, world)
    reasons = tuple(
        other.why for other in UNSUPPORTED if other.flag == rule.flag
    )  # another scope's rule may come first
    assert message is not None and message.startswith(rule.flag.split()[0]) and message.endswith(reasons)
    right = [*argv[: argv.index("--mock-data") + 1], UNTIED]
    assert complaint(right, world) is None
    for schedule in SCHEDULE_NAMES:
        chosen = SCHEDULES.get(schedule)
        argv[argv.index("--pipeline-schedule") + 1] = schedule
        expected = {
            "script": True,
            "bert": True,
            "ours": chosen is not None,
            "no flush": chosen is not None and not chosen.flushes,
        }.get(rule.scope, rule.scope == schedule)
        assert bool(rule.message(parse(argv, world))) == expected, schedule


def test_a_rule_names_flags_and_values_that_exist_and_all_of_them_but_these():
    """So that it must learn of a new value."""
    fine = {
        "--cuda-graph-impl": {"none"},
        "--rerun-mode": {"disabled"},
        "--position-embedding-type": {"learned_absolute", "rope"},
        "--muon-fp32-matmul-prec": {"low", "medium"},
    }
    known = parser_of("2bw", "gpt")._option_string_actions
    for rule in (*UNSUPPORTED, *(rule for rule, _ in WITHOUT)):
        flag, *values = rule.flag.split()
        choices = {getattr(choice, "name", choice) for choice in known[flag].choices or ()}
        assert not values or choices - {*values} == fine[flag]


WITHOUT_EFFECT = [
    ["--timing-log-level", "2"],
    ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"],
    ["--log-straggler"],
    ["--use-sharp"],
    ["--use-nccl-ub"],
    ["--defer-embedding-wgrad-compute"],
    ["--pipeline-model-parallel-comm-backend", "nccl"],
    ["--use-ring-exchange-p2p"],
    ["--nccl-communicator-config-path", "nccl.yaml"],
    ["--high-priority-stream-groups", "dp_cp"],
    ["--error-injection-rate", "100"],
]


def test_what_a_schedule_does_without_is_accepted_with_one_line(capsys):
    for flags in WITHOUT_EFFECT:
        name = next(rule.flag for rule, _ in WITHOUT if rule.flag in flags)
        assert complaint(command(2, 2, "2bw", *flags), 2) is None
        assert [line.count(name) for line in capsys.readouterr().out.splitlines()] == [1]
    every = [word for flags in WITHOUT_EFFECT for word in flags]
    assert complaint(command(2, 2, "2bw", *every), 2) is None
    assert capsys.readouterr().out.count("\n") == 1
    assert complaint(command(2, 2, "megatron", *every), 2) is None
    (line,) = capsys.readouterr().out.splitlines()
    assert "--log-straggler" in line and "--use-sharp" not in line  # Megatron's own schedule has all others
    assert complaint(command(2, 2, "2bw"), 2) is None and capsys.readouterr().out == ""


def test_the_barriers_of_timers_and_megatrons_gathers_are_off_under_2bw():
    from megatron_2bw.flags.unsupported import settle

    for schedule, on in (("2bw", False), ("pipedream-flush", True), ("megatron", True)):
        args = parse(command(2, 2, schedule, *WITHOUT_EFFECT[0], *WITHOUT_EFFECT[1]), 2)
        settle(args)
        assert (args.barrier_with_L1_time, args.overlap_param_gather) == (on, on)


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--overlap-p2p-communication-warmup-flush", "--use-flash-attn", "--tiktoken-pattern", "v2"],
        ["--ckpt-format", "torch", "--save-interval", "5", "--expert-tensor-parallel-size", "1"],
        ["--profile-step-start", "2", "--initial-loss-scale", "64", "--decrease-batch-size-if-needed"],
        ["--fp16", "--loss-scale", "128", "--recompute-activations", "--optimizer", "sgd", "--sgd-momentum", "0.5"],
        ["--num-virtual-stages-per-pipeline-rank", "1", "--exit-signal-handler", "--num-experts", "0"],
        ["--distributed-backend", "nccl", "--attention-backend", "flash", "--async-save", "--profile"],
    ],
    ids=" ".join,
)
def test_what_megatrons_own_scripts_take_is_accepted(schedule, flags):
    assert complaint(command(2, 2, schedule, UNTIED, *flags), 2) is None


def test_flush_schedules_allow_what_needs_an_empty_pipeline():
    for flags in (
        ["--iterations-to-skip", "2"],
        ["--rerun-mode", "validate_results"],
        ["--save-params-interval", "2", "--save", "folder", "--save-interval", "4"],
    ):
        assert complaint(command(2, 2, "gpipe", *flags), 2) is None
        assert complaint(command(2, 2, "2bw", *flags), 2).startswith(flags[0])
