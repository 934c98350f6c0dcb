"""A training run whose ranks are killed at random moments, against the same run left in peace.

    python bench/faults.py --kills 30 --seed 1 --json out/bench/faults.json

The job is the real one: pretrain_gpt_2bw.py under `torchrun --max-restarts`, two stages, fp16 with dynamic loss
scaling, dropout, evaluation and a checkpoint every few iterations. A kill is a SIGKILL to one rank, drawn at random,
while the run starts, iterates, writes a checkpoint or evaluates. After each kill all other ranks must end, the
checkpoint that the run would go on from must be whole, and torchrun starts the ranks again. At the end every loss and
every validation loss that was ever printed, and all tensors of the last checkpoint, are compared with those of the run
left in peace.
Beside the JSON a picture of the same name shows the run's course. Status 1 if anything was lost or differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
import torch
import torch.distributed.checkpoint as dcp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_2bw.checkpoints import folder as saved
from megatron_2bw.processes import free_port, stop_tree
from tests.distributed.training import command
from tests.e2e.launcher import ROOT

PATIENCE = 120.0  # seconds without any progress, after which the run counts as hung
MOMENTS = {"start": 1, "iteration": 3, "save": 3, "evaluation": 3}  # how often each is drawn
EVALUATED, SAVED = 5, 4  # iterations
# What the run prints when such a moment comes, and the seconds within which the kill falls after that.
SIGNS = {
    "start": (None, 8.0),
    "iteration": (re.compile(r"iteration +\d+/"), 0.15),
    "save": (re.compile(r"saving checkpoint at iteration"), 0.25),
    "evaluation": (re.compile(r"iteration +\d*[05]/"), 0.25),  # it begins after the line of every fifth iteration
}
STARTED = "[before the start of training step]"
LOSS = re.compile(r"iteration +(\d+)/ +\d+ \|(?:.*? lm loss: (\S+))?")  # a skipped iteration shows 0 or nothing
VALIDATION = re.compile(r"validation loss at (iteration \d+[\w ]*?) \| lm loss value: (\S+)")


@dataclass
class Kill:
    drawn: str  # the moment that was aimed at
    moment: str  # the one that was hit, by what had been printed
    rank: int
    at_s: float  # since the job's start
    iteration: int  # the last that had been printed
    latest: int | None  # the checkpoint that the run goes on from
    others_ended_s: float  # until no rank of before was left
    fault: str | None  # what is wrong with that checkpoint


@dataclass
class Report:
    survived: int  # kills after which the run went on
    kills: int  # that were made
    seed: int
    hit: dict[str, int]  # kills by moment
    checkpoints_lost: int
    differences: int
    stopped: str  # why the run did not come to its end, if so
    iterations: int
    iterations_skipped: int  # by the loss scale, in the run in peace
    iterations_run: int  # with those that were run again
    seconds: float
    others_ended_s: list[float]  # median and largest
    course: list[tuple[float, int]] = field(repr=False)
    each: list[Kill] = field(repr=False)


class Job:
    """The job under torchrun, one a server, and what it has printed by lines, with the seconds since its start."""

    def __init__(self, argv: list[str], ranks: int, servers: int, restarts: int):
        self.begin = time.monotonic()
        self.lines: list[tuple[float, str]] = []
        self._new: queue.SimpleQueue = queue.SimpleQueue()
        self._open = servers
        port = str(free_port())
        self.servers = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--nnodes",
                    str(servers),
                    "--node-rank",
                    str(number),
                    "--nproc-per-node",
                    str(ranks // servers),
                    "--master-addr",
                    "127.0.0.1",
                    "--master-port",
                    port,
                    "--max-restarts",
                    str(restarts),
                    "--monitor-interval",
                    "0.1",
                    "pretrain_gpt_2bw.py",
                    *argv,
                ],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
            )
            for number in range(servers)
        ]
        for server in self.servers:
            threading.Thread(target=self._read, args=(server,), daemon=True).start()

    def _read(self, server: subprocess.Popen) -> None:
        for line in server.stdout:
            self._new.put((time.monotonic() - self.begin, line.rstrip("\n")))
        self._new.put(None)

    def status(self) -> int:
        """Wait for the end; 0 if all servers ended well."""
        return max(abs(server.wait(PATIENCE)) for server in self.servers)

    def end(self) -> None:
        for server in self.servers:
            stop_tree(server)

    def next(self, timeout: float = PATIENCE) -> str | None:
        """The next line, None at the end; TimeoutError if none comes."""
        while self._open:
            try:
                entry = self._new.get(timeout=timeout)
            except queue.Empty:
                raise TimeoutError(f"nothing printed for {timeout:.0f} s") from None
            if entry is not None:
                self.lines.append(entry)
                return entry[1]
            self._open -= 1
        return None

    def wait_for(self, sign: re.Pattern, count: int = 1) -> None:
        """Until a line with `sign` has come `count` times. EOFError if the job ends before."""
        while count:
            line = self.next()
            if line is None:
                raise EOFError("the job ended before all kills were made")
            count -= bool(sign.search(line))

    def drain(self, silence: float = 0.3) -> None:
        """Take what ranks that have ended had still printed."""
        with contextlib.suppress(TimeoutError):
            while self.next(silence) is not None:
                pass

    def ranks(self) -> dict[int, psutil.Process]:
        """The ranks that are alive, by number."""
        found = {}
        servers = [psutil.Process(server.pid) for server in self.servers if server.poll() is None]
        for child in [child for server in servers for child in server.children()]:
            try:
                if child.status() != psutil.STATUS_ZOMBIE and "pretrain_gpt_2bw.py" in child.cmdline():
                    found[int(child.environ()["RANK"])] = child
            except (psutil.Error, KeyError):
                continue
        return found

    def iteration(self) -> int:
        seen = [match for _, line in self.lines if (match := LOSS.search(line))]
        return int(seen[-1][1]) if seen else 0


def hit(lines: list[str]) -> str:
    """The moment in which a start of the job was killed that had printed `lines`."""
    signs = {
        "started": re.escape(STARTED),
        "saving": "saving checkpoint at iteration",
        "saved": "successfully saved checkpoint",
        "fifth": r"iteration +\d*[05]/",
        "evaluated": "validation loss at iteration",
    }
    place = {
        name: max((number for number, line in enumerate(lines) if re.search(sign, line)), default=-1)
        for name, sign in signs.items()
    }
    if place["started"] < 0:
        return "start"
    if place["saving"] > place["saved"]:
        return "save"
    return "evaluation" if place["fifth"] > place["evaluated"] else "iteration"


def kill(job: Job, drawn: str, folder: Path, ranks: int, draw: random.Random) -> Kill:
    """Wait for the moment, kill a rank, and see what is left."""
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
    families = [process for each in alive.values() for process in (each, *each.children(recursive=True))]
    now = time.monotonic()
    alive[rank].send_signal(signal.SIGKILL)
    _, left = psutil.wait_procs(families, timeout=PATIENCE)
    ended = time.monotonic() - now
    if left:
        raise TimeoutError(f"{len(left)} processes of the killed run stay behind")
    latest = saved.latest(folder)
    fault = saved.fault(folder) if (folder / saved.TRACKER).exists() else None
    job.drain()
    moment = hit([line for _, line in job.lines[first:]])
    return Kill(drawn, moment, rank, round(now - job.begin, 2), job.iteration(), latest, round(ended, 2), fault)


def disturbed(
    argv: list[str], folder: Path, ranks: int, servers: int, kills: int, draw: random.Random
) -> tuple[Job, list[Kill], str]:
    """Run the job with that many kills; it, they, and why it did not come to its end, if so."""
    job, done = Job(argv, ranks, servers, restarts=kills + 5), []
    try:
        for drawn in draw.choices(list(MOMENTS), weights=list(MOMENTS.values()), k=kills):
            done.append(kill(job, drawn, folder, ranks, draw))
            print(
                f"kill {len(done):3} of {kills}: rank {done[-1].rank} ({done[-1].moment}) after iteration "
                f"{done[-1].iteration}; goes on from {done[-1].latest}; the others ended in "
                f"{done[-1].others_ended_s} s",
                flush=True,
            )
        while job.next() is not None:
            pass
        job.status()
    except (TimeoutError, EOFError, psutil.Error, subprocess.TimeoutExpired) as error:
        print(f"stopped: {error}\n" + "\n".join(line for _, line in job.lines[-40:]), flush=True)
        return job, done, str(error)
    finally:
        job.end()
    return job, done, ""


# --- what is compared ---------------------------------------------------------------------------------------------


def runs_of(lines: list[str]) -> list[list[tuple[int, str]]]:
    """Iterations and losses as they were printed, by start of the job."""
    starts: list[list[tuple[int, str]]] = []
    for line in lines:
        if STARTED in line:
            starts.append([])
        for match in LOSS.finditer(line):
            starts[-1].append((int(match[1]), match[2] or "0.000000E+00"))
    return starts


def different_losses(found: list[str], peace: list[str]) -> list[str]:
    """Losses that were printed and are not those of the run in peace, as they are printed.

    Megatron's second line after a start shows the mean of two iterations, without skipped ones: it must be that mean,
    to its last digit.
    """
    (expected,) = runs_of(peace)
    texts = dict(expected)
    losses = {iteration: float(text) for iteration, text in expected}
    losses[2] = 2 * losses[2] - losses[1]  # neither is skipped
    wrong = []
    for start in runs_of(found):
        for place, (iteration, text) in enumerate(start):
            if place == 1 or iteration == 2:
                pair = (losses[iteration - 1], losses[iteration]) if place == 1 else (losses[iteration],)
                counted = [loss for loss in pair if loss]
                same = abs(float(text) - sum(counted) / max(1, len(counted))) <= 4e-6 * abs(float(text))
            else:
                same = text == texts[iteration]
            if not same:
                wrong.append(f"iteration {iteration}: lm loss {text}")
    validation = dict(match.groups() for match in map(VALIDATION.search, peace) if match)
    seen = [match.groups() for match in map(VALIDATION.search, found) if match]
    wrong += [f"{name}: validation loss {text}" for name, text in seen if validation.get(name) != text]
    unseen = texts.keys() - {iteration for start in runs_of(found) for iteration, _ in start}
    wrong += [f"iteration {iteration} was never printed" for iteration in sorted(unseen)]
    return wrong + [f"{name}: no validation loss" for name in sorted(validation.keys() - {name for name, _ in seen})]


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint in torch's distributed format, whole."""
    entries = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    whole = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if hasattr(entry, "properties")
    }
    dcp.load(whole, storage_reader=dcp.FileSystemReader(checkpoint), no_dist=True)
    return whole


