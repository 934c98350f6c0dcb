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

from __future__ import annotations

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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

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
from megatron_2bw.run.start.torchrun import ROOT, start, torchrun
from megatron_2bw.tools.gpu_check.entry import gpt_flags

PATIENCE = 120.0  # seconds without any progress, after which the run counts as hung
# relative frequencies
MOMENTS = {"start": 1, "iteration": 3, "save": 3, "evaluation": 3}
EVALUATED, SAVED = 5, 4  # iterations
# What the run prints at such a moment, and the seconds after that within which the kill
# comes.
SIGNS = {
    "start": (None, 8.0),
    "iteration": (re.compile(r"iteration +\d+/"), 0.15),
    "save": (re.compile(r"saving checkpoint at iteration"), 0.25),
    # it begins after every fifth iteration's line
    "evaluation": (re.compile(r"iteration +\d*[05]/"), 0.25),
}
FORMATS = {
    "torch_dist": "",
    "async": "--async-save --use-persistent-ckpt-worker --async-strategy mcore",
    "reshardable": "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable",
    "torch": "--ckpt-format torch",
}
NO_STEP = "0.000000E+00"  # the loss of a skipped iteration, or none
STARTED = "[before the start of training step]"


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

    def __init__(self, argv: list[str], ranks: int, restarts: int):
        self.lines: list[str] = []
        self._log, self._line = tempfile.NamedTemporaryFile("r", errors="replace"), ""
        words = f"--rdzv-backend c10d --rdzv-id faults --rdzv-endpoint 127.0.0.1:{free_port()}"
        words += (
            f" --local-addr 127.0.0.1 --max-restarts {restarts} --monitor-interval 0.1"
        )
        with open(self._log.name, "a") as log:
            self.server = start(
                [*torchrun(ranks, "gpt", *words.split()), *argv], log, cwd=ROOT
            )

    def close(self) -> None:
        stop_tree(self.server)
        self._log.close()

    def next(self, timeout: float = PATIENCE) -> str | None:
        """The next line, None at the end; TimeoutError if none comes."""
        deadline = time.monotonic() + timeout
        while not self._line.endswith("\n"):
            ended = self.server.poll() is not None
            if new := self._log.readline():
                self._line += new
            elif ended:
                return None
            elif time.monotonic() > deadline:
                raise TimeoutError(f"nothing printed for {timeout:.0f} s")
            else:
                time.sleep(0.005)
        line, self._line = self._line.rstrip("\n"), ""
        self.lines.append(line)
        return line

    def finish(self) -> int:
        """Wait for the end; the status."""
        while self.next() is not None:
            pass
        return self.server.wait(PATIENCE)

    def wait_for(self, sign: re.Pattern, count: int = 1) -> None:
        """Wait for `count` lines with `sign`. EOFError if the job ends first."""
        while count:
            line = self.next()
            if line is None:
                raise EOFError("the job ended before all kills were made")
            count -= bool(sign.search(line))

    def ranks(self) -> dict[int, psutil.Process]:
        """The living ranks, by number."""
        found = {}
        for child in (
            psutil.Process(self.server.pid).children()
            if self.server.poll() is None
            else ()
        ):
            try:
                if (
                    child.status() != psutil.STATUS_ZOMBIE
                    and torchrun(1)[-1] in child.cmdline()
                ):
                    found[int(child.environ()["RANK"])] = child
            except (psutil.Error, KeyError):
                continue
        return found


def hit(lines: list[str]) -> str:
    """The moment of the kill, for a start of the job that has printed `lines`."""

    def last(sign: str) -> int:
        return max(
            (number for number, line in enumerate(lines) if re.search(sign, line)),
            default=-1,
        )

    if last(re.escape(STARTED)) < 0:
        return "start"
    if last("saving checkpoint at iteration") > last("successfully saved checkpoint"):
        return "save"
    return (
        "evaluation"
        if last(r"iteration +\d*[05]/") > last("validation loss at iteration")
        else "iteration"
    )


