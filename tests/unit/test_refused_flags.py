"""Flags that a run cannot honour are refused by name, each with its reason.

`REFUSED` and `refused_command` are used by the end-to-end test too.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_2bw.flags.checks import CHECKS
from megatron_2bw.flags.own import OWN
from megatron_2bw.flags.rule import Rule
from megatron_2bw.flags.unsupported import UNSUPPORTED
from megatron_2bw.schedules import SCHEDULE_NAMES, SCHEDULES
from tests.distributed.training import BERT, command
from tests.unit.command_lines import FLUSH, UNTIED, complaint, parse, parser_of

pytestmark = pytest.mark.usefixtures("on_the_cpu")


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
    assert {rule.scope for rule in REFUSED} <= {"any", "ours", "no flush", "bert", *SCHEDULES}
    assert all(rule.flag.startswith("--") and rule.why.strip() for rule in REFUSED)
    assert set(VALUES) <= {rule.flag for rule in REFUSED}


def test_every_flag_and_value_that_a_rule_names_exists():
    """In the parser of Megatron's pretraining, with this project's flags in it."""
    known = parser_of("2bw", "gpt")._option_string_actions
    for rule in (*UNSUPPORTED, *CHECKS, *OWN):
        if not isinstance(rule, Rule):
            continue
        flag, *values = rule.flag.split()
        assert set(values) <= {getattr(choice, "name", choice) for choice in known[flag].choices or ()}


# Where a rule refuses all values of a flag but these, so that it must learn of a new one.
FINE = {
    ("--cuda-graph-impl", "ours"): {"none"},
    ("--rerun-mode", "no flush"): {"disabled"},
    ("--position-embedding-type", "bert"): {"learned_absolute", "rope"},
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
    argv, world = refused_command(rule)
    for schedule in SCHEDULE_NAMES:
        chosen = SCHEDULES.get(schedule)
        argv[argv.index("--pipeline-schedule") + 1] = schedule
        expected = {
            "any": True,
            "local": True,
            "bert": True,
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