def different_tensors(one: Path, other: Path) -> list[str]:
    found, expected = tensors(one), tensors(other)
    wrong = sorted(found.keys() ^ expected.keys())
    return wrong + [name for name in found.keys() & expected.keys() if not torch.equal(found[name], expected[name])]


# --- the benchmark ------------------------------------------------------------------------------------------------


def soak(
    kills: int, seed: int, iterations: int, folder: Path, ranks: int, servers: int, flags: tuple[str, ...]
) -> Report:
    """The run in peace, the disturbed one, and how they compare."""
    begin = time.monotonic()

    def argv(where: Path) -> list[str]:
        return command(
            ranks,
            ranks + 1,
            "2bw",
            "--fp16",
            "--save",
            str(where),
            "--load",
            str(where),
            *flags,
            hidden_dropout=0.1,
            attention_dropout=0.1,
            train_iters=iterations,
            save_interval=SAVED,
            eval_interval=EVALUATED,
            eval_iters=8,
            initial_loss_scale=65536,
            loss_scale_window=5,
            lr_decay_style="constant",
            min_lr=None,
            weight_decay=0.1,
        )

    peace = Job(argv(folder / "peace"), ranks, servers, restarts=0)
    try:
        while peace.next() is not None:
            pass
        status = peace.status()
    finally:
        peace.end()
    if status:
        raise RuntimeError("the run in peace failed:\n" + "\n".join(line for _, line in peace.lines[-40:]))
    print(f"in peace: {iterations} iterations in {time.monotonic() - begin:.0f} s", flush=True)

    calm = [line for _, line in peace.lines]
    job, done, stopped = disturbed(
        argv(folder / "disturbed"), folder / "disturbed", ranks, servers, kills, random.Random(seed)
    )
    wrong = []
    if not stopped:
        wrong = different_losses([line for _, line in job.lines], calm)
        last = saved.name(iterations)
        wrong += different_tensors(folder / "disturbed" / last, folder / "peace" / last)
        wrong += [f"status {job.status()}"] * bool(job.status())
    for text in wrong:
        print(f"differs: {text}", flush=True)
    latest = [each.latest or 0 for each in done]
    lost = sum(each.fault is not None for each in done) + sum(b < a for a, b in zip(latest, latest[1:]))
    ended = sorted(each.others_ended_s for each in done) or [0.0]
    course = [(round(at, 2), int(match[1])) for at, line in job.lines if (match := LOSS.search(line))]
    return Report(
        survived=len(done) - bool(stopped and done),
        kills=len(done),
        seed=seed,
        hit=dict(Counter(each.moment for each in done)),
        checkpoints_lost=lost,
        differences=len(wrong),
        stopped=stopped,
        iterations=iterations,
        iterations_skipped=sum("skipped iterations:   1" in line for line in calm),
        iterations_run=len(course),
        seconds=round(time.monotonic() - begin, 1),
        others_ended_s=[ended[len(ended) // 2], ended[-1]],
        course=course,
        each=done,
    )


def draw_picture(report: Report, path: Path) -> None:
    """The iterations over time, and the kills."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*report.course), ".", markersize=2, color="tab:blue", label="iterations")
    for moment, color in zip(MOMENTS, ("tab:gray", "tab:red", "tab:orange", "tab:green")):
        points = [(each.at_s, each.iteration) for each in report.each if each.moment == moment]
        if points:
            axes.plot(*zip(*points), "x", color=color, label=f"killed: {moment} ({len(points)})")
    axes.set_xlabel("seconds")
    axes.set_ylabel("iteration")
    axes.set_title(
        f"{report.survived} kills survived, {report.checkpoints_lost} checkpoints lost, "
        f"{report.differences} differences",
        fontsize=10,
    )
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--iterations", type=int, help="of the whole run (default: 5 a kill)")
    parser.add_argument("--ranks", type=int, default=2, help="stages of the pipeline")
    parser.add_argument("--servers", type=int, default=1, help="torchruns that share the ranks, as on several servers")
    parser.add_argument("--async-save", action="store_true", help="with Megatron's asynchronous checkpoints")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    if options.ranks < 2 or options.ranks % options.servers or options.kills < 1:
        parser.error("--ranks must be 2 or more and a multiple of --servers, and --kills 1 or more")
    flags = ("--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore") if options.async_save else ()
    with tempfile.TemporaryDirectory(prefix="faults_") as folder:
        report = soak(
            options.kills,
            options.seed,
            options.iterations or 5 * options.kills,
            Path(folder),
            options.ranks,
            options.servers,
            flags,
        )
    options.json.parent.mkdir(parents=True, exist_ok=True)
    result = asdict(report) | {"servers": options.servers, "async_save": options.async_save}
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    draw_picture(report, options.json.with_suffix(".png"))
    print(
        f"kills survived {report.survived} {report.hit}, checkpoints lost {report.checkpoints_lost}, "
        f"differences {report.differences}, {report.seconds:.0f} s"
        + (f"; the run did not come to its end: {report.stopped}" if report.stopped else "")
    )
    whole = report.survived == options.kills and not (report.checkpoints_lost or report.differences or report.stopped)
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
