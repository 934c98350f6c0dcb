"""A wrong command line ends at once: one line that names the flag, a status that is not 0, no traceback, no hang.

A few are run as a user would, with and without torchrun. Most run the same launcher in processes forked from one that
has imported Megatron already, which saves seconds for each.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from megatron_2bw.local_ranks import run_world
from tests.distributed.training import BERT, command
from tests.e2e.launcher import ROOT, torchrun
from tests.session import once_a_session
from tests.unit.command_lines import dataset
from tests.unit.test_arguments import MISTAKEN
from tests.unit.test_flags_of_data import DAMAGES, damage
from tests.unit.test_refused_flags import REFUSED, refused_command
from tests.unit.test_saved import DAMAGES as BROKEN
from tests.unit.test_saved import distributed

LIMIT = 60.0  # seconds after which a process counts as hung and is killed
GPT = "pretrain_gpt_2bw.py"
ERRORS = tuple(f"{script}: error: " for script in (GPT, BERT))


@dataclass
class Case:
    """A wrong command line for `world` processes, and what the one line must contain."""

    name: str
    argv: list[str]
    expected: str
    world: int = 2
    environment: dict[str, str | None] = field(default_factory=dict)


@dataclass
class Ending:
    """How a process ended: its status, negative if it was killed, and what it wrote."""

    status: int
    output: str

    def check(self, expected: str, ranks: int = 1) -> None:
        """One line of error; of several ranks, which start seconds apart on a busy machine, the same from each."""
        lines = [line for line in self.output.splitlines() if "error:" in line]
        assert 1 <= len(lines) <= ranks and len(set(lines)) == 1 and lines[0].startswith(ERRORS), self.output[-3000:]
        assert expected in lines[0]
        assert "Traceback" not in self.output
        assert self.status > 0


# --- the processes -------------------------------------------------------------------------------------------------


def endings(rank: int, cases: list[Case]) -> list[Ending]:
    """Run the launcher on every case in a process of its own, two at a time."""
    found: dict[int, Ending] = {}
    running: dict[int, tuple[int, float]] = {}
    waiting = list(enumerate(cases))
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < 2:
                number, case = waiting.pop(0)
                running[fork(case, Path(folder, str(number)))] = number, time.monotonic()
            for pid, (number, start) in list(running.items()):
                if time.monotonic() - start > LIMIT:
                    os.kill(pid, signal.SIGKILL)
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    output = Path(folder, str(number)).read_text()
                    found[number] = Ending(os.waitstatus_to_exitcode(status), output)
                    del running[pid]
            time.sleep(0.005)
    return [found[number] for number in range(len(cases))]


def fork(case: Case, log: Path) -> int:
    """Start a process that does what `python pretrain_gpt_2bw.py ...` does and writes to `log`; its id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 1)
        os.dup2(1, 2)
        sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)
        environ = {"WORLD_SIZE": str(case.world)} | case.environment
        for name, text in environ.items():
            os.environ.pop(name, None) if text is None else os.environ.update({name: text})
        bert = case.argv[0] == BERT
        sys.argv = case.argv if bert else [GPT, *case.argv]
        from megatron_2bw.start.launch import launch

        launch("megatron_2bw.tasks.bert" if bert else "megatron_2bw.tasks.gpt")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(bool(end.code))
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(status)


# --- the cases -----------------------------------------------------------------------------------------------------


def refused() -> Iterator[Case]:
    for number, rule in enumerate(REFUSED):
        if number % 2 == 0:  # the unit test sees them all
            argv, world = refused_command(rule)
            yield Case(f"refused {rule.flag[2:]} {rule.scope}", argv, rule.flag.split()[0], world)


def mistaken() -> Iterator[Case]:
    for case in MISTAKEN[::2]:  # the unit test sees them all
        argv, world, expected = case.values
        yield Case(f"mistake {case.id}", argv, expected, world)


def found_elsewhere() -> Iterator[Case]:
    """What argparse, Megatron's validation, its configuration classes, its set-up and the environment bring."""

    def case(
        expected: str, *flags: str, world: int = 2, schedule: str = "2bw", environment=None, bert=False, **changes
    ) -> Case:
        changed = (f"{name}={value}" for name, value in {**changes, **(environment or {})}.items())
        name = " ".join(("other", *flags, *changed, schedule))
        argv = [*[BERT] * bert, *command(2, 2, schedule, *flags, **changes)]
        return Case(name, argv, expected, world, environment or {})

    yield case("--frobnicate", "--frobnicate")
    yield case("--pipeline-schedle 2bw (did you mean --pipeline-schedule?)", "--pipeline-schedle", "2bw")
    yield case("--pipeline-schedule: invalid choice: 'two-bw'", schedule="two-bw")
    yield case("--lr: invalid float value: 'fast'", lr="fast")
    yield case("--num-layers: invalid int value: 'four'", num_layers="four")
    yield case("--lr: expected one argument", "--lr")
    yield case("--cuda-graph-modules: invalid value: 'nonsense'", "--cuda-graph-modules", "nonsense")
    yield case(
        "--tokenizer-model no/such: there is no such folder",
        tokenizer_type="HuggingFaceTokenizer",
        tokenizer_model="no/such",
        vocab_size=None,
    )
    # Megatron's validation.
    yield case("--batch-size argument is no longer valid, use --micro-batch-size", batch_size=4)
    yield case("it must be that --start-weight-decay is None", start_weight_decay=0.1)
    yield case("--start-weight-decay", weight_decay_incr_style="linear")
    yield case("--num-experts", expert_model_parallel_size=2)
    yield case("--fp32-residual-connection", "--fp32-residual-connection", "--fp16")
    yield case("--use-distributed-optimizer", "--use-distributed-optimizer", optimizer="sgd", schedule="gpipe")
    yield case("--seq-length 2", seq_length=2, bert=True)
    yield case("--ckpt-format torch_dcp", ckpt_format="torch_dcp", save="folder", save_interval=2)
    # Its configuration classes.
    yield case("--use-precision-aware-optimizer", "--use-precision-aware-optimizer", schedule="pipedream-flush")
    yield case("--main-grads-dtype", main_grads_dtype="bf16")
    yield case("--attention-backend flash", "--batch-invariant-mode")
    # The environment.
    yield case("WORLD_SIZE", environment={"WORLD_SIZE": "two"})
    yield case("MASTER_ADDR", environment={"MASTER_ADDR": None})
    yield case("--lr is missing", lr=None, environment={"RANK": "1", "LOCAL_RANK": "0"})  # no first rank has said it


