"""Trains one configuration with and without 2BW's late gradients, from the same weights on the same batches.

    python scripts/convergence.py NAME --lr 3e-4,3e-3 --seeds 1234,1235,1236
    python scripts/convergence.py NAME --variants vanilla,2bw,2bw+sync --max-gap 1 -- --num-layers 8 --train-iters 3000

Every run uses the entry script and has a folder of its own in out/convergence/NAME/runs, with its log. Words after --
are Megatron's flags for all runs and override the defaults: a GPT of 5.3 million parameters on the built-in corpus.
runs.json, curves.png and report.md are rewritten after each run. If the script ends early, the same command runs what
is missing; with --save-interval N after -- a run continues from its checkpoint. A run that fails does not stop the
others; if the very first run does not train, no other is started.

Invariant: result.json in a run's folder holds the run's command and the result of a run that ended normally; no run is
compared with one of another command.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_2bw import run_log
from megatron_2bw.convergence.options import Run, built_in, defaults, given, grid, parse, takes_corpus, value
from megatron_2bw.convergence.plot import draw
from megatron_2bw.convergence.report import STARTED, markdown, number, outcome, summarize, too_large
from megatron_2bw.errors import UserError, file_errors, run_program
from megatron_2bw.files import set_aside, write_json, write_whole
from megatron_2bw.processes import stop_tree
from megatron_2bw.start.torchrun import ROOT, environment, start

EVERY = 5.0  # seconds between two lines of a run
POLL = 0.2  # seconds between two looks at the runs


# --- results --------------------------------------------------------------------------------------------------------


def same(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether two commands train the same; the interpreter and the folder of the clone do not matter."""
    return _trains(one) == _trains(other)


def _trains(words: Sequence[str]) -> list[str]:
    at = list(words).index("--nproc-per-node")
    trains = [words[at + 1], Path(words[at + 2]).name, *words[at + 3 :]]
    # The folder of the checkpoints is in the run's own folder.
    return [word for before, word in zip(["", *trains], trains) if before not in ("--save", "--load")]


def portable(words: Sequence[str]) -> list[str]:
    """A run's command as one would type it in any clone: without this machine's folders."""
    at = list(words).index("--nproc-per-node")
    rest = (word.replace(f"{ROOT}/", "").replace(str(Path.home()), "~") for word in words[at + 3 :])
    return ["python", *words[1 : at + 2], Path(words[at + 2]).name, *rest]


def result_of(run: Run) -> dict[str, Any] | None:
    """The stored result. Raises UserError if it, or the checkpoints to continue from, are of another command."""
    for name in ("result.json", "command.json"):
        try:
            stored = json.loads((run.folder / name).read_text())
            other = not same(stored["command"], run.command)
            if name == "result.json" and not _sound(stored):
                raise ValueError
        except FileNotFoundError:
            continue
        except (ValueError, LookupError, TypeError):
            raise UserError(f"{run.folder / name}: not what a run leaves; --fresh sets all runs aside") from None
        if other and (name == "result.json" or run.checkpoints.exists()):
            remedy = "give another NAME, or --fresh, which sets all runs aside and begins again"
            raise UserError(f"{run.folder} holds a run of other flags; {remedy}")
        if name == "result.json":
            return stored
    return None


def _sound(result: dict[str, Any]) -> bool:
    """Whether result.json has the curves that the report reads."""
    points = [(end, 0 if loss is None else loss) for end, loss in result["training"] + result["validation"]]
    plain = all(type(number) in (int, float) and abs(number) < 1e300 for point in points for number in point)
    types = type(result["seconds_per_iteration"]) in (int, float, type(None)) and type(result["diverged"]) is bool
    return plain and types and bool(result["diverged"] or result["training"] and result["validation"])


# --- runs -----------------------------------------------------------------------------------------------------------


class Job:
    """A run's process, which writes the log; `read` follows the log."""

    def __init__(self, run: Run, lock: int, gpus: str | None):
        run.folder.mkdir(parents=True, exist_ok=True)
        write_json(run.folder / "command.json", {"command": run.command}, indent=None)
        if not run.checkpoints.exists():  # it starts again, perhaps with other flags
            set_aside(run.log)
        self.run, self.iteration, self.loss, self.said, self._rest = run, 0, math.nan, 0.0, ""
        self._begun = time.monotonic()
        with open(run.log, "a") as log:
            log.write(f"\n{STARTED} {shlex.join(run.command)}\n")
            log.flush()
            self._log = open(run.log, errors="replace")
            self._log.seek(0, os.SEEK_END)
            self.first: int | None = None  # iteration that the process began with
            more = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}
            self.process = start(run.command, log, env=environment(**more), pass_fds=(lock,))

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun

    def read(self) -> bool:
        """Read the log's new lines. Returns whether they report a new iteration."""
        lines = (self._rest + self._log.read()).split("\n")
        self._rest = lines.pop()
        before = self.iteration
        for line in run_log.training(lines):
            self.iteration, self.loss = line.iteration, number(line.loss)
            self.first = self.iteration if self.first is None else self.first
        return self.iteration != before

    def end(self) -> None:
        stop_tree(self.process, 5)
        self._log.close()


