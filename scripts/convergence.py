"""Trains one configuration with and without 2BW's late gradients, from the same weights on the same batches.

    python scripts/convergence.py NAME --lr 3e-4,3e-3 --seeds 1234,1235,1236
    python scripts/convergence.py NAME --variants vanilla,2bw,2bw+sync --max-gap 1 -- --num-layers 8 --train-iters 3000

Every run goes through the entry script and has a folder of its own in out/convergence/NAME/runs, with its log. Words
after -- are Megatron's flags for all of them and win over the defaults: a GPT of 5.3 million parameters on the built-in
corpus. After each run runs.json, curves.png and report.md are written again. Ended by whatever, the same command goes
on with the runs that are missing, and with --save-interval N after -- in their middle. A run that fails leaves the
others alone; if the very first does not begin to train, no other is started.

Invariant: result.json in a run's folder is that of a run that ended by itself, and holds its command; no run is
compared with one of another command.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import math
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_2bw.data.corpus import CorpusError  # noqa: E402
from scripts.convergence_options import (  # noqa: E402
    ConvergenceError,
    Run,
    built_in,
    defaults,
    given,
    grid,
    parse,
    takes_corpus,
    value,
)
from scripts.convergence_plot import draw  # noqa: E402
from scripts.convergence_report import STARTED, markdown, outcome, summarize, too_large  # noqa: E402
from scripts.demo import leave_on_signals, stop, write_whole  # noqa: E402

EVERY = 5.0  # seconds between two lines of a run


# --- results --------------------------------------------------------------------------------------------------------


def same(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether two commands train the same: whatever the interpreter and the folder of the clone."""
    return _trains(one) == _trains(other)


def _trains(words: Sequence[str]) -> list[str]:
    at = list(words).index("--nproc-per-node")
    trains = [words[at + 1], Path(words[at + 2]).name, *words[at + 3 :]]
    # The folder of its checkpoints is in the run's own, wherever that is.
    return [word for before, word in zip(["", *trains], trains) if before not in ("--save", "--load")]


def portable(words: Sequence[str]) -> list[str]:
    """A run's command as one would type it in any clone: without this machine's folders."""
    at = list(words).index("--nproc-per-node")
    rest = (word.replace(str(Path.home()), "~") for word in words[at + 3 :])
    return ["python", *words[1 : at + 2], Path(words[at + 2]).name, *rest]


def result_of(run: Run) -> dict[str, Any] | None:
    """The stored result. Raises ConvergenceError if it, or checkpoints to go on from, are of another command."""
    for name in ("result.json", "command.json"):
        try:
            stored = json.loads((run.folder / name).read_text())
        except FileNotFoundError:
            continue
        except ValueError:
            raise ConvergenceError(f"{run.folder / name}: not JSON; --fresh sets all runs aside") from None
        if not same(stored["command"], run.command) and (name == "result.json" or _checkpoints(run)):
            raise ConvergenceError(
                f"{run.folder} holds a run of other flags; give another NAME, or --fresh, which "
                "sets all runs aside and begins again"
            )
        if name == "result.json":
            return stored
    return None


def _checkpoints(run: Run) -> bool:
    return (run.folder / "checkpoints").exists()


def write_json(path: Path, content: Any) -> None:
    write_whole(path, lambda part: part.write_text(json.dumps(finite(content), allow_nan=False) + "\n"))


