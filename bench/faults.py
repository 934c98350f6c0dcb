"""A training run whose ranks are killed at random moments, compared with the same run
without kills.

    python bench/faults.py --kills 30 --seed 1 --json out/bench/faults.json

The job: pretrain_gpt_2bw.py under `torchrun --max-restarts`, two stages, fp16 with
dynamic loss scaling, dropout, evaluation and a checkpoint every few iterations. A kill
is a SIGKILL to a random rank while the run starts, iterates, writes a checkpoint or
evaluates. After each kill all other ranks must end, the checkpoint to continue from
must be whole, and torchrun starts the ranks again. At the end every printed loss and
validation loss, and all tensors of the last checkpoint, are compared with those of the
undisturbed run. Writes the JSON. Status 1 if anything was lost or differs.
"""

import argparse
import contextlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed.checkpoint as dcp
from torch.utils._pytree import keystr, tree_flatten_with_path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.tables import new_parser, write_result
from megatron_2bw.base import run_log
from megatron_2bw.base.local_ranks import WorldError
from megatron_2bw.base.processes import exit_on_signals, free_port, stop_tree
from megatron_2bw.mcore.checkpoints.folder import (
    TRACKER,
    checkpoint_name,
    latest_iteration,
    problem,
)
from megatron_2bw.run.start.torchrun import OWN_STORES, ROOT, start, torchrun
from megatron_2bw.tools.gpu_check.entry import gpt_flags

RANKS = 2  # stages of the pipeline
PATIENCE = 120.0  # seconds without any progress, after which the run counts as hung
# The lines by which a moment is recognised. An evaluation begins after every fifth
# iteration's line, a save after every fourth's.
STARTED = r"\[before the start of training step\]"
ITERATION = r"iteration +\d+/"
FIFTH = r"iteration +\d*[05]/"
SAVES = "saving checkpoint at iteration"
FORMATS = {
    "torch_dist": "",
    "async": "--async-save --use-persistent-ckpt-worker --async-strategy mcore",
    "reshardable": "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable",
    "torch": "--ckpt-format torch",
}


@dataclass
class Moment:
    frequency: int  # relative to the others
    sign: str  # what the run prints then
    span: float  # seconds after that within which the kill comes


MOMENTS = {
    "start": Moment(1, "", 8.0),
    "iteration": Moment(3, ITERATION, 0.15),
    "save": Moment(3, SAVES, 0.25),
    "evaluation": Moment(3, FIFTH, 0.25),
}


@dataclass
class Kill:
    drawn: str  # the intended moment
    moment: str  # the moment that was hit, from the output
    rank: int
    iteration: int  # the last one printed
    latest: int | None  # the checkpoint to continue from
    others_ended_s: float  # until all ranks had ended
    fault: str | None  # of that checkpoint


class Job:
    """The job, and its output lines."""

    def __init__(self, argv: list[str], restarts: int):
        self.lines = []
        self._log = tempfile.NamedTemporaryFile("r", errors="replace")
        self._line = ""
        words = f"""--rdzv-backend c10d --rdzv-id faults --rdzv-endpoint 127.0.0.1:{free_port()}
            --local-addr 127.0.0.1 --max-restarts {restarts} --monitor-interval 0.1"""
        command = torchrun(RANKS, "gpt", *words.split())
        stores = OWN_STORES + "=1"
        with open(self._log.name, "a") as log:
            self.server = start(["env", stores, *command, *argv], log, cwd=ROOT)

    def close(self) -> None:
        stop_tree(self.server)
        self._log.close()

    def next(self, timeout: float = PATIENCE) -> str | None:
        """The next line, None at the end; TimeoutError if none comes."""
        deadline = time.monotonic() + timeout
        while not self._line.endswith("\n"):
            ended = self.server.poll() is not None
            part = self._log.readline()
            self._line += part
            if part:
                continue
            if ended:
                return None
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing printed for {timeout:.0f} s")
            time.sleep(0.005)
        self.lines.append(self._line.rstrip("\n"))
        self._line = ""
        return self.lines[-1]

    def finish(self) -> int:
        """Wait for the end; the status."""
        while self.next() is not None:
            pass
        return self.server.wait(PATIENCE)

    def wait_for(self, sign: str, count: int = 1) -> None:
        """Wait for `count` lines with `sign`. EOFError if the job ends first."""
        while count:
            line = self.next()
            if line is None:
                raise EOFError("the job ended before all kills were made")
            if re.search(sign, line):
                count -= 1

    def living(self) -> dict[int, psutil.Process]:
        """The living ranks, by number."""
        ranks = {}
        if self.server.poll() is None:
            script = torchrun(1)[-1]
            for child in psutil.Process(self.server.pid).children():
                with contextlib.suppress(psutil.Error, KeyError):
                    alive = child.status() != psutil.STATUS_ZOMBIE
                    if alive and script in child.cmdline():
                        ranks[int(child.environ()["RANK"])] = child
        return ranks

    def all_ranks(self) -> dict[int, psutil.Process]:
        """The ranks by number, as soon as all of them live."""
        deadline = time.monotonic() + PATIENCE
        while len(ranks := self.living()) < RANKS:
            if time.monotonic() > deadline:
                raise TimeoutError("the ranks were not started again")
            time.sleep(0.05)
        return ranks