class Board:
    """Results and progress of all runs, and the lines that report them."""

    def __init__(self, runs: list[Run], iterations: int):
        self.runs, self.iterations = runs, iterations
        self.results: dict[Run, dict[str, Any]] = {}
        self.failures: dict[Run, str] = {}
        self.losses: dict[tuple[Run, int], float] = {}  # at an iteration
        self._begun, self._done = time.monotonic(), 0.0

    def take(self, run: Run, result: dict[str, Any]) -> None:
        self.results[run] = result
        self.losses |= {(run, int(end)): number(loss) for end, loss in result["training"]}

    def line(self, job: Job, others: Sequence[Job]) -> str:
        """[3/30] 2bw lr 3e-3 seed 1235: iteration 250/1500, loss 4.512 (vanilla 4.498), 2:10 elapsed, about ..."""
        run = job.run
        self.losses[run, job.iteration] = job.loss
        vanilla = {(other.lr, other.seed): other for other in self.runs if other.variant == "vanilla" and other != run}
        loss = self.losses.get((vanilla.get((run.lr, run.seed)), job.iteration))
        losses = f"loss {job.loss:.3f}" + ("" if loss is None else f" (vanilla {loss:.3f})")
        times = f"{duration(time.monotonic() - self._begun)} elapsed{self._left([job, *others])}"
        return f"{self.number(run)} {run.title}: iteration {job.iteration}/{self.iterations}, {losses}, {times}"

    def number(self, run: Run) -> str:
        return f"[{self.runs.index(run) + 1}/{len(self.runs)}]"

    def ended(self, job: Job) -> None:
        self._done += max(0, job.iteration - (job.first or 0))

    def _left(self, jobs: Sequence[Job]) -> str:
        now = sum(job.iteration - (job.first or 0) for job in jobs)
        pending = len(self.runs) - len(self.results) - len(self.failures)
        left = pending * self.iterations - sum(job.iteration for job in jobs)
        done = self._done + now
        return f", about {duration(left * (time.monotonic() - self._begun) / done)} left" if done else ""


def duration(seconds: float) -> str:
    """2:10, 1:02:00"""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def gpus_of(slot: int, ranks: int, most: int, gpus: Sequence[str]) -> str | None:
    """CUDA_VISIBLE_DEVICES of the slot-th of the concurrent runs of at most `most` ranks; None to leave it."""
    if len(gpus) <= ranks:
        return None
    return ",".join(gpus[(slot * most + rank) % len(gpus)] for rank in range(ranks))


def gpus_to_deal(options) -> list[str]:
    """The GPUs of this process (Slurm sets them); none if runs are not concurrent."""
    if options.jobs == 1 or options.device == "cpu":
        return []
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [gpu for gpu in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if gpu]
    import torch

    return [str(gpu) for gpu in range(torch.cuda.device_count())]


def train(board: Board, options, lock: int, after: Callable[[], None]) -> None:
    """Run what is missing, `options.jobs` at a time; call `after` after each. Failures are on the board."""

    def ranks(run: Run) -> int:
        return int(value(run.command, "--nproc-per-node"))

    waiting = [run for run in board.runs if run not in board.results]
    gpus, jobs = gpus_to_deal(options), {}
    most = max(map(ranks, waiting), default=1)
    try:
        while waiting or jobs:
            # The next starts when the others train: runs with the same seed write the same index of the data.
            if waiting and len(jobs) < options.jobs and all(job.iteration for job in jobs.values()):
                slot = next(slot for slot in range(options.jobs) if slot not in jobs)
                run = waiting.pop(0)
                jobs[slot] = Job(run, lock, gpus_of(slot, ranks(run), most, gpus))
                say(f"{board.number(jobs[slot].run)} {jobs[slot].run.title}: starts")
            for slot, job in list(jobs.items()):
                code = job.process.poll()
                others = [other for other in jobs.values() if other is not job]
                if job.read() and (time.monotonic() - job.said >= EVERY or job.iteration == board.iterations):
                    job.said = time.monotonic()
                    say(board.line(job, others))
                if code is not None:
                    del jobs[slot]
                    finish(board, job, code)
                    # No other run trains or has trained: the cause is one that all runs share.
                    if waiting and not jobs and len(board.failures) == 1 and not board.results and not job.iteration:
                        say("convergence.py: no other run is started, for the first has not trained")
                        waiting.clear()
                    try:
                        after()
                    except OSError as error:  # the next report may succeed; the runs continue
                        say(f"convergence.py: the report could not be written: {error}")
            time.sleep(POLL)
    finally:
        for job in jobs.values():
            job.end()


def finish(board: Board, job: Job, code: int) -> None:
    """Store a run's result, or report why there is none."""
    run, begin = job.run, f"{board.number(job.run)} {job.run.title}:"
    job.end()
    board.ended(job)
    try:
        result = outcome(run.log.read_text(errors="replace"), code, board.iterations)
    except UserError as error:
        board.failures[run] = str(error)
        say(f"{begin} failed, {error} (log: {run.log})")
        return
    write_json(run.folder / "result.json", {"command": run.command, "seconds": round(job.seconds, 1)} | result, None)
    board.take(run, result)
    loss = "diverged" if result["diverged"] else f"validation loss {result['validation'][-1][1]:.4f}"
    say(f"{begin} ended after {duration(job.seconds)}, {loss}")