def finite(content: Any) -> Any:
    """The content with None for numbers that JSON does not have."""
    if isinstance(content, dict):
        return {key: finite(entry) for key, entry in content.items()}
    if isinstance(content, list):
        return [finite(entry) for entry in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


# --- runs -----------------------------------------------------------------------------------------------------------


class Job:
    """A run's process. It writes to the log by itself; `read` follows."""

    def __init__(self, run: Run, lock: int, gpus: str | None):
        run.folder.mkdir(parents=True, exist_ok=True)
        write_json(run.folder / "command.json", {"command": run.command})
        if run.log.exists() and not _checkpoints(run):  # it begins again, perhaps with other flags
            number = next(n for n in itertools.count(1) if not run.log.with_suffix(f".{n}.log").exists())
            run.log.rename(run.log.with_suffix(f".{number}.log"))
        environment = dict(os.environ)
        environment.setdefault("OMP_NUM_THREADS", "1")
        environment.setdefault("PYTHONWARNINGS", "ignore")  # each rank would list what is not installed
        if gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpus
        self.run, self.iteration, self.loss, self.said, self._rest = run, 0, math.nan, 0.0, ""
        self._begun = time.monotonic()
        with open(run.log, "a") as log:
            log.write(f"\n{STARTED} {shlex.join(run.command)}\n")
            log.flush()
            self._log = open(run.log, errors="replace")
            self._log.seek(0, os.SEEK_END)
            self.first: int | None = None  # iteration that the process began with
            self.process = subprocess.Popen(
                run.command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(lock,),
            )

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun

    def read(self) -> bool:
        """Take in what the log has more of. Returns whether it says how far the run is."""
        lines = (self._rest + self._log.read()).split("\n")
        self._rest = lines.pop()
        before = self.iteration
        for line in lines:
            if match := re.search(r"\biteration +(\d+)/ *\d+ \|(?:.*\blm loss: (\S+) \|)?", line):
                self.iteration, self.loss = int(match[1]), float(match[2] or math.nan)
                self.first = self.iteration if self.first is None else self.first
        return self.iteration != before

    def end(self) -> None:
        stop(self.process)
        self._log.close()


class Board:
    """What is known of all runs, and the lines that say so."""

    def __init__(self, runs: list[Run], iterations: int):
        self.runs, self.iterations = runs, iterations
        self.results: dict[Run, dict[str, Any]] = {}
        self.failures: dict[Run, str] = {}
        self.losses: dict[tuple[Run, int], float] = {}  # at an iteration
        self._begun, self._done = time.monotonic(), 0.0

    def take(self, run: Run, result: dict[str, Any]) -> None:
        self.results[run] = result
        self.losses |= {(run, int(end)): math.nan if loss is None else loss for end, loss in result["training"]}

    def line(self, job: Job, others: Sequence[Job]) -> str:
        """[3/30] 2bw lr 3e-3 seed 1235: iteration 250/1500, loss 4.512 (vanilla 4.498), 2:10 elapsed, about ..."""
        run = job.run
        self.losses[run, job.iteration] = job.loss
        vanilla = next(
            other for other in self.runs if (other.variant, other.lr, other.seed) == ("vanilla", run.lr, run.seed)
        )
        beside = self.losses.get((vanilla, job.iteration)) if vanilla != run else None
        beside = "" if beside is None else f" (vanilla {beside:.3f})"
        return (
            f"{self.number(run)} {run.title}: iteration {job.iteration}/{self.iterations}, loss {job.loss:.3f}"
            f"{beside}, {duration(time.monotonic() - self._begun)} elapsed{self._left([job, *others])}"
        )

    def number(self, run: Run) -> str:
        return f"[{self.runs.index(run) + 1}/{len(self.runs)}]"

    def ended(self, job: Job) -> None:
        self._done += max(0, job.iteration - (job.first or 0))

    def _left(self, jobs: Sequence[Job]) -> str:
        now = sum(job.iteration - (job.first or 0) for job in jobs)
        pending = len(self.runs) - len(self.results) - len(self.failures)
        left = pending * self.iterations - sum(job.iteration for job in jobs)
        done = self._done + now
        if not done:
            return ""
        return f", about {duration(left * (time.monotonic() - self._begun) / done)} left"


def duration(seconds: float) -> str:
    """2:10, 1:02:00"""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def gpus_of(slot: int, ranks: int, most: int, gpus: Sequence[str]) -> str | None:
    """CUDA_VISIBLE_DEVICES of the slot-th of the runs side by side, of `most` ranks at most; None to leave it."""
    if len(gpus) <= ranks:
        return None
    return ",".join(gpus[(slot * most + rank) % len(gpus)] for rank in range(ranks))


def ranks_of(run: Run) -> int:
    return int(value(run.command, "--nproc-per-node"))


def gpus_to_deal(options) -> list[str]:
    """Those that this script was given, as Slurm does; none if only one run at a time is to use them."""
    if options.jobs == 1 or options.device == "cpu":
        return []
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [gpu for gpu in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if gpu]
    import torch

    return [str(gpu) for gpu in range(torch.cuda.device_count())]


def train(board: Board, options, lock: int, after: Callable[[], None]) -> None:
    """Run what is missing, `options.jobs` side by side; `after` each that ended. Failures are on the board."""
    waiting = [run for run in board.runs if run not in board.results]
    gpus, jobs = gpus_to_deal(options), {}
    most = max(map(ranks_of, waiting), default=1)
    try:
        while waiting or jobs:
            # One after the other until each has begun: runs with the same seed write the same index of the data.
            if waiting and len(jobs) < options.jobs and all(job.iteration for job in jobs.values()):
                slot = next(slot for slot in range(options.jobs) if slot not in jobs)
                run = waiting.pop(0)
                jobs[slot] = Job(run, lock, gpus_of(slot, ranks_of(run), most, gpus))
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
                    # Neither one that trains beside it, nor one that has: so it is what all have in common.
                    if waiting and not jobs and len(board.failures) == 1 and not board.results and not job.iteration:
                        say("convergence.py: no other run is started, for the first has not trained")
                        waiting.clear()
                    try:
                        after()
                    except OSError as error:  # what is lost can be written again, the runs that go on cannot
                        say(f"convergence.py: the report could not be written: {error}")
            time.sleep(0.2)
    finally:
        for job in jobs.values():
            job.end()


def finish(board: Board, job: Job, code: int) -> None:
    """Store a run's result, or say why there is none."""
    run, begin = job.run, f"{board.number(job.run)} {job.run.title}:"
    job.end()
    board.ended(job)
    try:
        result = outcome(run.log.read_text(errors="replace"), code, board.iterations)
    except ConvergenceError as error:
        board.failures[run] = str(error)
        say(f"{begin} failed, {error} (log: {run.log})")
        return
    write_json(run.folder / "result.json", {"command": run.command, "seconds": round(job.seconds, 1)} | result)
    board.take(run, result)
    loss = "diverged" if result["diverged"] else f"validation loss {result['validation'][-1][1]:.4f}"
    say(f"{begin} ended after {duration(job.seconds)}, {loss}")


def say(line: str) -> None:
    print(line, flush=True)


# --- the whole ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[int]:
    """A lock on the folder, which the runs hold too: one that outlives this script keeps others out."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise ConvergenceError(f"--out {folder}: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield lock
    except BlockingIOError:
        raise ConvergenceError(f"{folder} is in use by another convergence.py, or by a run that it has left") from None
    finally:
        os.close(lock)


def set_aside(folder: Path) -> None:
    if folder.exists():
        number = next(n for n in range(1, 1000) if not folder.with_name(f"{folder.name}.{n}").exists())
        folder.rename(folder.with_name(f"{folder.name}.{number}"))


def report(board: Board, options) -> list[dict[str, Any]]:
    """Write runs.json, curves.png and report.md of the results that there are. Returns a row for each (lr, variant)."""
    results = {(run.lr, run.variant, run.seed): result for run, result in board.results.items()}
    seeds = [int(seed) for seed in options.seeds]
    rows = [
        summarize(results, lr, variant, seeds, options.iterations) for lr in options.lr for variant in options.variants
    ]
    rows = [row for row in rows if row["finished"]]
    runs = [
        {
            "variant": run.variant,
            "lr": run.lr,
            "seed": run.seed,
            "folder": str(run.folder.relative_to(options.out)),
            "failure": board.failures.get(run),
        }
        | board.results.get(run, {})
        | {"command": portable(run.command)}
        for run in board.runs
    ]
    write_json(
        options.out / "runs.json",
        {
            "name": options.name,
            "again": options.again,
            "task": options.task,
            "vanilla": options.vanilla,
            "iterations": options.iterations,
            "stages": options.stages,
            "width": options.width,
            "variants": options.variants,
            "learning_rates": options.lr,
            "seeds": seeds,
            "flags": options.flags,
            "summary": rows,
            "runs": runs,
        },
    )
    if results:
        write_whole(
            options.out / "curves.png",
            lambda part: draw(results, options.lr, list(options.variants), seeds, options.iterations, part),
        )
    else:
        (options.out / "curves.png").unlink(missing_ok=True)  # of runs that were set aside
    text = markdown(f"Convergence: {options.name}", facts(board, options), rows, troubles(board))
    write_whole(options.out / "report.md", lambda part: part.write_text(text))
    return rows


def facts(board: Board, options) -> list[str]:
    """What was run, for report.md."""
    seeds = (
        f"{len(options.seeds)} seeds ({', '.join(options.seeds)})"
        if len(options.seeds) > 1
        else (f"one seed ({options.seeds[0]})")
    )
    return [
        f"{options.task.upper()}, {options.iterations} iterations, {options.stages} "
        f"{'stages' if options.stages > 1 else 'stage'} × width {options.width}, {seeds}; {len(board.results)} of "
        f"{len(board.runs)} runs have ended. Again, or on from here:",
        "",
        f"    {options.again}",
        "",
        f"- of this script: `{shlex.join(defaults(options, options.flags)) or 'nothing'}`"
        + ("" if options.no_defaults or given(options.flags, "--min-lr") else ", `--min-lr` a tenth of `--lr`")
        + (", the built-in corpus and its tokenizer" if takes_corpus(options) else ""),
        *(f"- **{label}**: `{shlex.join(flags)}`" for label, flags in options.variants.items()),
    ]


def troubles(board: Board) -> list[str]:
    ended = [
        f"{run.title}: diverged by iteration {result.get('iteration', 0)}"
        for run, result in board.results.items()
        if result["diverged"]
    ]
    return ended + [f"{run.title}: {why}" for run, why in board.failures.items()]


def judge(rows: Sequence[dict[str, Any]], options) -> int:
    """The exit code of --max-gap, with a line for each variant that is above, or one that says that none is."""
    if options.max_gap is None:
        return 0
    of = options.max_gap_of or [label for label in options.variants if label != "vanilla"]
    lines = too_large(rows, options.max_gap, options.lr, of, len(options.seeds))
    for line in lines:
        print(f"convergence.py: {line}", file=sys.stderr)
    if not lines:
        say(f"convergence.py: --max-gap {options.max_gap:g} holds for {', '.join(of)} at lr {', '.join(options.lr)}")
    return 1 if lines else 0


def work(options, lock: int) -> int:
    if options.fresh:
        set_aside(options.out / "runs")
    board = Board(grid(options, built_in(options)), options.iterations)
    for run in board.runs:
        if result := result_of(run):
            board.take(run, result)
    say(
        f"convergence.py: {len(board.runs)} runs of {options.iterations} iterations, {len(board.results)} of them are "
        f"there; {options.out}"
    )
    if not options.report_only:
        train(board, options, lock, lambda: report(board, options))
    rows = report(board, options)
    say(f"convergence.py: wrote report.md, {'curves.png ' if board.results else ''}and runs.json in {options.out}")
    return max(judge(rows, options), 1 if board.failures else 0)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 if a run failed or a gap is too large, 2 for a wrong option, 130 if interrupted."""
    options = parse(sys.argv[1:] if argv is None else argv)
    try:
        with locked(options.out) as lock:
            return work(options, lock)
    except (ConvergenceError, CorpusError) as error:
        print(f"convergence.py: error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        place = error.filename or options.out
        print(f"convergence.py: error: {place}: {error.strerror}; the same command goes on from here", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("convergence.py: stopped; the same command goes on from here", file=sys.stderr)
        return 130


if __name__ == "__main__":
    leave_on_signals()
    sys.exit(main())