def hit(lines: list[str]) -> str:
    """The moment of the kill, for a start of the job that has printed `lines`."""

    def last(sign: str) -> int:
        found = -1
        for place, line in enumerate(lines):
            if re.search(sign, line):
                found = place
        return found

    if last(STARTED) < 0:
        return "start"
    if last(SAVES) > last("successfully saved checkpoint"):
        return "save"
    if last(FIFTH) > last("validation loss at iteration"):
        return "evaluation"
    return "iteration"


def kill(job: Job, drawn: str, folder: Path, draw: random.Random) -> Kill:
    """Wait for the moment, kill a rank, and inspect the result."""
    first = len(job.lines)
    alive = job.all_ranks()
    rank = draw.randrange(RANKS)
    moment = MOMENTS[drawn]
    if moment.sign:
        job.wait_for(STARTED)
        job.wait_for(moment.sign, draw.randint(1, 5) if drawn == "iteration" else 1)
    time.sleep(draw.uniform(0, moment.span))
    families = list(alive.values())
    for process in alive.values():
        families += process.children(recursive=True)
    begin = time.monotonic()
    alive[rank].send_signal(signal.SIGKILL)
    _, left = psutil.wait_procs(families, timeout=PATIENCE)
    ended = time.monotonic() - begin
    if left:
        raise TimeoutError(f"{len(left)} processes of the killed run still run")
    latest = latest_iteration(folder)
    fault = problem(folder) if (folder / TRACKER).exists() else None
    with contextlib.suppress(TimeoutError):  # the last lines of the ended ranks
        while job.next(0.3) is not None:
            pass
    iteration = 0
    for line in run_log.training(job.lines):
        iteration = line.iteration
    seen = hit(job.lines[first:])
    return Kill(drawn, seen, rank, iteration, latest, round(ended, 2), fault)


def disturb(
    job: Job, folder: Path, kills: int, draw: random.Random
) -> tuple[list[Kill], str]:
    """Kill ranks until the job ends; (the kills, why it did not finish, if so)."""
    done = []
    weights = [moment.frequency for moment in MOMENTS.values()]
    try:
        for drawn in draw.choices(list(MOMENTS), weights, k=kills):
            done.append(kill(job, drawn, folder, draw))
            print(f"kill {len(done):3} of {kills}: {done[-1]}", flush=True)
        job.finish()
    except (TimeoutError, EOFError, psutil.Error, subprocess.TimeoutExpired) as error:
        print(f"stopped: {error}", *job.lines[-40:], sep="\n", flush=True)
        return done, str(error)
    return done, ""


# --- what is compared
# --------------------------------------------------------------------------------------


def losses_of(lines: list[str]) -> list[tuple[str, str]]:
    """(iteration, loss as printed) of all lines, and of validations; no loss for each
    start's second, which is a mean of two (run_log), and 0 for a skipped iteration."""
    losses = []
    place = 0
    for line in lines:
        if re.search(STARTED, line):
            place = 0
        for record in run_log.training([line]):
            place += 1
            text = record.fields.get("lm loss", "0.000000E+00")
            losses.append((f"iteration {record.iteration}", "" if place == 2 else text))
        for record in run_log.validations([line]):
            name = f"validation {record.iteration} {record.dataset}"
            losses.append((name, record.fields["lm loss value"]))
    return losses


