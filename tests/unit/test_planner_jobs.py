"""The scripts that start a plan: bash reads them, torchrun and Megatron's parser take
their words, and they are the plan's."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_2bw.tools.planner.cost.simulated import Cost
from megatron_2bw.tools.planner.descriptions import cluster as clusters
from megatron_2bw.tools.planner.descriptions.model import PRESETS
from megatron_2bw.tools.planner.descriptions.plan import Plan
from megatron_2bw.tools.planner.tell import jobs, training
from tests.unit.test_planner_legality import on_a_gpu_host, parsed  # noqa: F401  a fixture that acts by itself

ROOT = Path(__file__).parents[2]
NODE_SH = f"{ROOT}/megatron_2bw/tools/slurm/node.sh"
GPT = PRESETS["gpt-355m"]
P3 = clusters.preset("p3.16xlarge", 1)
H100 = clusters.preset("dgx-h100", 2)
LINE = Plan(1, 4, 2, 4, 8, late=2, corrected=True)
SQUARE = Plan(
    2,
    4,
    2,
    1,
    8,
    recompute="full",
    distributed_optimizer=True,
    pipeline_inside=True,
    sequence_parallel=True,
)
# What every job asks Slurm for. Slurm signals the script 120 s before the time limit.
SBATCH = (
    "--ntasks-per-node=1 --exclusive --time=24:00:00 --signal=B:TERM@120 --requeue "
    "--open-mode=append"
).split()
SBATCH.append("--output=%x-%j.log")
# Prints the words that it is given, a line each.
STUB = '#!/bin/bash\nprintf "%s\\n" "$0" "$@" > words\n'

CASES = [
    pytest.param(LINE, GPT, P3, "fp16", id="gpt"),
    pytest.param(
        replace(LINE, schedule="megatron", virtual=3, late=None, corrected=False),
        GPT,
        P3,
        "bf16",
        id="interleaved",
    ),
    pytest.param(
        replace(SQUARE, schedule="pipedream-flush"),
        GPT,
        H100,
        "fp32",
        id="flush, tensor",
    ),
]


def run(
    text: str, folder: Path, *flags: str, stub: str = STUB, **environment: str
) -> subprocess.CompletedProcess:
    """The script under bash, where torchrun and Slurm's tools only write down what they
    are given."""
    for name in ("torchrun", "srun"):
        (folder / name).write_text(stub)
    (folder / "scontrol").write_text("#!/bin/bash\nprintf 'node-a\\nnode-b\\n'\n")
    (folder / "squeue").write_text("#!/bin/bash\ntrue\n")
    (folder / "script").write_text(text)
    for path in folder.iterdir():
        path.chmod(0o755)
    variables = {"HOME": str(Path.home()), "PATH": f"{folder}:{os.environ['PATH']}"}
    command = ["bash", "script", *flags]
    return subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env=variables | environment,
    )


def words_of(
    text: str, folder: Path, *flags: str, **environment: str
) -> tuple[list[str], list[str]]:
    """(torchrun's own options, the entry script and the words behind it)."""
    done = run(text, folder, *flags, **environment)
    assert done.returncode == 0, done.stderr
    command, *words = (folder / "words").read_text().splitlines()
    if command.endswith("srun"):
        words = words[words.index(NODE_SH) + 3 :]
    at = next(
        at for at, word in enumerate(words) if word == "-m" or word.endswith(".py")
    )
    return words[:at], words[at + (words[at] == "-m") :]


NODE = {"NODE_RANK": "1", "MASTER_ADDR": "first"}
SLURM = {"SLURM_JOB_ID": "71234", "SLURM_JOB_NAME": "job", "SLURM_JOB_NUM_NODES": "2"}
SLURM |= {
    "SLURM_JOB_NODELIST": "node-[a-b]",
    "MEGATRON_2BW": str(ROOT),
    "PYTHON": sys.executable,
}


KIND = pytest.mark.parametrize("kind", ["run.sh", "job.sbatch"])


def written(
    kind: str, plan=LINE, model=GPT, cluster=P3, precision="fp16", name="job"
) -> tuple[str, dict[str, str]]:
    """The script of a plan, and the environment in which it runs here."""
    cost = Cost(model, cluster, precision)
    if kind == "run.sh":
        return jobs.torchrun_script(cost, cost.estimate(plan)), NODE
    return jobs.sbatch_script(cost, cost.estimate(plan), name), SLURM


@pytest.mark.parametrize("plan, model, cluster, precision", CASES)
@KIND
def test_megatrons_parser_and_this_projects_checks_read_the_plan(
    kind, plan, model, cluster, precision, tmp_path
):
    text, variables = written(kind, plan, model, cluster, precision)
    _, (script, *words) = words_of(text, tmp_path, "--lr", "1e-3", **variables)
    flags = [*model.flags(), *plan.flags(precision)]
    at = words.index("--num-layers")
    # test_planner_legality.py reads them back
    assert words[at : at + len(flags)] == flags
    assert script == (
        "pretrain_gpt_2bw" if kind == "run.sh" else f"{ROOT}/pretrain_gpt_2bw.py"
    )
    args = parsed([*words, "--device", "cuda"], plan.gpus)
    assert (args.vocab_size, args.mock_data, args.lr) == (model.vocab, True, 1e-3)
    saved = str(tmp_path / "checkpoints" / "job") if kind == "job.sbatch" else None
    assert args.save == args.load == saved
    assert args.exit_signal_handler == (kind == "job.sbatch")


def options(words: list[str]):
    """torchrun's own view of its options."""
    from torch.distributed.run import get_args_parser

    return get_args_parser().parse_args([*words, "script.py"])


def test_torchrun_takes_the_options(tmp_path):
    words, _ = words_of(
        written("run.sh", SQUARE, GPT, H100, "bf16")[0], tmp_path, **NODE
    )
    seen = options(words)
    assert (seen.nnodes, seen.nproc_per_node, seen.node_rank) == ("2", "8", 1)
    assert (seen.master_addr, seen.master_port) == ("first", 29500)


def test_torchrun_takes_the_options_of_the_job(tmp_path):
    words, _ = words_of(
        written("job.sbatch", SQUARE, GPT, H100, "bf16")[0], tmp_path, **SLURM
    )
    seen = options(words)
    assert (seen.nnodes, seen.nproc_per_node, seen.rdzv_backend, seen.rdzv_id) == (
        "2",
        "8",
        "c10d",
        "71234-0",
    )
    assert seen.rdzv_endpoint == f"node-a:{20000 + 71234 % 10000}"
    assert seen.max_restarts > 0
    # What saves must have ended before Slurm kills, and torchrun must not kill it long
    # before that.
    words = (tmp_path / "words").read_text().splitlines()
    assert 30 < int(words[words.index(NODE_SH) + 2]) < 120
    status = json.loads((tmp_path / "logs" / "job-71234" / "status.json").read_text())
    assert [entry["status"] for entry in status["history"]] == ["running", "completed"]


@pytest.mark.parametrize(
    "waits", [True, False], ids=["torchrun that waits", "older torchrun"]
)
def test_only_a_torchrun_that_can_wait_is_given_the_seconds_to_save(waits, tmp_path):
    torchrun = tmp_path / "torch" / "distributed" / "run.py"
    torchrun.parent.mkdir(parents=True)
    torchrun.write_text(
        f"import sys; print(sys.argv[1:])  # {'--shutdown-timeout' if waits else ''}"
    )
    for folder in (tmp_path / "torch", torchrun.parent):
        (folder / "__init__.py").touch()
    command = ["bash", NODE_SH, sys.executable, "77", "--max-restarts", "1"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment
    )
    seconds = ["--shutdown-timeout", "77"] if waits else []
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{[*seconds, '--max-restarts', '1']}\n", done.stderr
    assert waits != ("30 s after a signal; SHUTDOWN has no effect" in done.stderr)


@pytest.mark.parametrize("missing", NODE)
def test_on_several_servers_each_must_know_its_number_and_the_first(missing, tmp_path):
    given = {name: value for name, value in NODE.items() if name != missing}
    done = run(written("run.sh", SQUARE, GPT, H100, "bf16")[0], tmp_path, **given)
    assert done.returncode != 0
    assert missing in done.stderr
    assert not (tmp_path / "words").exists()


@KIND
def test_data_args_are_split_as_by_a_shell(kind, tmp_path):
    text, variables = written(kind)
    _, words = words_of(
        text,
        tmp_path,
        DATA_ARGS="--data-path 'my text' \n \"b c\" --x a\\ b $(c) ",
        **variables,
    )
    assert words[-6:] == ["--data-path", "my text", "b c", "--x", "a b", "$(c)"]
    assert "--mock-data" not in words
    assert "--mock-data" in words_of(text, tmp_path, DATA_ARGS=" \n", **variables)[1]
    (tmp_path / "words").unlink()
    done = run(text, tmp_path, DATA_ARGS="--data-path 'a", **variables)
    assert done.returncode == 2
    assert not (tmp_path / "words").exists()
    assert "DATA_ARGS" in done.stderr


def test_slurm_reads_its_options_before_the_first_command():
    text, _ = written("job.sbatch", SQUARE, GPT, H100, "bf16", "my model/2")
    head = re.match(r"(#.*\n|\n)*", text)[0]
    for option in ("--job-name=my-model-2", "--nodes=2", "--gpus-per-node=8", *SBATCH):
        assert f"\n#SBATCH {option}\n" in head
    host = replace(H100, device=replace(H100.device, name="cpu"))
    assert "--gpus-per-node" not in written("job.sbatch", SQUARE, GPT, host, "fp32")[0]


def test_run_sh_uses_a_clone_and_saves_to_a_folder_that_are_named(tmp_path):
    text = written("run.sh")[0]
    interval = training.save_interval(Cost(GPT, P3, "fp16").seconds(LINE))
    _, words = words_of(text, tmp_path, CHECKPOINTS="my folder", MEGATRON_2BW="a clone")
    assert words[0] == "a clone/pretrain_gpt_2bw.py"
    assert words[-6:] == [
        "--save",
        "my folder",
        "--load",
        "my folder",
        "--save-interval",
        f"{interval}",
    ]
    assert "--save" not in words_of(text, tmp_path)[1]


@pytest.mark.parametrize(
    "flags, changes, interval",
    [
        ((), {}, None),
        (("--save-interval", "3"), {}, "3"),
        (("--save-interval=4",), {}, "4"),
        ((), {"SAVE_INTERVAL": "5"}, "5"),
    ],
)
def test_a_job_saves_at_one_interval(flags, changes, interval, tmp_path):
    _, words = words_of(written("job.sbatch")[0], tmp_path, *flags, **SLURM | changes)
    given = " ".join(words).replace("=", " ")
    planned = training.save_interval(Cost(GPT, P3, "fp16").seconds(LINE))
    values = re.findall(r"--save-interval (\S+)", given)
    assert values == [interval or str(planned)]
