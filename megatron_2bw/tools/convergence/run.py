"""Trains one configuration with and without 2BW's late gradients, from the same weights
on the same batches.

    megatron-2bw convergence NAME --lr 3e-4,3e-3 --seeds 1234,1235,1236
    megatron-2bw convergence NAME --variants vanilla,2bw --max-gap 1 --
    --num-layers 8 --train-iters 3000

Every run uses the entry script and has a folder of its own in
out/convergence/NAME/runs, with its log. Words after -- are Megatron's flags for all
runs and override the defaults: a GPT of 5.3 million parameters on the built-in corpus.
runs.json, curves.png and report.md are rewritten after each run. If the script ends
early, the same command runs what is missing; with --save-interval N after -- a run
continues from its checkpoint. A run that fails does not stop the others.

Invariant: result.json in a run's folder is of a run that ended normally, with the last
command in its log; no run is compared with one of another command.
"""

import functools
import itertools
import json
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout

from megatron_2bw.base import run_log
from megatron_2bw.base.errors import UserError, file_errors, run_program
from megatron_2bw.base.files import set_aside, write_json, write_whole
from megatron_2bw.base.processes import stop_tree
from megatron_2bw.run.start.torchrun import ROOT, start
from megatron_2bw.tools.convergence.options import (
    PROG,
    Run,
    built_in,
    grid,
    parse_options,
)
from megatron_2bw.tools.convergence.plot import draw
from megatron_2bw.tools.convergence.report import (
    STARTED,
    Figures,
    Result,
    markdown,
    number,
    outcome,
    summarize,
    too_large,
    validated,
)

EVERY = 5.0  # seconds between two looks at the log of a run
POLL = 0.2  # seconds between two looks at the processes

say = functools.partial(print, flush=True)


# --- results
# --------------------------------------------------------------------------------------


def portable(words: Sequence[str]) -> list[str]:
    """A run's command as one would type it in any clone: without this machine's
    folders."""
    at = list(words).index("--nproc-per-node") + 2  # the entry script
    command = ["python", *words[1:at], Path(words[at]).name]
    for word in words[at + 1 :]:
        word = word.replace(f"{ROOT}/", "")
        command.append(word.replace(str(Path.home()), "~"))
    return command


def last_attempt(run: Run) -> str:
    """The log from the command of its last attempt on."""
    return run.log.read_text(errors="replace").rpartition(STARTED)[2]


def result_of(run: Run) -> Result | None:
    """The stored result. Raises UserError if it, or the checkpoints to continue from,
    are of another command."""
    path = run.folder / "result.json"
    if not path.exists() and not run.checkpoints.exists():
        return None
    started, _, _ = last_attempt(run).partition("\n")
    if portable(shlex.split(started)) != portable(run.command):
        raise UserError(
            f"{run.folder} holds a run of other flags: give another NAME, or remove it"
        )
    return json.loads(path.read_text()) if path.exists() else None


# --- runs
# --------------------------------------------------------------------------------------


class Attempt:
    """A run's process, which writes the log."""

    def __init__(self, run: Run):
        run.folder.mkdir(parents=True, exist_ok=True)
        if not run.checkpoints.exists():  # it starts again, perhaps with other flags
            set_aside(run.log)
        self.run = run
        self.iteration = 0
        self.looked = 0.0
        self._begun = time.monotonic()
        with open(run.log, "a") as log:
            log.write(f"\n{STARTED} {shlex.join(run.command)}\n")
            log.flush()
            self.process = start(run.command, log)

    @property
    def seconds(self) -> int:
        return round(time.monotonic() - self._begun)


@dataclass
class Board:
    """Results and failures of all runs."""

    runs: list[Run]
    iterations: int
    results: dict[Run, Result] = field(default_factory=dict)
    failures: dict[Run, str] = field(default_factory=dict)

    def say(self, run: Run, text: str) -> None:
        number = self.runs.index(run) + 1
        say(f"[{number}/{len(self.runs)}] {run.title}: {text}")

    def progress(self, job: Attempt) -> None:
        """[3/30] 2bw lr 3e-3 seed 1235: iteration 250/1500, loss 4.512, 130 s"""
        now = time.monotonic()
        if now - job.looked < EVERY:
            return
        job.looked = now
        lines = list(run_log.training(last_attempt(job.run)))
        if lines and lines[-1].iteration != job.iteration:
            job.iteration = lines[-1].iteration
            progress = f"iteration {job.iteration}/{self.iterations}"
            loss = number(lines[-1].loss)
            self.say(job.run, f"{progress}, loss {loss:.3f}, {job.seconds} s")

    def finish(self, job: Attempt, code: int) -> None:
        """Store a run's result, or report why there is none."""
        run = job.run
        stop_tree(job.process, 5)
        try:
            result = outcome(run.log.read_text(errors="replace"), code, self.iterations)
        except UserError as error:
            self.failures[run] = str(error)
            self.say(run, f"failed, {error} (log: {run.log})")
            return
        write_json(run.folder / "result.json", {"seconds": job.seconds} | result, None)
        self.results[run] = result
        loss = "diverged"
        if not result["diverged"]:
            loss = f"validation loss {validated(result):.4f}"
        self.say(run, f"ended after {job.seconds} s, {loss}")

    def entry(self, run: Run, out: Path) -> Result:
        """What runs.json holds of a run."""
        entry = {
            "variant": run.variant,
            "lr": run.lr,
            "seed": run.seed,
            "folder": str(run.folder.relative_to(out)),
            "failure": self.failures.get(run),
        }
        result = self.results.get(run, {})
        return entry | result | {"command": portable(run.command)}


