"""megatron-2bw: its commands, and what `train` and `evaluate` make of a plan, a YAML
file and flags."""

import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_2bw import cli
from megatron_2bw.run.start import train
from megatron_2bw.tools.planner import plan_command as planner
from tests.distributed.training import TINY
from tests.unit.test_early import own_table  # noqa: F401  (a fixture)

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


@pytest.mark.parametrize(
    ("typed", "status", "line"),
    [
        ("simulat", 2, "(did you mean simulate?)"),
        ("xyz", 2, "xyz is not a command:"),
        ("train gpt @gone", 1, "@gone: "),
        ("evaluate gpt gone --mock-data", 1, "evaluate: error: gone: "),
        ("train gpt --nnodes 2", 2, "--node-rank"),
    ],
)
def test_a_mistake_is_answered_in_one_line(typed, status, line, capsys):
    found, _, lines = ended(typed.split(), capsys)
    assert found == status and len(lines) == 1 and line in lines[0]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "doctor --help",
        "simulate --schedule 2bw --stages 2 --microbatches 2",
        "train gpt --x",
    ],
)
def test_what_needs_no_large_package(text, on_the_cpu, own_table):  # noqa: F811
    code = """
import sys
from megatron_2bw import cli
try:
    cli.main(sys.argv[1:])
except SystemExit:
    pass
large = {*"torch megatron wandb datasets matplotlib transformers".split()}
assert not large & {*sys.modules}
"""
    command = [sys.executable, "-c", code, *text.split()]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