def say(line: str) -> None:
    print(line, flush=True)


# --- the whole ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[int]:
    """A lock on the folder. The runs hold it too: while one outlives this script, no other call enters."""
    with file_errors(f"--out {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield lock
    except BlockingIOError:
        raise UserError(f"{folder} is in use by another convergence.py, or by a run that it left") from None
    finally:
        os.close(lock)


def report(board: Board, options) -> list[dict[str, Any]]:
    """Write runs.json, curves.png and report.md from the results so far. Returns a row for each (lr, variant)."""
    results = {(run.lr, run.variant, run.seed): result for run, result in board.results.items()}
    seeds = [int(seed) for seed in options.seeds]
    pairs = itertools.product(options.lr, options.variants)
    rows = [summarize(results, lr, variant, seeds, options.iterations) for lr, variant in pairs]
    rows = [row for row in rows if row["finished"]]
    runs = [
        {"variant": run.variant, "lr": run.lr, "seed": run.seed, "folder": str(run.folder.relative_to(options.out))}
        | {"failure": board.failures.get(run)}
        | board.results.get(run, {})
        | {"command": portable(run.command)}
        for run in board.runs
    ]
    names = ("name", "again", "task", "vanilla", "iterations", "stages", "width", "variants")
    content = {name: getattr(options, name) for name in names}
    content |= {"learning_rates": options.lr, "seeds": seeds, "flags": options.flags, "summary": rows, "runs": runs}
    write_json(options.out / "runs.json", content, indent=None)
    if results:
        draw(content, options.out / "curves.png")
    else:
        (options.out / "curves.png").unlink(missing_ok=True)  # of runs that were set aside
    text = markdown(f"Convergence: {options.name}", facts(board, options), rows, troubles(board))
    write_whole(options.out / "report.md", text)
    return rows


def facts(board: Board, options) -> list[str]:
    """What was run, for report.md."""
    count = f"{len(options.seeds)} seeds" if len(options.seeds) > 1 else "one seed"
    return [
        f"{options.task.upper()}, {options.iterations} iterations, {options.stages} "
        f"{'stages' if options.stages > 1 else 'stage'} × width {options.width}, {count} ({', '.join(options.seeds)}); "
        f"{len(board.results)} of {len(board.runs)} runs have ended. The command that repeats or continues them:",
        "",
        f"    {options.again}",
        "",
        f"- of this script: `{shlex.join(defaults(options, options.flags)) or 'nothing'}`"
        + ("" if options.no_defaults or given(options.flags, "--min-lr") else ", `--min-lr` a tenth of `--lr`")
        + (", the built-in corpus and its tokenizer" if takes_corpus(options) else ""),
        *(f"- **{label}**: `{shlex.join(flags)}`" for label, flags in options.variants.items()),
    ]


def troubles(board: Board) -> list[str]:
    gone = {run: result.get("iteration", 0) for run, result in board.results.items() if result["diverged"]}
    lines = [f"{run.title}: diverged by iteration {iteration}" for run, iteration in gone.items()]
    return lines + [f"{run.title}: {why}" for run, why in board.failures.items()]


def judge(rows: Sequence[dict[str, Any]], options) -> int:
    """The exit code of --max-gap; prints a line for each variant above it, or one line if there is none."""
    if options.max_gap is None:
        return 0
    of = options.max_gap_of or [label for label in options.variants if label != "vanilla"]
    lines = too_large(rows, options.max_gap, of, len(options.seeds))
    for line in lines:
        print(f"convergence.py: {line}", file=sys.stderr)
    if not lines:
        limits = ",".join(f"{options.max_gap[lr]:g}" for lr in options.lr)
        say(f"convergence.py: --max-gap {limits} holds for {', '.join(of)} at lr {', '.join(options.lr)}")
    return 1 if lines else 0


def work(options) -> int:
    with locked(options.out) as lock:
        if options.fresh:
            set_aside(options.out / "runs")
        board = Board(grid(options, built_in(options)), options.iterations)
        for run in board.runs:
            if result := result_of(run):
                board.take(run, result)
        runs = f"{len(board.runs)} runs of {options.iterations} iterations"
        say(f"convergence.py: {runs}, {len(board.results)} of them are there; {options.out}")
        if not options.report_only:
            train(board, options, lock, lambda: report(board, options))
        rows = report(board, options)
        say(f"convergence.py: wrote report.md, {'curves.png ' if board.results else ''}and runs.json in {options.out}")
        return max(judge(rows, options), 1 if board.failures else 0)


def main(argv: Sequence[str] | None = None, prog: str = "convergence.py") -> int:
    """The exit code: 0, 1 if a run failed or a gap is too large, 2 for a wrong option, 130 if interrupted."""
    options = parse(sys.argv[1:] if argv is None else argv, prog)
    return run_program("convergence.py", lambda: work(options), "the same command continues from here")