def train(board: Board, options: Namespace) -> None:
    """Run what is missing, `options.jobs` at a time, and write the report after each.
    Failures are on the board."""
    waiting = [run for run in board.runs if run not in board.results]
    jobs = []
    try:
        while waiting or jobs:
            # The next starts when the others train: runs with the same seed write the
            # same index of the data.
            trains = all(job.iteration for job in jobs)
            if waiting and trains and len(jobs) < options.jobs:
                run = waiting.pop(0)
                board.say(run, "starts")
                jobs.append(Attempt(run))
            for job in list(jobs):
                code = job.process.poll()
                board.progress(job)
                if code is not None:
                    jobs.remove(job)
                    board.finish(job, code)
                    write_results(board, options)
            time.sleep(POLL)
    finally:
        for job in jobs:
            stop_tree(job.process, 5)


# --- the report
# --------------------------------------------------------------------------------------


def write_results(board: Board, options: Namespace) -> list[Figures]:
    """Write runs.json, curves.png and report.md from the results so far. Returns a row
    for each (lr, variant)."""
    results = {}
    for run, result in board.results.items():
        results[run.lr, run.variant, run.seed] = result
    rows = []
    for lr, variant in itertools.product(options.lr, options.variants):
        row = summarize(results, lr, variant, options.seeds)
        if row["finished"]:
            rows.append(row)
    content = {
        "name": options.name,
        "again": options.again,
        "task": options.task,
        "iterations": options.iterations,
        "ranks": options.ranks,
        "variants": options.variants,
        "learning_rates": options.lr,
        "seeds": options.seeds,
        "flags": options.flags,
        "summary": rows,
        "runs": [board.entry(run, options.out) for run in board.runs],
    }
    write_json(options.out / "runs.json", content, indent=None)
    if results:
        draw(content, options.out / "curves.png")
    write_whole(options.out / "report.md", markdown(facts(board, options), rows))
    return rows


def facts(board: Board, options: Namespace) -> list[str]:
    """What was run, for report.md."""
    seeds = ", ".join(map(str, options.seeds))
    lines = [
        f"# Convergence: {options.name}",
        "",
        f"{options.task.upper()}, {options.iterations} iterations, seeds {seeds}; "
        f"{len(board.results)} of {len(board.runs)} runs have ended. The command "
        "that repeats or continues them:",
        "",
        f"    {options.again}",
        "",
    ]
    for label, words in options.variants.items():
        lines.append(f"- **{label}**: `{shlex.join(words)}`")
    for run, reason in board.failures.items():
        lines.append(f"- {run.title}: failed, {reason}")
    return lines


def work(options: Namespace) -> int:
    with file_errors(f"--out {options.out}"):
        options.out.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(options.out / ".lock", blocking=False).acquire()
    except Timeout:
        raise UserError(f"{options.out} is in use by another call") from None
    with lock:
        board = Board(grid(options, built_in(options)), options.iterations)
        for run in board.runs:
            result = result_of(run)
            if result:
                board.results[run] = result
        runs = f"{len(board.runs)} runs of {options.iterations} iterations"
        say(f"{PROG}: {runs}, {len(board.results)} of them are there; {options.out}")
        train(board, options)
        rows = write_results(board, options)
        curves = "curves.png " if board.results else ""
        say(f"{PROG}: wrote report.md, {curves}and runs.json in {options.out}")
        limit = options.max_gap
        lines = []
        if limit is not None:
            lines = too_large(rows, limit, len(options.seeds))
        for line in lines:
            print(f"{PROG}: {line}", file=sys.stderr)
        if lines or board.failures:
            return 1
        if limit is not None:
            say(f"{PROG}: --max-gap {limit:g} holds")
        return 0


def main(argv: Sequence[str], prog: str = PROG) -> int:
    """The exit code: 0, 1 if a run failed or a gap is too large, 2 for a wrong option,
    130 if interrupted."""
    options = parse_options(argv, prog)
    return run_program(
        PROG, lambda: work(options), "the same command continues from here"
    )