# --- train and evaluate
# --------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    """--dry-run only prints: the check of the flags takes seconds
    (e2e/test_front_door.py)."""
    monkeypatch.setattr(train.subprocess, "call", lambda command, env: 0)


def dry(argv, capsys) -> list[str]:
    """The flags of the command that would be started."""
    status, lines, errors = ended([*argv, "--dry-run"], capsys)
    assert status == 0, errors
    words = shlex.split(lines[-1])
    while not words.pop(0).endswith("_2bw.py"):
        pass
    return words


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    text = f"""
        --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 127
        --cluster p3.16xlarge --gpus-per-server 2 --max-global-batch-size 16 --schedules 2bw
        --pipeline-model-parallel-size 2 --json {path}
    """
    assert planner.main(["plan", *text.split()]) == 0
    return path


def test_a_plan_is_a_whole_command(plan, tmp_path, capsys):
    """With the flags that run.sh has, mock data too; what is typed, or stands in a
    file, takes precedence."""
    (tmp_path / "flags").write_text("--device cpu\n--wandb-exp-name 'a b'")
    typed = ["--lr", "1e-3", "--transformer-impl", "local", f"@{tmp_path}/flags"]
    flags = dry(["train", "gpt", "--nproc", "2", str(plan), *typed], capsys)
    assert "a b" in flags
    content = json.loads(plan.read_text())
    first = content["plans"][0]
    expected = {*content["run"]["model"], *first["flags"]}
    assert expected | {"--two-bw-late", "--mock-data"} <= {*flags}
    assert flags.count("--lr") == 1 and flags[flags.index("--lr") + 1] == "1e-3"
    first |= dict(tensor=2, context=2, depth=3, width=2)
    _, ranks = train.flags_of_plan(plan, content, "gpt", [])
    assert ranks == 24


def test_a_yaml_file_holds_megatrons_flags(tmp_path, capsys):
    content = {"mock_data": True, "pipeline-schedule": "2BW"}
    for name, value in TINY.items():
        content[name.removeprefix("--").replace("-", "_")] = value
    (tmp_path / "run.yaml").write_text(json.dumps(content))
    flags = dry(["train", "gpt", str(tmp_path / "run.yaml"), "--seed=3"], capsys)
    assert "--mock-data" in flags and "--seed=3" in flags and "--seed" not in flags
    assert flags[flags.index("--hidden-size") + 1] == "32"


@pytest.mark.parametrize(
    "text", ["bf16: false", "[]", "lr: [", '{"plans": [{"flags": []}]}']
)
def test_a_file_that_is_neither(text, tmp_path, capsys):
    path = tmp_path / "run.json"
    path.write_text(text)
    status, _, lines = ended(["train", "gpt", str(path)], capsys)
    assert status and len(lines) == 1 and str(path) in lines[0]


@pytest.mark.usefixtures("on_the_cpu")  # it makes the table of Megatron's flags
def test_wrong_flags_end_it_before_a_rank_starts(monkeypatch, capsys):
    monkeypatch.setattr(train, "run_ranks", pytest.fail)
    argv = ["train", "gpt", *FLAGS, "--mock-data", "--lr-decay-iter", "1"]
    status, out, (line,) = ended(argv, capsys)
    assert status == 2 and out == []
    assert line.endswith("--lr-decay-iter 1 (did you mean --lr-decay-iters?)")


@pytest.mark.parametrize(
    ("more", "number"),
    [
        ("", 1),
        ("--pipeline-model-parallel-size=2 --nproc 4", 4),
        # the last counts
        ("--pipeline-model-parallel-size 4 --pipeline-model-parallel-size=2", 2),
    ],
)
def test_the_number_of_ranks(more, number, monkeypatch):
    """The ranks of the sizes, or as typed."""
    started = []
    monkeypatch.setattr(
        train, "run_ranks", lambda prog, command: started.extend(command)
    )
    flags = f"--mock-data --pipeline-schedule 2bw --global-batch-size 8 {more}".split()
    assert cli.main(["train", "gpt", *FLAGS, *flags]) == 0
    assert started[started.index("--nproc-per-node") + 1] == str(number)


SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "first,second",
}


@pytest.mark.parametrize(
    ("text", "variables"),
    [("--nnodes 2 --node-rank 1", {}), ("", SLURM)],
)
def test_several_hosts_start_torchrun(text, variables, monkeypatch, capsys):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    common = "--mock-data --pipeline-model-parallel-size 2 --nproc 1 --dry-run"
    words = f"{common} --master-addr first {text}".split()
    status, lines, _ = ended(["train", "gpt", *FLAGS, *words], capsys)
    assert status == 0
    expected = (
        "--nnodes 2 --node-rank 1 --master-addr first --master-port 29500 "
        "--nproc-per-node 1"
    )
    assert expected in lines[-1] and "torch.distributed.run" in lines[-1]


# --- ranks
# --------------------------------------------------------------------------------------


def ranks(tmp_path, text: str, number: int) -> subprocess.Popen:
    """A program that starts ranks of a script with this text."""
    (tmp_path / "rank.py").write_text(
        "import os, signal, sys, time\nrank = os.environ['RANK']\n" + text
    )
    code = (
        "import sys; from megatron_2bw.run.start.torchrun import run_ranks, torchrun\n"
        f"sys.exit(run_ranks('prog', torchrun({number}, script={str(tmp_path / 'rank.py')!r})))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("fault", "status", "line"),
    [
        ("sys.exit(3)", 3, ""),
        ("os.kill(os.getpid(), 9)", 137, "prog: error: rank 1 was ended by signal 9\n"),
    ],
)
def test_the_first_failure_ends_the_other_ranks(fault, status, line, tmp_path):
    parent = ranks(tmp_path, f"{fault} if rank == '1' else time.sleep(600)", 2)
    _, errors = parent.communicate(timeout=200)
    assert errors == line and parent.returncode == status


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_reaches_the_ranks(number, tmp_path):
    """They end as after a save."""
    text = (
        f"signal.signal({number}, lambda *_: (open('saved' + rank, 'w'), sys.exit()))\n"
    )
    parent = ranks(tmp_path, f"{text}open('begun' + rank, 'w')\ntime.sleep(600)", 2)
    while len(list(tmp_path.glob("begun*"))) < 2:
        time.sleep(0.05)
    parent.send_signal(number)
    _, errors = parent.communicate(timeout=200)
    assert errors == "" and parent.returncode == 128 + number
    assert len(list(tmp_path.glob("saved*"))) == 2
