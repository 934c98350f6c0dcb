"""The room slurm without Slurm: what an ended start is called, the status file, the
flags, the batch shell's faults."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from megatron_2bw.base.errors import UserError
from megatron_2bw.base.files import read_yaml
from megatron_2bw.tools.planner.descriptions.model import PRESETS
from megatron_2bw.tools.planner.tell import training
from megatron_2bw.tools.slurm import job_flags, status
from megatron_2bw.tools.slurm.status import IDLE_STARTS, Facts, Outcome, decide

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "megatron_2bw/tools/slurm"
HALF = " iteration        5/      10 | consumed samples: 40 | lm loss: 4.0E+00 |\n"
LINES = {
    "HALF": HALF,
    "WHOLE": HALF + HALF.replace(" 5/", "10/"),
    "LEFT": HALF + "[exiting program after receiving SIGTERM.] datetime: 2026-01-01\n",
}
CASES = read_yaml(Path(__file__).with_name("slurm_ends.yaml"))


@pytest.mark.parametrize("end", CASES["ends"].values(), ids=CASES["ends"])
def test_how_a_start_has_ended(end):
    facts = {"exit_status": 0} | end
    word, _, again = facts.pop("word").partition(", ")
    name, _, more = facts.get("text", "").partition(" ")
    if name in LINES:
        facts["text"] = LINES[name] + more
    outcome = decide(Facts(**facts))
    assert outcome.word == word
    assert outcome.requeue == (again == "queued again")
    assert outcome.reason and "\n" not in outcome.reason


DIED = {
    "COMPLETING": "running",
    "DEADLINE": "timeout",
    "OUT_OF_MEMORY": "out of memory",
    "CANCELLED+": "failed",
    # its script would have written a word
    "COMPLETED": "failed",
    "": "failed",
}


@pytest.mark.parametrize("state, word", DIED.items())
def test_a_job_that_died_without_a_word_is_written_down_when_somebody_looks(
    state, word, tmp_path, monkeypatch, capsys
):
    """A job whose word is written, and one without a number, stay."""
    for name in ("squeue", "sacct"):
        executable(tmp_path / name, f'[[ $* == *" 7" ]] || exit 1\necho "{state}"')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    ended = tmp_path / "ended" / "status.json"
    died = tmp_path / "died" / "status.json"
    queued = tmp_path / "queued" / "status.json"
    status.write(ended, Outcome("completed", "start 0"), job="7")
    status.write(died, Outcome("running", "start 0"), job="7")
    status.write(queued, Outcome("pending", "submitted"))  # by a sweep
    folders = [str(path.parent) for path in (ended, died, queued)]
    assert status.main(["show", *folders]) == 0
    words = re.findall(r": ([\w ]+), ", capsys.readouterr().out)
    assert words == ["completed", word, "pending"]
    assert status.read(died)["status"] == word


def executable(path: Path, text: str) -> None:
    """A script of bash."""
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def call(monkeypatch, folder: Path, command: str, start: int, *words: str) -> int:
    text = f"{command} --file {folder}/status.json --job 7 --start {start}"
    argv = [*text.split(), "--checkpoints", str(folder), *words]
    monkeypatch.setattr(sys, "argv", ["status.py", *argv])
    return status.main()


def test_a_job_goes_on_as_long_as_it_saves_iterations(tmp_path, monkeypatch, capsys):
    words = []
    for start, saved in enumerate((1, 2, 5, *[5] * IDLE_STARTS)):
        assert call(monkeypatch, tmp_path, "start", start) == 0
        log = tmp_path / f"start-{start}-node-0-a.log"
        log.write_text(LINES["LEFT"])
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(str(saved))
        call(monkeypatch, tmp_path, "end", start, "--signalled")
        words.append(capsys.readouterr().out.strip())
    assert words == ["requeue"] * (2 + IDLE_STARTS) + ["timeout"]


def test_a_job_whose_nodes_fail_again_and_again_ends(tmp_path, monkeypatch, capsys):
    """Slurm starts it again by itself then, so nobody has called `end`."""
    for start in range(IDLE_STARTS):
        assert call(monkeypatch, tmp_path, "start", start) == 0
    assert call(monkeypatch, tmp_path, "start", IDLE_STARTS) == 1
    assert "no iteration saved" in capsys.readouterr().err
    assert status.read(tmp_path / "status.json")["status"] == "failed"


def test_the_end_of_the_logs_of_this_start_counts(tmp_path, monkeypatch, capsys):
    (tmp_path / "start-0-node-0-a.log").write_text("CUDA out of memory")
    (tmp_path / "start-1-node-0-a.log").write_text(
        "out of memory\n" + "x" * status.TAIL + "\nerror: the end"
    )
    assert call(monkeypatch, tmp_path, "end", 1, "--exit-status", "1") == 0
    assert capsys.readouterr().out == "failed\n"
    assert status.read(tmp_path / "status.json")["reason"] == "error: the end"


PLAN = """
model: {name: gpt-2.2b, kind: gpt}
precision: fp16
cluster: {servers: 2, gpus_per_server: 8}
run: {model: [--num-layers, 32], data: [--mock-data]}
plans:
  - flags: [--pipeline-schedule, 2bw, --fp16]
    training: [--train-iters, 7]
    save_interval: 20
    tensor: 1
    context: 1
    depth: 8
    width: 2