def different_losses(disturbed: list[str], undisturbed: list[str]) -> list[str]:
    """The printed losses that differ from those of the undisturbed run, or that nobody
    has printed."""
    losses = losses_of(disturbed)
    expected = dict(losses_of(undisturbed))
    wrong = []
    for name, text in losses:
        if text and (expected.get(name) or text) != text:
            wrong.append(f"{name}: {text}")
    missing = expected.keys() - dict(losses)
    return wrong + [f"{name}: no loss" for name in sorted(missing)]


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, whole; in the torch format those of each rank's
    file."""
    loaded = {}
    for file in checkpoint.glob("mp_rank_*/*.pt"):
        leaves, _ = tree_flatten_with_path(torch.load(file, weights_only=False))
        for path, leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                loaded[f"{file.parent.name}{keystr(path)}"] = leaf
    if loaded:
        return loaded
    reader = dcp.FileSystemReader(checkpoint)
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        if hasattr(entry, "properties"):
            loaded[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    dcp.load(loaded, storage_reader=reader, no_dist=True)
    return loaded


def different_tensors(one: Path, other: Path) -> list[str]:
    found = tensors(one)
    expected = tensors(other)
    wrong = sorted(found.keys() ^ expected.keys())
    for name in found.keys() & expected.keys():
        if not torch.equal(found[name], expected[name]):
            wrong.append(name)
    return wrong


def command(options: argparse.Namespace, iterations: int, folder: Path) -> list[str]:
    text = f"""--fp16 --pipeline-schedule 2bw --two-bw-late all --two-bw-correction none
        --pipeline-model-parallel-size {RANKS} --micro-batch-size 2
        --global-batch-size 6 --train-iters {iterations} --save-interval 4 --eval-iters 8
        --eval-interval 5 --log-interval 1 --lr 1e-2 --lr-warmup-iters 2 --weight-decay 0.1
        --hidden-dropout 0.1 --attention-dropout 0.1 --initial-loss-scale 65536 --loss-scale-window 5
        --vocab-size 127 --seed 7 {FORMATS[options.format]}"""
    return gpt_flags(4, 32, 4, 16, text, "--save", folder, "--load", folder)


def soak(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the job undisturbed and with kills, and compare: what the JSON holds."""
    begin = time.monotonic()
    kills = options.kills
    iterations = options.iterations or 5 * kills
    peace = folder / "peace"
    disturbed = folder / "disturbed"
    argv = command(options, iterations, peace)
    with contextlib.closing(Job(argv, restarts=0)) as undisturbed:
        status = undisturbed.finish()
    calm = undisturbed.lines
    if status:
        raise WorldError("the undisturbed run failed:\n" + "\n".join(calm[-40:]))
    seconds = time.monotonic() - begin
    print(f"undisturbed: {iterations} iterations in {seconds:.0f} s", flush=True)
    argv = command(options, iterations, disturbed)
    draw = random.Random(options.seed)
    with contextlib.closing(Job(argv, restarts=kills + 5)) as job:
        done, stopped = disturb(job, disturbed, kills, draw)
    wrong = []
    if not stopped:
        last = checkpoint_name(iterations)
        wrong += different_losses(job.lines, calm)
        wrong += different_tensors(disturbed / last, peace / last)
        if job.server.returncode:
            wrong.append(f"status {job.server.returncode}")
    for text in wrong:
        print(f"differs: {text}", flush=True)
    lost = 0
    before = 0
    for each in done:
        latest = each.latest or 0
        lost += (each.fault is not None) + (latest < before)
        before = latest
    return {
        # kills after which the run continued
        "survived": len(done) - bool(stopped and done),
        "kills": len(done),
        "seed": options.seed,
        "hit": dict(Counter(each.moment for each in done)),
        "checkpoints_lost": lost,
        "differences": len(wrong),
        "stopped": stopped,  # why the run did not finish, if so
        "iterations": iterations,
        "seconds": round(time.monotonic() - begin, 1),
        "each": [asdict(each) for each in done],
        "format": options.format,
    }


def main() -> int:
    exit_on_signals()  # the job is in a session of its own
    parser = new_parser(__doc__, "faults")
    option = parser.add_argument
    option("--kills", type=int, default=30)
    option("--seed", type=int, default=1)
    option("--iterations", type=int, help="of the whole run (default: 5 per kill)")
    option("--format", choices=FORMATS, default="torch_dist", help="of the checkpoints")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="faults_") as folder:
        report = soak(options, Path(folder))
    write_result(options.json, report)
    line = (
        "kills survived {survived} {hit}, checkpoints lost {checkpoints_lost}, "
        "differences {differences}, {seconds:.0f} s {stopped}"
    )
    print(line.format(**report))
    faults = report["checkpoints_lost"] + report["differences"]
    survived = report["survived"] == options.kills and not report["stopped"]
    return 0 if survived and not faults else 1


if __name__ == "__main__":
    sys.exit(main())
