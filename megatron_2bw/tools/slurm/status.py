"""The status file of a Slurm job: one word for its state, the reason, and its history.

Invariant: only `decide` maps the facts of an ended start to a word; the file is
replaced whole; the word is one of pending, running, completed, out of memory, timeout,
failed.

    megatron-2bw slurm show logs/*     # what the files say, corrected by what Slurm
    says of dead jobs
"""

import json
import re
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_2bw.base import run_log
from megatron_2bw.base.command_line import add_options, table_of
from megatron_2bw.base.errors import Parser, report_error, run_program
from megatron_2bw.base.files import write_json
from megatron_2bw.mcore.checkpoints.folder import TRACKER

WORDS = ("pending", "running", "completed", "out of memory", "timeout", "failed")
OPEN = ("pending", "running")
# of Slurm's words
ALIVE = ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "REQUEUED")
# other words of Slurm: failed
DIED = {"OUT_OF_MEMORY": "out of memory", "TIMEOUT": "timeout", "DEADLINE": "timeout"}
# consecutive starts without a saved iteration after which a job is not queued again
IDLE_STARTS = 3
TAIL = 2**20  # bytes at the end of a log that are searched
# exit status after SIGKILL, which the kernel sends when memory is short
KILLED = 128 + 9

LEFT = re.compile(r"exiting program after receiving SIG")  # Megatron, saved
SIGNALLED = re.compile(r"node\.sh: Slurm has sent SIG")
ERROR = re.compile(r"error: ")
MEMORY = re.compile(
    (
        r"out of memory|oom[-_ ]kill|cannot allocate memory|can't allocate "
        r"memory|Signal 9 \(SIGKILL\)|exitcode *: -9\b"
    ),
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Facts:
    """What is known when a start has ended."""

    exit_status: int  # of srun
    text: str = ""  # the logs of this start
    # Slurm asked the job to end: its time limit is near, or it is preempted
    signalled: bool = False
    cancelled: bool = False  # a user or an administrator cancelled it
    # Slurm ended it and queued it again: preempted without a grace time, scontrol
    # requeue
    requeued: bool = False
    saved: int = 0  # iteration of the newest checkpoint, 0 without one
    before: int = 0  # the same, when this start began
    idle: int = 0  # consecutive starts before this one that saved nothing
    keeps: bool = True  # the job saves checkpoints


class Outcome(NamedTuple):
    word: str
    reason: str
    requeue: bool = False


def decide(facts: Facts) -> Outcome:
    """How a start ended, and whether to queue the job again."""
    last = planned = 0
    for line in run_log.training(facts.text):
        last = line.iteration
        planned = line.planned
    failed = facts.exit_status != 0
    left = LEFT.search(facts.text) is not None
    # srun also ends the other nodes when one has failed; then its status is not 0.
    if not failed and SIGNALLED.search(facts.text):
        left = True
    interrupted = facts.signalled or left
    reached = last == planned and not interrupted and not failed
    if planned and (facts.saved == planned or reached):
        return Outcome("completed", f"iteration {planned} of {planned}")
    saved = f"saved: iteration {facts.saved}"
    if facts.requeued:
        return Outcome("pending", f"{saved}; Slurm has queued it again")
    if facts.cancelled:
        return Outcome("failed", f"cancelled; {saved}")
    if interrupted:
        return _interrupted(facts)
    if failed:
        return _failed(facts)
    reason = f"iteration {last} of {planned}, as its flags say"
    return Outcome("completed", reason if planned else "nothing to train")


def _interrupted(facts: Facts) -> Outcome:
    """The outcome of a start that Slurm asked to end."""
    if not facts.keeps:
        return Outcome(
            "timeout",
            "its time was over; CHECKPOINTS=none, so it would start from the beginning",
        )
    if facts.saved != facts.before or facts.idle + 1 < IDLE_STARTS:
        return Outcome(
            "pending", f"saved: iteration {facts.saved}; queued again", requeue=True
        )
    return Outcome(
        "timeout",
        f"no iteration saved in {facts.idle + 1} starts: give it more time (sbatch "
        "--time), or a longer notice (--signal=B:TERM@SECONDS)",
    )


def _failed(facts: Facts) -> Outcome:
    status = f"exit status {facts.exit_status}"
    memory = _line(facts.text, MEMORY)
    if memory or facts.exit_status == KILLED:
        return Outcome("out of memory", memory or status)
    return Outcome("failed", _line(facts.text, ERROR) or status)


def _line(text: str, pattern: re.Pattern[str]) -> str:
    """The first line with the pattern."""
    for line in text.splitlines():
        if pattern.search(line):
            return line.strip()[:300]
    return ""


def read(path: Path) -> dict[str, Any]:
    """The file's content; empty if there is none."""
    return json.loads(path.read_text()) if path.exists() else {}


def write(path: Path, outcome: Outcome, **fields: Any) -> None:
    """Replace the file; its earlier words are in its history."""
    content = read(path) | fields
    entry = {
        "status": outcome.word,
        "reason": outcome.reason,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    history = content.get("history", [])
    history.append(entry | {"start": content.get("start", 0)})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, content | entry | {"history": history})


def tail(path: Path) -> str:
    """The end of a log, which may cover weeks."""
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        return file.read().decode(errors="replace")


def saved_iteration(checkpoints: str) -> int:
    """Iteration of the newest checkpoint, 0 without one."""
    try:
        return int(Path(checkpoints, TRACKER).read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return 0


def begin(options: Namespace) -> int:
    """A start begins. Status 1 if the last starts saved nothing, as when nodes fail
    repeatedly."""
    content = read(options.file)
    saved = saved_iteration(options.checkpoints)
    keeps = options.checkpoints != "none"
    idle = 0
    if options.start and keeps and content.get("saved") == saved:
        idle = content.get("idle", 0) + 1
    outcome = Outcome("running", f"start {options.start}, from iteration {saved}")
    if idle >= IDLE_STARTS:
        reason = f"no iteration saved in {idle} starts; it is not started again"
        outcome = Outcome("failed", reason)
        report_error("megatron-2bw slurm", reason)
    write(
        options.file,
        outcome,
        job=options.job,
        start=options.start,
        saved=saved,
        idle=idle,
    )
    return int(outcome.word == "failed")


def end(options: Namespace) -> int:
    """A start has ended: print `requeue` or the word, then write it. The job is queued
    again even if that fails."""
    content = read(options.file)
    if options.refused:
        outcome = Outcome("failed", options.refused)
    else:
        logs = sorted(options.file.parent.glob(f"start-{options.start}-*.log"))
        facts = Facts(
            options.exit_status,
            "\n".join(map(tail, logs)),
            options.signalled,
            options.cancelled,
            options.requeued,
            saved=saved_iteration(options.checkpoints),
            before=content.get("saved", 0),
            idle=content.get("idle", 0),
            keeps=options.checkpoints != "none",
        )
        outcome = decide(facts)
    print("requeue" if outcome.requeue else outcome.word, flush=True)
    write(options.file, outcome, job=options.job)
    return 0


def late(options: Namespace) -> int:
    """Slurm is about to kill a start that has not ended: write the word that is right
    if it does."""
    if options.requeued:
        outcome = Outcome("pending", "Slurm has queued it again")
    elif options.cancelled:
        outcome = Outcome("failed", "cancelled")
    else:
        outcome = Outcome("timeout", options.reason)
    write(options.file, outcome, job=options.job)
    return 0


def show(options: Namespace) -> int:
    """A line for each job; what is no folder of a job has none."""
    for folder in options.logs:
        content = current(folder / "status.json")
        if content:
            print(
                f"{folder}: {content['status']}, {content['reason']} ({content['time']})"
            )
    return 0


def current(path: Path, job: str = "") -> dict[str, Any]:
    """The file, corrected if its job (by default the one that it names) has died
    without writing it."""
    content = read(path)
    # a run that a sweep has just submitted does not name one yet
    job = job or content.get("job", "")
    if content.get("status") in OPEN and job:
        state = slurm_state(job).rstrip("+")
        content = read(path)  # a job that ended meanwhile wrote it before Slurm knew
        if content["status"] in OPEN and state not in ALIVE:
            reason = "Slurm does not know the job any more"
            if state:
                reason = f"Slurm: {state}"
            write(path, Outcome(DIED.get(state, "failed"), reason))
    return read(path)


def slurm_state(job: str) -> str:
    """Slurm's word for a job: from its controller, which forgets after minutes, or from
    its accounting."""
    squeue = "squeue --noheader --states=all --format=%T --jobs"
    sacct = "sacct --allocations --noheader --parsable2 --format=State --jobs"
    for command in (squeue, sacct):
        done = subprocess.run(
            [*command.split(), job],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        words = done.stdout.split()
        if words:
            return words[0]
    return ""


def script(options: Namespace) -> None:
    print(Path(__file__).with_name(f"pretrain_{options.kind}_2bw.sbatch"))


FUNCTIONS = {"start": begin, "end": end, "late": late, "show": show, "script": script}


def main(argv: Sequence[str] | None = None, prog: str = "megatron-2bw slurm") -> int:
    parser = Parser(
        prog=prog,
        description="The states of Slurm jobs, from their status files; and the script that sbatch submits.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, content in table_of(__file__).items():
        command = commands.add_parser(name, **content["parser"], allow_abbrev=False)
        command.set_defaults(function=FUNCTIONS[name])
        add_options(command, content["flags"])
    options = parser.parse_args(argv)
    return run_program(prog, lambda: options.function(options))


if __name__ == "__main__":
    sys.exit(main())