"""


def flags_of(
    kind: str, model: str, plan: object, precision: str, data="", save=False, servers=2
) -> str:
    """The flags of a job on servers with eight GPUs each."""
    sizes = dict(servers=servers, processes=8)
    chosen = dict(kind=kind, model=model, plan=str(plan), precision=precision)
    options = SimpleNamespace(**sizes, **chosen, data=data, save=save)
    return " ".join(job_flags.flags_of_job(options))


def test_flags_of_a_model():
    model = PRESETS["bert-2.2b"]
    text = " ".join(model.flags())
    text += """ --tensor-model-parallel-size 1
 --pipeline-model-parallel-size 16 --micro-batch-size 1 --global-batch-size 16""".replace(
        "\n", ""
    )
    first = " ".join(training.flags())
    data = "--mock-data --tokenizer-type NullTokenizer --vocab-size 30522"
    found = flags_of("bert", model.name, "", "bf16")
    assert found == f"{text} --bf16 --pipeline-schedule 2bw {first} {data}"
    found = flags_of("bert", model.name, "", "fp32", "--data-path 'my text'")
    assert found == f"{text} --pipeline-schedule 2bw {first} --data-path my text"


@pytest.fixture
def plan(tmp_path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(yaml.safe_load(PLAN)))
    return path


def test_flags_of_a_plan(plan):
    flags = "--num-layers 32 --pipeline-schedule 2bw --fp16 --train-iters 7"
    assert flags_of("gpt", "", plan, "") == f"{flags} --mock-data"
    saving = flags_of("gpt", "gpt-2.2b", plan, "fp16", "--data-path a", save=True)
    assert saving == f"{flags} --save-interval 20 --data-path a"


def test_a_plan_is_of_the_jobs_model_and_precision_and_nodes(plan):
    with pytest.raises(UserError, match="MODEL=gpt-9b: "):
        flags_of("gpt", "gpt-9b", "", "bf16")
    with pytest.raises(UserError, match="is for gpt-2.2b in fp16"):
        flags_of("gpt", "", plan, "bf16")
    with pytest.raises(UserError, match="the job has 4 with 8: .* --nodes=2 "):
        flags_of("gpt", "", plan, "", servers=4)


SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NAME": "job",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_JOB_NODELIST": "a",
    "MODEL": "gpt-355m",
    "PROCESSES_PER_NODE": "2",
    "MEGATRON_2BW": str(ROOT),
    "PYTHON": sys.executable,
}


def batch(
    folder: Path,
    *words: str,
    srun="true",
    squeue="",
    job="",
    scancel="true",
    **changes: str | None,
):
    """The GPT script under bash, with stand-ins for Slurm's commands that write down
    what they are given, and for sleep, which takes a tenth of its seconds."""
    scontrol = f'echo "scontrol $*" >> called; [[ $* = *hostnames* ]] && echo a || echo "{job}"'
    stubs = {"squeue": squeue, "scontrol": scontrol, "scancel": scancel}
    stubs["srun"] = f'printf "%s\\n" "$@" > words\n{srun}'
    stubs["sleep"] = "PATH=/usr/bin:/bin sleep 0.$1"
    for name, text in stubs.items():
        executable(folder / name, text)
    variables = {"PATH": f"{folder}:{os.environ['PATH']}"} | SLURM | changes
    return subprocess.run(
        ["bash", SCRIPTS / "pretrain_gpt_2bw.sbatch", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={name: value for name, value in variables.items() if value is not None},
        timeout=60,
    )


def content(folder: Path) -> dict:
    return json.loads((folder / "logs" / "job-7" / "status.json").read_text())


def srun_words(folder: Path) -> list[str]:
    return (folder / "words").read_text().splitlines()


def value(folder: Path, flag: str) -> str:
    words = srun_words(folder)
    return words[words.index(flag) + 1]


def test_the_callers_flags_win_and_data_args_replace_the_mock_data(tmp_path):
    # sbatch hands SLURM_ARRAY_JOB_ID on to a job that a job of an array submits
    own = dict(SLURM_ARRAY_JOB_ID="5", job="JobId=7 JobState=RUNNING Restarts=0")
    done = batch(tmp_path, "--lr", "1", DATA_ARGS="--data-path a", **own)
    assert done.returncode == 0 and not done.stderr, done.stderr
    words = srun_words(tmp_path)
    assert words[-4:] == ["--data-path", "a", "--lr", "1"]
    assert not {"--mock-data", "--bf16"} & {*words}
    for flag in ("--save", "--load"):
        assert value(tmp_path, flag) == f"{tmp_path}/checkpoints/gpt-355m"
    assert value(tmp_path, "--save-interval") == "1000"
    assert content(tmp_path)["status"] == "completed"


def test_a_job_of_gpus_that_saves_nothing(tmp_path):
    batch(tmp_path, SLURM_GPUS_ON_NODE="4", PROCESSES_PER_NODE=None, CHECKPOINTS="none")
    assert value(tmp_path, "--nproc-per-node") == "4"
    words = {*srun_words(tmp_path)}
    assert "--bf16" in words
    assert not {"--save", "--save-interval"} & words


def python(folder: Path, line: str) -> str:
    """A Python that runs a line of bash first."""
    path = folder / "python"
    executable(path, f'{line}\nexec {sys.executable} "$@"')
    return str(path)


ARRAY = dict(SLURM_ARRAY_JOB_ID="7", job="JobState=RUNNING ArrayJobId=7")


@pytest.mark.parametrize(
    "words, changes, line",
    [
        ((), dict(PROCESSES_PER_NODE=None), "no GPUs in this allocation: "),
        (("--load=x",), {}, "--load: give CHECKPOINTS=folder"),
        ((), ARRAY, "sbatch --array: "),
        ((), dict(PREAMBLE="fails.sh"), "PREAMBLE=fails.sh has ended with status 3"),
    ],
)
def test_a_refused_job_says_why_in_one_line(words, changes, line, tmp_path):
    (tmp_path / "fails.sh").write_text("(exit 3)\n")
    refused(batch(tmp_path, *words, **changes), line)
    assert content(tmp_path)["status"] == "failed"
    assert content(tmp_path)["reason"].startswith(line)
    assert not (tmp_path / "words").exists()


def refused(done, line: str) -> None:
    assert done.returncode == 2
    assert done.stderr.startswith(f"job: error: {line}")
    assert done.stderr.count("\n") == 1


def test_two_jobs_do_not_save_to_one_folder(tmp_path):
    owner = tmp_path / "checkpoints" / "gpt-355m" / "slurm_job"
    owner.parent.mkdir(parents=True)
    owner.write_text("6\n")
    running = '[[ $* == *"=RUNNING,COMPLETING,SUSPENDED "* ]] && echo 6'
    refused(batch(tmp_path, squeue=running), "job 6 is saving to ")
    assert owner.read_text() == "6\n"
    # Slurm has forgotten the owner
    gone = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    for squeue in (gone, ""):
        owner.write_text("6\n")
        assert batch(tmp_path, squeue=squeue).returncode == 0
        assert owner.read_text() == "7\n" and [*owner.parent.iterdir()] == [owner]
    # While Slurm does not say whose the folder is, it is not taken.
    owner.write_text("6\n")
    busy = "echo x >> asked; echo 'error: Unable to contact slurm controller' >&2; "
    refused(batch(tmp_path, squeue=busy + "exit 1"), "squeue does not tell ")
    assert owner.read_text() == "6\n"
    assert (tmp_path / "asked").read_text() == "x\n" * 3


SAVE = """mkdir -p checkpoints/gpt-355m
echo 5 > checkpoints/gpt-355m/latest_checkpointed_iteration.txt
kill -USR1 $PPID
sleep 1"""


@pytest.mark.parametrize("case", CASES["signals"].values(), ids=CASES["signals"])
def test_a_signal_to_the_batch_shell(case, tmp_path):
    """The file is right at once, if the kill comes next."""
    stubs = dict(srun=SAVE, scancel='echo "scancel $*" >> called', job=case["job"])
    done = batch(tmp_path, "--exit-signal", "SIGUSR1", **stubs)
    words = [entry["status"] for entry in content(tmp_path)["history"]]
    assert words == ["running", *case["words"]], done.stderr
    called = (tmp_path / "called").read_text()
    assert ("scontrol requeue 7" in called) == case["requeued"]
    sent = case["words"] == ["pending"]
    assert ("scancel --signal=SIGUSR1 7" in called) == sent
    assert done.returncode == (0 if case["requeued"] else 1)


def test_outside_the_clone_it_finds_the_installed_package_or_says_where_to_submit(
    tmp_path,
):
    done = batch(
        tmp_path, MEGATRON_2BW=None, JOB_PYTHON=sys.executable, PYTHONPATH=str(ROOT)
    )
    assert done.returncode == 0, done.stderr
    assert f"{SCRIPTS}/node.sh" in srun_words(tmp_path)
    done = batch(tmp_path, MEGATRON_2BW=None, JOB_PYTHON=python(tmp_path, "exit 1"))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("submit from the clone or ")


def test_one_node_of_a_job_ends_with_its_commands_status_and_with_0_after_a_signal(
    tmp_path,
):
    def node(line: str) -> int:
        torchrun = python(tmp_path, line)
        command = [SCRIPTS / "node.sh", torchrun, "9", "word"]
        return subprocess.run(command, check=False, timeout=20, cwd=tmp_path).returncode

    signalled = "[[ $PET_SIGNALS_TO_HANDLE == *,SIGUSR1,* ]] && kill -USR1 $PPID; sleep 0.2; exit 1"
    for script, expected in (("exit 3", 3), ("exit 0", 0), (signalled, 0)):
        assert node(f"[[ $1 == - ]] && exit; {script}") == expected
    # After a signal that comes before torchrun starts, it does not start.
    assert node("[[ $1 != - ]] || { kill -TERM $PPID; exit; }; touch started") == 0
    assert not (tmp_path / "started").exists()