CASES = [*refused(), *mistaken(), *found_elsewhere()]


def checkpoint(folder: Path, **arguments) -> Path:
    """The head of a checkpoint in Megatron's oldest format, saved by one process or by two stages with `arguments`."""
    for rank in ("mp_rank_00", "mp_rank_00_000", "mp_rank_00_001"):
        path = folder / "iter_0000001" / rank / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        torch.save({"args": argparse.Namespace(**arguments), "iteration": 1, "checkpoint_version": 3.0}, path)
    (folder / "latest_checkpointed_iteration.txt").write_text("1")
    return folder


def with_files(folder: Path) -> Iterator[Case]:
    """Damaged datasets, and a checkpoint whose arguments are refused."""
    for how in DAMAGES:
        prefix = dataset(folder / how.replace(" ", "_"))
        damage(prefix, how)
        argv = [word for word in command(2, 2, "2bw", data_path=prefix) if word != "--mock-data"]
        yield Case(how, argv, f"--data-path {prefix}: ")
    for how in ("cut short", "not finished", "of another kind"):
        load = folder / how.replace(" ", "_")
        load.mkdir()
        harm, expected = BROKEN[how]
        harm(distributed(load, 4))
        yield Case(f"checkpoint {how}", command(2, 2, "2bw", load=load), expected)
    load = checkpoint(folder / "experts", num_layers=4, num_experts=8)
    argv = command(1, 2, "pipedream-flush", "--use-checkpoint-args", num_layers=None, ckpt_format="torch", load=load)
    yield Case("checkpoint", argv, "--num-experts 8 ", world=1)


@once_a_session
def ended() -> dict[str, tuple[Case, Ending]]:
    """All cases and how they ended, by name."""
    with tempfile.TemporaryDirectory() as folder:
        cases = [*CASES, *with_files(Path(folder))]
        assert len({case.name for case in cases}) == len(cases)
        (found,) = run_world(1, endings, cases, timeout=250)
    return {case.name: (case, ending) for case, ending in zip(cases, found)}


@pytest.mark.proof
@pytest.mark.parametrize(
    "name",
    [
        *(case.name for case in CASES),
        *DAMAGES,
        "checkpoint",
        "checkpoint cut short",
        "checkpoint not finished",
        "checkpoint of another kind",
    ],
)
def test_one_line_names_the_flag(name):
    case, ending = ended()[name]
    ending.check(case.expected)


# --- as a user runs it ---------------------------------------------------------------------------------------------

TYPED = {
    "--pipeline-schedule: invalid choice: '3bw'": command(2, 2, "3bw"),
    "--device cuda: no GPU is visible": command(2, 2, device="cuda"),
    "use --global-batch-size 4 or more": command(2, 1),
}


def python(*argv: str) -> Ending:
    run = subprocess.run(
        [sys.executable, "pretrain_gpt_2bw.py", *argv],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env=os.environ | {"WORLD_SIZE": "2", "RANK": "0", "PYTHONWARNINGS": "ignore"},
    )
    return Ending(run.returncode, run.stdout + run.stderr)


@pytest.mark.proof("use --global-batch-size 4 or more")
@pytest.mark.skipif(torch.cuda.is_available(), reason="--device cuda is right here")
@pytest.mark.parametrize("expected", TYPED)
def test_typed_on_a_command_line(expected):
    python(*TYPED[expected]).check(expected)


@pytest.mark.parametrize("where", ["arguments", "set-up"])
def test_two_ranks_under_torchrun(where, tmp_path):
    """Both ranks meet the fault: in their arguments, or while they set up, when they are already joined."""
    if where == "arguments":
        argv, expected = command(2, 1), "use --global-batch-size 4 or more"
    else:
        load = checkpoint(tmp_path / "model", num_layers=8)
        argv = command(2, 2, "2bw", ckpt_format="torch", load=load)
        expected = f"--load {load}: it was saved with --num-layers 8, but this run is with --num-layers 4"
    run = torchrun(2, "pretrain_gpt_2bw.py", argv, PET_REDIRECTS="3", PET_LOG_DIR=str(tmp_path), timeout=2 * LIMIT)
    logs = sorted(tmp_path.rglob("stderr.log"))
    assert len(logs) == 2
    Ending(run.returncode, "".join(log.read_text() for log in logs)).check(expected, ranks=2)
