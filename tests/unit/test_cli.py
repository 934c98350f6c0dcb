"""megatron-2bw: its commands, and what `train` and `evaluate` make of a plan, a YAML file and flags."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_2bw import cli
from megatron_2bw.errors import UserError
from megatron_2bw.files import read_yaml
from megatron_2bw.planner import cli as planner
from megatron_2bw.start import train
from tests.distributed.training import TINY

FLAGS = [str(word) for pair in TINY.items() for word in pair]


def ended(argv, capsys) -> tuple[int, list[str], list[str]]:
    """The status, and the lines of standard output and of standard error."""
    try:
        status = cli.main(argv)
    except SystemExit as end:
        status = end.code or 0
    out, err = capsys.readouterr()
    return status, out.splitlines(), err.splitlines()


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_a_help(name, capsys):
    status, lines, _ = ended([name, "--help"], capsys)
    assert status == 0 and lines[0].startswith(f"usage: megatron-2bw {name}")


def test_the_help_has_an_example_of_each_command(capsys):
    _, lines, _ = ended([], capsys)
    for name in cli.COMMANDS:
        assert sum(line.startswith(f"  megatron-2bw {name}") for line in lines) == 1
        assert sum(line.startswith(f"  {name} ") for line in lines) == 1


@pytest.mark.parametrize(("typed", "line"), [("simulat", "(did you mean simulate?)"), ("xyz", "xyz is not a command:")])
def test_a_misspelt_command(typed, line, capsys):
    status, _, lines = ended([typed], capsys)
    assert status == 2 and len(lines) == 1 and line in lines[0]


@pytest.mark.parametrize("argv", [[], ["doctor", "--help"], ["simulate", "--figure", "2"], ["train", "gpt", "--x"]])
def test_what_needs_no_large_package(argv):
    code = (
        "import sys; from megatron_2bw import cli\n"
        "try:\n    cli.main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "found = {'torch', 'megatron', 'wandb', 'datasets', 'matplotlib', 'transformers'} & {*sys.modules}\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code, *argv], check=True, stdout=subprocess.DEVNULL)


def test_completion_is_a_script_of_bash(capsys):
    _, lines, _ = ended(["completion"], capsys)
    script = "\n".join([*lines, "COMP_WORDS=(megatron-2bw tr) COMP_CWORD=1; _megatron_2bw; echo ${COMPREPLY[@]}"])
    found = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
    assert found == "train trace\n"


# --- train and evaluate ---------------------------------------------------------------------------------------------


def dry(argv, capsys) -> list[str]:
    """The flags of the command that would be started."""
    status, lines, errors = ended([*argv, "--dry-run"], capsys)
    assert status == 0, errors
    words = shlex.split(lines[-1])
    return words[next(number for number, word in enumerate(words) if word.endswith("_2bw.py")) + 1 :]


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    path = folder / "plan.json"
    flags = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 127"
    cluster = ["--cluster", "p3.16xlarge", "--gpus-per-server", "2"]
    words = [*flags.split(), *cluster, "--max-global-batch-size", "16", "--schedules", "2bw", "--json", str(path)]
    assert planner.main(["plan", *words, "--pipeline-model-parallel-size", "2"]) == 0
    return path


def test_a_plan_is_a_whole_command(plan, capsys):
    """With the flags that run.sh has, mock data too; what is typed takes precedence."""
    flags = dry(["train", "gpt", str(plan), "--lr", "1e-3", "--device", "cpu", "--transformer-impl", "local"], capsys)
    content = json.loads(plan.read_text())
    for word in (*content["run"]["model"], *content["plans"][0]["flags"], "--two-bw-correction", "--mock-data"):
        assert word in flags
    assert flags.count("--lr") == 1 and flags[flags.index("--lr") + 1] == "1e-3"


def test_a_yaml_file_holds_megatrons_flags(tmp_path, capsys):
    text = {name.removeprefix("--").replace("-", "_"): value for name, value in TINY.items()}
    lines = [f"{name}: {json.dumps(value)}" for name, value in text.items()]
    path = tmp_path / "run.yaml"
    path.write_text("\n".join([*lines, "mock-data: true", "pipeline-schedule: 2BW"]))
    flags = dry(["train", "gpt", str(path), "--seed=3"], capsys)
    assert "--mock-data" in flags and "--seed=3" in flags and "--seed" not in flags
    assert flags[flags.index("--hidden-size") + 1] == "32"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lr: 1e-3\nlr: 2e-3\n", "a key is given twice"),
        ("bf16: false\n", "bf16: leave it out"),
        ("bf16:\n", "bf16: leave it out"),
        ("data-path: []\n", "data-path: leave it out"),
        ("nproc: 4\n", "nproc: give it on the command line"),
        ("wandb-exp-name: '@name'\n", "wandb-exp-name: give it on the command line"),
        ("num-layers: 4\nnum_layers: 8\n", "num_layers: it is given twice"),
        ("[" * 5000, "recursion"),
        ("- lr\n", "neither a plan"),
        ("lr: [", "line"),
        ('plans: [{"flags": []}]', "no plan of this release"),
    ],
)
def test_a_file_that_is_neither(text, expected, tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    status, _, lines = ended(["train", "gpt", str(path)], capsys)
    assert status and len(lines) == 1 and expected in lines[0]


def test_mock_data_may_be_typed_beside_a_plan(plan, capsys):
    flags = dry(["train", "gpt", str(plan), "--mock-data", "--device", "cpu", "--transformer-impl", "local"], capsys)
    assert flags.count("--mock-data") == 1 and "NullTokenizer" in flags


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content.pop("run"),
        lambda content: content["run"].pop("data"),
        lambda content: content["plans"][0].pop("save_interval"),
        lambda content: content["plans"][0].update(depth="2"),
        lambda content: content["plans"][0].update(depth=-2),
    ],
)
def test_a_damaged_plan(damage, plan, tmp_path, capsys):
    content = json.loads(plan.read_text())
    damage(content)
    (tmp_path / "plan.json").write_text(json.dumps(content))
    status, _, lines = ended(["train", "gpt", str(tmp_path / "plan.json"), "--save", "x"], capsys)
    assert status and len(lines) == 1 and "it is no plan of this release" in lines[0]


def test_the_plan_of_a_gpt_trains_no_bert(plan, capsys):
    status, _, lines = ended(["train", "bert", str(plan)], capsys)
    assert status and lines == [f"megatron-2bw train: error: {plan}: it is the plan of a gpt: train gpt"]


def test_wrong_flags_end_it_before_a_rank_starts(monkeypatch, capsys):
    monkeypatch.setattr(train, "run_ranks", lambda *given: pytest.fail("a rank was started"))
    status, out, lines = ended(
        ["train", "gpt", *FLAGS, "--mock-data", "--lr-decay-iter", "1", "--hidden-size", "x"], capsys
    )
    assert status == 2 and out == []
    assert [line.split("error: ")[1] for line in lines] == [
        "argument --hidden-size: invalid int value: 'x'",
        "unrecognized arguments: --lr-decay-iter 1 (did you mean --lr-decay-iters?)",
    ]


def test_the_number_of_ranks(monkeypatch, capsys):
    """Of the sizes, or as typed; where they do not fit, one line says so."""
    started = []
    monkeypatch.setattr(train, "run_ranks", lambda prog, command, number: started.append(number) or 0)
    flags = [*FLAGS, "--mock-data", "--pipeline-schedule", "2bw", "--global-batch-size", "8"]
    for more in ([], ["--pipeline-model-parallel-size=2"], ["--pipeline-model-parallel-size", "2", "--nproc", "4"]):
        assert cli.main(["train", "gpt", *flags, *more]) == 0
    twice = ["--pipeline-model-parallel-size", "4", "--pipeline-model-parallel-size=2"]  # the last counts
    assert cli.main(["train", "gpt", *flags, *twice]) == 0
    assert started == [1, 2, 4, 2]
    status, _, lines = ended(["train", "gpt", *flags, "--pipeline-model-parallel-size", "2", "--nproc", "3"], capsys)
    assert status == 2 and "--pipeline-model-parallel-size 2" in lines[0]


SLURM = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1"}


def test_several_hosts_start_torchrun(monkeypatch, capsys):
    flags = [*FLAGS, "--mock-data", "--pipeline-model-parallel-size", "2", "--nproc", "1", "--dry-run"]
    for argv, variables in (
        (["--nnodes", "2", "--node-rank", "1", "--master-addr", "first"], {}),
        (["--master-addr", "first"], SLURM),
    ):
        with monkeypatch.context() as patched:
            for name, value in variables.items():
                patched.setenv(name, value)
            status, lines, _ = ended(["train", "gpt", *flags, *argv], capsys)
        assert status == 0
        expected = "--nnodes 2 --node-rank 1 --nproc-per-node 1 --master-addr first --master-port 29500"
        assert expected in lines[-1] and "torch.distributed.run" in lines[-1]


@pytest.mark.parametrize(
    ("argv", "variables", "expected"),
    [
        (["--node-rank", "1"], {}, "--node-rank needs --nnodes"),
        (["--master-port", "1234"], {}, "--master-port needs --nnodes"),
        (["--nnodes", "2"], {}, "--nnodes needs --node-rank and --master-addr"),
        (["--nnodes", "2", "--node-rank", "2", "--master-addr", "h"], {}, "--node-rank 2 must be below --nnodes 2"),
        ([], SLURM | {"SLURM_STEP_NUM_TASKS": "8"}, "start one task on each node"),
        ([], SLURM | {"SLURM_STEP_NUM_NODES": "1"}, "start one task on each node"),
        ([], SLURM, "SLURM_STEP_NODELIST"),
        ([], SLURM | {"SLURM_NODEID": "x"}, "variables are incomplete"),
    ],
)
def test_hosts_that_do_not_fit(argv, variables, expected, monkeypatch, capsys):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    status, _, lines = ended(["train", "gpt", *argv], capsys)
    assert status == 2 and len(lines) == 1 and expected in lines[0]


def test_an_evaluation_takes_the_model_from_the_checkpoint(tmp_path, monkeypatch, capsys):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("6")
    flags = dry(["evaluate", "gpt", str(tmp_path), "--mock-data", "--eval-iters", "3", "--device", "cpu"], capsys)
    assert {"--skip-train", "--use-checkpoint-args", "--no-load-optim"} < {*flags}
    assert flags.count("--eval-iters") == 1 and flags[flags.index("--load") + 1] == str(tmp_path)


@pytest.mark.parametrize("argv", [[""], ["checkpoints", "--load", "other"], ["checkpoints", "--load=other"]])
def test_an_evaluation_has_one_checkpoint(argv, capsys):
    status, _, lines = ended(["evaluate", "gpt", *argv], capsys)
    assert status == 2 and "leave --load out" in lines[0]


@pytest.mark.parametrize("text", ["--wandb-exp-name 'open", b"\xff\xfe"])
def test_a_file_of_words_that_cannot_be_read(text, tmp_path, capsys):
    (tmp_path / "flags").write_bytes(text if isinstance(text, bytes) else text.encode())
    status, _, lines = ended(["train", "gpt", f"@{tmp_path}/flags"], capsys)
    assert status and len(lines) == 1 and f"@{tmp_path}/flags: " in lines[0]


def test_the_file_may_stand_behind_this_commands_options(plan, capsys):
    more = ["--device", "cpu", "--transformer-impl", "local"]
    assert "--num-layers" in dry(["train", "gpt", "--nproc", "2", str(plan), *more], capsys)


# --- ranks ------------------------------------------------------------------------------------------------------------


def test_the_first_failure_ends_the_other_ranks(capfd):
    code = "import os, sys, time; sys.exit(3) if os.environ['RANK'] == '1' else time.sleep(600)"
    assert train.run_ranks("prog", [sys.executable, "-c", code], 3) == 3
    code = "import os, signal, time; os.kill(os.getpid(), 9) if os.environ['RANK'] == '0' else time.sleep(600)"
    assert train.run_ranks("prog", [sys.executable, "-c", code], 2) == 137
    assert "prog: error: rank 0 was ended by signal 9 (Killed)" in capfd.readouterr().err
    code = code.replace("9)", "40)")  # of real time
    assert train.run_ranks("prog", [sys.executable, "-c", code], 2) == 168


def test_sigterm_reaches_the_ranks_and_a_rank_that_hangs_is_ended(tmp_path):
    """Rank 0 ends as after a save; rank 1 ignores the signal, as one that waits for a lost peer."""
    rank = (
        "import os, signal, sys, time\n"
        "leave = lambda *given: sys.exit(7)\n"
        "signal.signal(signal.SIGTERM, leave if os.environ['RANK'] == '0' else signal.SIG_IGN)\n"
        f"open(os.path.join({str(tmp_path)!r}, os.environ['RANK']), 'w').close()\ntime.sleep(600)"
    )
    code = (
        "import sys; from megatron_2bw.processes import exit_on_signals; from megatron_2bw.start import train\n"
        "train.PATIENCE = 0.5; exit_on_signals()\n"
        f"sys.exit(train.run_ranks('prog', [sys.executable, '-c', {rank!r}], 2))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    while len(list(tmp_path.iterdir())) < 2:
        time.sleep(0.05)
    parent.terminate()
    assert parent.wait(120) == 143


def test_what_the_ranks_are_given(tmp_path):
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT"
    code = f"import os; open(os.environ['RANK'], 'w').write(' '.join(os.environ[n] for n in '{names}'.split()))"
    here = os.getcwd()
    os.chdir(tmp_path)
    try:
        assert train.run_ranks("prog", [sys.executable, "-c", code], 2) == 0
    finally:
        os.chdir(here)
    texts = [(tmp_path / str(rank)).read_text().split() for rank in range(2)]
    assert [text[:5] for text in texts] == [[str(rank), str(rank), "2", "2", "127.0.0.1"] for rank in range(2)]
    assert texts[0][5] == texts[1][5]


def test_yaml_without_surprises(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("a: 1\nb: [1, 2]\n")
    assert read_yaml(path) == {"a": 1, "b": [1, 2]}
    path.write_text("a: {b: 1, b: 2}")
    with pytest.raises(UserError, match="twice"):
        read_yaml(path)