def kill(job: Job, drawn: str, folder: Path, ranks: int, draw: random.Random) -> Kill:
    """Wait for the moment, kill a rank, and inspect the result."""
    first = len(job.lines)
    deadline = time.monotonic() + PATIENCE
    while len(alive := job.ranks()) < ranks:
        if time.monotonic() > deadline:
            raise TimeoutError("the ranks were not started again")
        time.sleep(0.05)
    rank = draw.randrange(ranks)
    sign, span = SIGNS[drawn]
    if sign is not None:
        job.wait_for(re.compile(re.escape(STARTED)))
        job.wait_for(sign, draw.randint(1, 5) if drawn == "iteration" else 1)
    time.sleep(draw.uniform(0, span))
    families = [
        process
        for each in alive.values()
        for process in (each, *each.children(recursive=True))
    ]
    now = time.monotonic()
    alive[rank].send_signal(signal.SIGKILL)
    _, left = psutil.wait_procs(families, timeout=PATIENCE)
    ended = time.monotonic() - now
    if left:
        raise TimeoutError(f"{len(left)} processes of the killed run still run")
    latest = latest_iteration(folder)
    fault = problem(folder) if (folder / TRACKER).exists() else None
    with contextlib.suppress(TimeoutError):  # the last lines of the ended ranks
        while job.next(0.3) is not None:
            pass
    moment, printed = (
        hit(job.lines[first:]),
        [line.iteration for line in run_log.training(job.lines)],
    )
    iteration = printed[-1] if printed else 0
    return Kill(drawn, moment, rank, iteration, latest, round(ended, 2), fault)


def disturb(
    job: Job, folder: Path, ranks: int, kills: int, draw: random.Random
) -> tuple[list[Kill], str]:
    """Kill ranks until the job ends; (the kills, why it did not finish, if so)."""
    done = []
    try:
        for drawn in draw.choices(
            list(MOMENTS), weights=list(MOMENTS.values()), k=kills
        ):
            done.append(last := kill(job, drawn, folder, ranks, draw))
            what = (
                f"rank {last.rank} ({last.moment}) after iteration {last.iteration}; "
                f"continues from {last.latest}"
            )
            print(
                (
                    f"kill {len(done):3} of {kills}: {what}; the others ended in "
                    f"{last.others_ended_s} s"
                ),
                flush=True,
            )
        job.finish()
    except (TimeoutError, EOFError, psutil.Error, subprocess.TimeoutExpired) as error:
        print(f"stopped: {error}\n" + "\n".join(job.lines[-40:]), flush=True)
        return done, str(error)
    return done, ""


# --- what is compared
# --------------------------------------------------------------------------------------


def losses_of(lines: list[str]) -> list[tuple[str, str]]:
    """(iteration, loss as printed) of all lines; no loss for each start's second, which
    is a mean of two (run_log)."""
    found, place = [], 0
    for line in lines:
        place *= STARTED not in line
        for record in run_log.training([line]):
            place += 1
            found.append(
                (
                    f"iteration {record.iteration}",
                    "" if place == 2 else record.fields.get("lm loss", NO_STEP),
                )
            )
    return found


def different_losses(found: list[str], undisturbed: list[str]) -> list[str]:
    """The printed losses that differ from those of the undisturbed run, or that nobody
    has printed."""
    wrong = []
    for kind, of in (("lm loss", losses_of), ("validation loss", validations_of)):
        expected, seen = dict(of(undisturbed)), of(found)
        wrong += [
            f"{name}: {kind} {text}"
            for name, text in seen
            if text and (expected.get(name) or text) != text
        ]
        wrong += [f"{name}: no {kind}" for name in expected if name not in dict(seen)]
    return wrong


