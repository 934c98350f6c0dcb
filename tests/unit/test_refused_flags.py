"""Flags that a run cannot honour are refused by name in their scope only; what a
schedule does without is named."""

import re

import pytest

from megatron_2bw.run.flags.unsupported import UNSUPPORTED, WITHOUT, leave_out
from megatron_2bw.schedules import SCHEDULE_NAMES, SCHEDULES
from tests.distributed.training import BERT, command
from tests.unit.command_lines import UNTIED, complaint, parse, parser_of

pytestmark = pytest.mark.usefixtures("on_the_cpu")

# What asks for a feature, where it is not any true value of the flag: its value, or
# several arguments.
ASKED = {
    "--tensor-parallel-num-weight-shards": 2,
    "--context-parallel-size": 2,
    "--num-distributed-optimizer-instances": 2,
    "--kitchen-recipe-number": 0,
    "--optimizer": "dist_muon",
    "--hybrid-layer-pattern": "M*-",
    "--hybrid-override-pattern": "M*-",
    "--loss-scale": dict(optimizer="muon", loss_scale=1024.0),
    "--ckpt-format": dict(
        mtp_num_layers=1,
        untie_embeddings_and_output_weights=False,
        save="checkpoints",
        ckpt_format="torch_dist",
    ),
    "--two-bw-memory": dict(optimizer="muon", two_bw_memory="host"),
    "--moe-router-load-balancing-type": "quantile_balancing",
    UNTIED: False,
}


@pytest.mark.parametrize(
    "rule", UNSUPPORTED, ids=lambda rule: f"{rule.flag[2:]} {rule.scope}"
)
def test_a_refused_flag_is_named_with_its_reason_in_its_scope_only(rule):
    flag, *values = rule.flag.split()
    name = parser_of("2bw", "gpt")._option_string_actions[flag].dest
    asked = ASKED.get(flag, values[0] if values else True)
    if not isinstance(asked, dict):
        asked = {name: asked}
    script = BERT if rule.scope == "bert" else None
    for schedule in SCHEDULE_NAMES:
        args = parse(command(2, 2, schedule, UNTIED, script=script), 2)
        assert rule.line(args) is None
        vars(args).update(asked)
        scopes = {"script", "bert", schedule}
        if schedule in SCHEDULES:
            scopes.add("ours")
            if not SCHEDULES[schedule].flushes:
                scopes.add("no flush")
        line = rule.line(args)
        if rule.scope not in scopes:
            assert line is None, schedule
        else:
            assert line.startswith(flag) and line.endswith(rule.why), schedule


def test_a_rule_names_flags_and_values_that_exist_and_all_of_them_but_these():
    """So that it must learn of a new value."""
    fine = {
        "--cuda-graph-impl": {"none"},
        "--rerun-mode": {"disabled"},
        "--position-embedding-type": {"learned_absolute", "rope"},
        "--muon-fp32-matmul-prec": {"low", "medium"},
    }
    known = parser_of("2bw", "gpt")._option_string_actions
    for rule in (*UNSUPPORTED, *dict(WITHOUT)):
        flag, *values = rule.flag.split()
        choices = known[flag].choices or ()
        names = {getattr(choice, "name", choice) for choice in choices}
        assert not values or names - {*values} == fine[flag]


WITHOUT_EFFECT = (
    "--timing-log-level 2 --use-distributed-optimizer --overlap-grad-reduce "
    "--overlap-param-gather --log-straggler "
    "--use-sharp --use-nccl-ub --defer-embedding-wgrad-compute "
    "--pipeline-model-parallel-comm-backend nccl "
    "--use-ring-exchange-p2p --nccl-communicator-config-path nccl.yaml "
    "--high-priority-stream-groups dp_cp "
    "--rerun-mode validate_results --error-injection-rate 100 "
    "--num-layers-per-virtual-pipeline-stage 1 "
    "--num-virtual-stages-per-pipeline-rank 2 --pipeline-model-parallel-layout E|t*3|t|L "
    "--hybrid-layer-pattern *-|*-|*-|*- --hybrid-override-pattern *|-|*|- "
    "--overlap-p2p-communication-warmup-flush "
    "--microbatch-group-size-per-virtual-pipeline-stage 2 --no-overlap-p2p-communication "
    "--overlap-param-gather-with-optimizer-step"
).split()


def test_what_a_schedule_does_without_is_accepted_with_one_line(capsys):
    assert complaint(command(2, 2, "2bw", *WITHOUT_EFFECT), 2) is None
    (line,) = capsys.readouterr().out.splitlines()
    # more than one stage: 2bw itself has an effect
    flags = [rule.flag.split()[0] for rule, _ in WITHOUT[:-1]]
    assert re.findall(r"(--[\w-]+) \(", line) == flags
    assert complaint(command(1, 1, "2bw"), 1) is None
    assert "no bubble" in capsys.readouterr().out
    assert complaint(command(2, 2, "megatron", *WITHOUT_EFFECT), 2) is None
    (line,) = capsys.readouterr().out.splitlines()
    # Megatron's own schedule has all others
    assert "--log-straggler" in line and "--use-sharp" not in line
    assert complaint(command(2, 2, "2bw"), 2) is None
    assert capsys.readouterr().out == ""
    for schedule, on in (("2bw", False), ("pipedream-flush", True), ("megatron", True)):
        args = parse(command(2, 2, schedule, *WITHOUT_EFFECT), 2)
        leave_out(args)
        assert (args.barrier_with_L1_time, args.overlap_param_gather) == (on, on)
        assert args.rerun_mode == ("validate_results" if on else "disabled")


@pytest.mark.parametrize(
    "layout, joined",
    [
        ("E|t*3|t|L", "Ettt|tL"),
        ("E,t|(t|)*2t*2|L|", "Ettt|ttL"),
        ("Et|t*2|tL", "Et|t*2|tL"),
        ("Ett|ttL", "Ett|ttL"),
    ],
)
def test_the_chunks_of_a_stage_are_joined_in_the_order_of_the_layers(layout, joined):
    """Layouts whose chunks do not divide are Megatron's to refuse."""
    for schedule in SCHEDULE_NAMES:
        flag = "--pipeline-model-parallel-layout"
        args = parse(command(2, 3, schedule, UNTIED, flag, layout), 2)
        line = leave_out(args)
        expected = layout if schedule == "megatron" else joined
        assert args.pipeline_model_parallel_layout == expected
        assert bool(line) == (expected != layout)