def validations_of(lines: list[str]) -> list[tuple[str, str]]:
    return [
        (
            f"iteration {record.iteration}"
            + (record.dataset and f" on {record.dataset}"),
            record.fields["lm loss value"],
        )
        for record in run_log.validations(lines)
    ]


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, whole; in the torch format those of each rank's
    file."""
    whole: dict[str, torch.Tensor] = {}
    for file in checkpoint.glob("mp_rank_*/*.pt"):
        for path, leaf in tree_flatten_with_path(torch.load(file, weights_only=False))[
            0
        ]:
            whole |= (
                {f"{file.parent.name}{keystr(path)}": leaf}
                if isinstance(leaf, torch.Tensor)
                else {}
            )
    if whole:
        return whole
    entries = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    for name, entry in entries.items():
        if hasattr(entry, "properties"):
            whole[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    dcp.load(whole, storage_reader=dcp.FileSystemReader(checkpoint), no_dist=True)
    return whole


def soak(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the job undisturbed and with kills, and compare: what the JSON holds."""
    begin, ranks, kills = time.monotonic(), options.ranks, options.kills
    iterations = options.iterations or 5 * kills

    def argv(name: str) -> list[str]:
        text = f"""--fp16 --pipeline-schedule 2bw --pipeline-model-parallel-size {ranks} --micro-batch-size 2
            --global-batch-size {2 * (ranks + 1)} --train-iters {iterations} --save-interval {SAVED} --eval-iters 8
            --eval-interval {EVALUATED} --log-interval 1 --lr 1e-2 --lr-warmup-iters 2 --weight-decay 0.1
            --hidden-dropout 0.1 --attention-dropout 0.1 --initial-loss-scale 65536 --loss-scale-window 5
            --vocab-size 127 --seed 7 {FORMATS[options.format]}"""
        return gpt_flags(
            4, 32, 4, 16, text, "--save", folder / name, "--load", folder / name
        )

    with contextlib.closing(Job(argv("peace"), ranks, restarts=0)) as undisturbed:
        status = undisturbed.finish()
    calm = undisturbed.lines
    if status:
        raise WorldError("the undisturbed run failed:\n" + "\n".join(calm[-40:]))
    print(
        f"undisturbed: {iterations} iterations in {time.monotonic() - begin:.0f} s",
        flush=True,
    )
    with contextlib.closing(Job(argv("disturbed"), ranks, restarts=kills + 5)) as job:
        done, stopped = disturb(
            job, folder / "disturbed", ranks, kills, random.Random(options.seed)
        )
    wrong = []
    if not stopped:
        last = checkpoint_name(iterations)
        wrong = different_losses(job.lines, calm)
        found, expected = (
            tensors(folder / name / last) for name in ("disturbed", "peace")
        )
        wrong += sorted(found.keys() ^ expected.keys())
        wrong += [
            name
            for name in found.keys() & expected.keys()
            if not torch.equal(found[name], expected[name])
        ]
        wrong += [f"status {job.server.returncode}"] * bool(job.server.returncode)
    for text in wrong:
        print(f"differs: {text}", flush=True)
    latest = [each.latest or 0 for each in done]
    lost = sum(each.fault is not None for each in done) + sum(
        b < a for a, b in zip(latest, latest[1:])
    )
    ended = sorted(each.others_ended_s for each in done) or [0.0]
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
        # undisturbed, by the loss scale
        "iterations_skipped": sum(line.skipped for line in run_log.training(calm)),
        # with those that ran again
        "iterations_run": len(list(run_log.training(job.lines))),
        "seconds": round(time.monotonic() - begin, 1),
        "others_ended_s": [ended[len(ended) // 2], ended[-1]],  # median and largest
        "each": [asdict(each) for each in done],
    }


def main() -> int:
    exit_on_signals()  # the job is in a session of its own
    parser = new_parser(__doc__, "faults")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--iterations", type=int, help="of the whole run (default: 5 per kill)"
    )
    parser.add_argument("--ranks", type=int, default=2, help="stages of the pipeline")
    parser.add_argument(
        "--format", choices=FORMATS, default="torch_dist", help="of the checkpoints"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="faults_") as folder:
        report = soak(options, Path(folder))
    write_result(options.json, report | {"format": options.format})
    line = (
        "kills survived {survived} {hit}, checkpoints lost {checkpoints_lost}, "
        "differences {differences}"
    )
    stopped = (
        f"; the run did not finish: {report['stopped']}" if report["stopped"] else ""
    )
    print(f"{line.format(**report)}, {report['seconds']:.0f} s{stopped}")
    faults = [
        report[name]
        for name in ("checkpoints_lost", "differences", "stopped")
        if report[name]
    ]
    return 0 if report["survived"] == options.kills and not faults else 1


if __name__ == "__main__":
    sys.exit(main())
