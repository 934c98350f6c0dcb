"""Mutated command lines and files of every command: is the answer one line that names what is wrong?

    python -m tests.distributed.mutations --lines 5000
    python -m tests.distributed.mutations --seed 7 --only 123

A line is a legal command line with one mutation: of a flag, of its value, or of a file that the command reads. Each
runs in a process forked from one that has imported everything, in a folder of its own. What would take minutes
(`STOPS`) prints its arguments instead and ends. The verdict of a line is one of VERDICTS. Failures are printed with
the command that runs them again, and written to the JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import random
import re
import resource
import shlex
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.common import new_parser, write_result
from megatron_2bw.processes import free_port
from tests.distributed import mutated_inputs as inputs
from tests.distributed.mutated_inputs import COMMANDS, INERT, Command

VERDICTS = {
    "named": "ends with one line that names the flag or the file",
    "other": "ends with one line that names another flag, or none",
    "effect": "is accepted; what it settles or prints differs from the base's",
    "inert": "is accepted; the flag is one that changes no result (INERT)",
    "same": "is accepted without an effect",
    "no line": "ends with a status that is not 0, without a line",
    "traceback": "ends with a traceback or by a signal",
    "slow": "runs for a minute, or needs more memory than there is",
}
BAD = ("same", "no line", "traceback", "slow")
SECONDS, MEMORY = 30, 6 << 30  # of a line: of the processor, and beyond the memory of the parent
TRAINED = 4  # of so many accepted lines one trains; lines with a damaged file do

# Functions that print their arguments and end the command.
STOPS = (
    "megatron_2bw.planner.measure.validate._try",
    "megatron_2bw.gpu_check.runner.result_of",
    "megatron_2bw.data.preprocess_cli.run",
    "megatron_2bw.convergence.run.train",
    "megatron_2bw.demo.start",
)

NUMBERS = {
    "word": ["four", "true", "None", "--"],
    "fraction": ["1.5", "0.3"],
    "negative": ["-1", "-7"],
    "zero": ["0"],
    "huge": ["9" * 20, "4294967297", "1000003", "1e300"],
    "nan": ["nan"],
    "inf": ["inf", "-inf", "1e999"],
    "base": ["0x10", "1_1", "1,3", "3,"],
}
WORDS = {
    "empty": [""],
    "blank": [" ", "\n", "\t"],
    "unicode": ["naïve", "\u0663", "⑦", "\udcff", "\u202e7"],
    "long": ["x" * 300, "7" * 300],
    "path": ["no/such", ".", "/proc/none", "folder/" * 20],
}
VALUES = NUMBERS | WORDS
FLAGS = ("typo", "no value", "missing", "twice", "stray", "added")
BYTES = ("cut", "emptied", "flipped", "random", "removed", "folder", "text")
ENTRIES = ("key removed", "key misspelt", "type", "number", "nan", "key twice")


class Stopped(BaseException):
    """A line was accepted, and what it asks for is not done."""


@dataclass(frozen=True)
class Line:
    """A mutated command line; `targets` are what a message may name, and `damage` is done to a file before."""

    command: Command
    kind: str
    words: list[str]
    targets: tuple[str, ...]
    damage: Callable[[], None] | None = None
    trains: bool = True


@dataclass(frozen=True)
class Ending:
    status: int  # negative after a signal
    output: str
    settled: str
    seconds: float


def legal(command: Command) -> Line:
    return Line(command, "", list(command.words), ())


# --- mutations -------------------------------------------------------------------------------------------------------


def groups(words: list[str]) -> list[list[str]]:
    """The words by flag: each flag with its values; words before the first flag and each -- alone."""
    found: list[list[str]] = []
    for word in words:
        found.append([word]) if word.startswith("--") or not found or found[-1][0][:2] != "--" else found[-1].append(
            word
        )
    return found


def joined(parts: list[list[str]]) -> list[str]:
    return [word for part in parts for word in part]


def typo(draw: random.Random, word: str) -> str:
    at = draw.randrange(2, len(word))
    return draw.choice((word[:at] + word[at + 1 :], word[:at] + word[at] + word[at:], word[:at] + "q" + word[at + 1 :]))


def plausible(draw: random.Random, action: argparse.Action) -> str | None:
    """A legal value for most flags; None for a switch."""
    if action.nargs == 0:
        return None
    if action.choices:
        return str(draw.choice([getattr(choice, "name", choice) for choice in action.choices]))
    name = getattr(action.type, "__name__", "str")
    if name == "float":
        return f"{draw.random():.2g}"
    return draw.choice(("gpt", "out", "0.5")) if name in ("str", "Path") else str(draw.randint(1, 9))


def same_value(typed: str | None, default: Any) -> bool:
    """Whether a typed value is the flag's default."""
    if not isinstance(default, (int, float)) or typed is None:
        return typed == str(default)
    with contextlib.suppress(ValueError):
        return float(typed) == default
    return False


def mutate_flag(draw: random.Random, command: Command, actions: dict[str, argparse.Action]) -> Line | None:
    """None if the drawn kind does not fit the drawn flag."""
    kind, parts = draw.choice((*FLAGS, *VALUES)), groups(list(command.words))
    ours = [part for part in parts if part[0] in actions]
    if kind == "stray":
        word = draw.choice(("stray", "7", "--frobnicate", "-x", "naïve", "x" * 300))
        return Line(command, kind, [*joined(parts), word], (word,))
    if actions and (kind == "added" or kind in VALUES and draw.random() < 0.4):
        action = draw.choice(list(actions.values()))
        part = [action.option_strings[0]]
        if part[0] in [each[0] for each in parts] or part[0] in ("--help", "--version"):
            return None
        value = plausible(draw, action) if kind == "added" else draw.choice(VALUES[kind])
        words = [*joined(parts), *part, *([] if value is None else [value])]
        return (
            None
            if same_value(value, action.default)
            else Line(command, kind, words, (part[0], *([] if value is None else [value])))
        )
    if not ours:
        return None
    part = draw.choice(ours)
    flag, values, action = part[0], part[1:], actions[part[0]]
    if kind == "typo":
        wrong = typo(draw, flag)
        targets, part[0] = (wrong,), wrong
        return None if wrong == flag else Line(command, kind, joined(parts), targets)
    if kind == "missing" and not same_value(" ".join(values), action.default):
        return Line(command, kind, joined([each for each in parts if each is not part]), (flag,))
    value = plausible(draw, action) if kind == "twice" else draw.choice(VALUES.get(kind, [""]))
    if kind == "missing" or not values or value is None or values == [value]:
        return None
    if kind == "twice":
        return Line(command, kind, [*joined(parts), flag, value], (flag,))
    part[1:] = values[:-1] if kind == "no value" else [*values[:-1], value]
    return Line(command, kind, joined(parts), (flag, value))


def mutate_file(draw: random.Random, command: Command) -> Line:
    """One of the files that the command reads."""
    files = inputs.files(command.reads)
    file = draw.choice(files)
    structured = inputs.structured(file)
    kind = draw.choice((*BYTES, *ENTRIES * 2) if structured else BYTES)
    if kind == "flipped" and file.suffix in (".distcp", ".pt", ".bin"):  # sizes are checked, not bytes
        kind = "cut"
    seed = draw.random()
    words = list(command.words)
    flags = [before for before, word in zip(words, words[1:]) if str(file).startswith(word) and before[:2] == "--"]
    return Line(
        command,
        kind,
        words,
        (str(file), file.name, file.parent.name or file.name, *flags),
        lambda: inputs.damage(file, kind, seed),
    )


def new_line(draw: random.Random, parsers: dict[Command, dict[str, argparse.Action]]) -> Line:
    while True:
        command = draw.choices(list(parsers), [each.share for each in parsers])[0]
        file = draw.random() < command.damaged
        line = mutate_file(draw, command) if file else mutate_flag(draw, command, parsers[command])
        if line is not None:
            return line


# --- running one -----------------------------------------------------------------------------------------------------


def run(line: Line, kept: Path | None = None) -> Ending:
    """Run the line in a process and a folder of its own. Every process that it has started ends."""
    with tempfile.TemporaryDirectory(prefix="mutations_") as name:
        folder, begin = kept or Path(name, "run"), time.monotonic()
        folder.mkdir(exist_ok=True)
        pid = os.fork()
        if not pid:
            _child(line, folder, Path(name))
        status = None
        while status is None and time.monotonic() < begin + 10 * SECONDS:
            ended, code, used = os.wait4(pid, os.WNOHANG)
            status = os.waitstatus_to_exitcode(code) if ended else time.sleep(0.003)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        if status is None:
            _, _, used = os.wait4(pid, 0)
        output = Path(name, "log").read_text(errors="replace")
        settled = Path(name, "settled").read_text() if Path(name, "settled").exists() else ""
        if not settled:
            texts = [output, *(f"{path} {inputs.content(path)!r}" for path in sorted(folder.rglob("*")))]
            settled = inputs.masked("\n".join(texts).replace(str(folder), ""))
        return Ending(-signal.SIGALRM if status is None else status, output, settled, used.ru_utime + used.ru_stime)


def _child(line: Line, folder: Path, notes: Path) -> None:
    """Never returns."""
    status = 1
    try:
        os.setsid()
        log = os.open(notes / "log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False, errors="surrogateescape")
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY + pages * resource.getpagesize(),) * 2)
        os.environ.update(
            RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=f"{free_port()}"
        )
        os.environ.update(HF_HUB_OFFLINE="1", WANDB_MODE="offline", HF_DATASETS_CACHE=f"{notes}/cache")
        inputs.copy_inputs(line.command.reads, folder)
        os.chdir(folder)
        if line.damage:
            line.damage()
        for name in (*STOPS, *["megatron.training.pretrain"] * (not line.trains)):
            module, _, function = name.rpartition(".")
            setattr(importlib.import_module(module), function, _stop)
        status = line.command.call(line.words) or 0
    except Stopped:
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(bool(end.code))
    except BaseException:
        traceback.print_exc()
    if line.command.trains:
        Path(notes, "settled").write_text(
            inputs.settled(Path(notes, "log").read_text(errors="replace")), errors="surrogateescape"
        )
    sys.stdout.flush()
    os._exit(status)


def _stop(*arguments: Any, **_: Any) -> None:
    print(*(vars(each) if isinstance(each, argparse.Namespace) else each for each in arguments), sep="\n")
    raise Stopped


def readable(text: str) -> str:
    """With a mark for bytes that are no UTF-8, as the output has it."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def verdict(line: Line, ending: Ending, base: str) -> str:
    lines = ending.output.strip().splitlines() or [""]
    if -ending.status in (signal.SIGALRM, signal.SIGXCPU, signal.SIGKILL):
        return "slow"
    if ending.status < 0 or "Traceback (most recent call last)" in ending.output:
        return "traceback"
    if ending.status == 0:
        alike = "inert" if line.targets[0] in INERT else "same"
        return alike if ending.settled == base else "effect"
    said = lines[-1]
    if "error: " not in said:
        return "effect" if said.startswith(("Nothing fits.", "No plan is legal")) else "no line"
    targets = (re.escape(readable(" ".join(target.split())) or "an empty word") for target in line.targets)
    return "named" if any(re.search(rf"(?<![\w-]){target}(?![\w-])", said) for target in targets) else "other"


# --- many ------------------------------------------------------------------------------------------------------------


def base(command: Command, trains: bool) -> str:
    """What the legal line settles. AssertionError if it fails."""
    ending = run(replace(legal(command), trains=trains))
    assert ending.status == 0, f"{command.program} {shlex.join(list(command.words))}\n{ending.output[-3000:]}"
    return ending.settled


def try_lines(seed: int, numbers: list[int]) -> Iterator[dict[str, Any]]:
    """What was found so far, after each line."""
    counts: dict[str, dict[str, Counter[str]]] = {"by command": {}, "by kind": {}}
    verdicts, found, begin, spent = Counter[str](), [], time.monotonic(), Counter[str]()
    with inputs.prepared():
        parsers = {command: inputs.actions(command) for command in COMMANDS}
        settled: dict[tuple[Command, bool], str] = {}
        for done, number in enumerate(numbers, 1):
            line = new_line(random.Random(f"{seed} {number}"), parsers)
            line = replace(line, trains=bool(line.damage) or number % TRAINED == 0)
            if (key := (line.command, line.trains)) not in settled:
                settled[key] = base(*key)
            ending = run(line)
            what = verdict(line, ending, settled[key])
            verdicts[what] += 1
            for table, key in (("by command", line.command.name), ("by kind", line.kind)):
                counts[table].setdefault(key, Counter())[what] += 1
            spent[line.command.name] += ending.seconds
            typed = readable(f"{line.command.program} {shlex.join(line.words)}")
            last = (ending.output.strip().splitlines() or [""])[-1]
            case = {
                "verdict": what,
                "number": number,
                "kind": line.kind,
                "targets": [*map(readable, line.targets)],
                "line": typed,
            }
            case |= {"said": last, "seconds": round(ending.seconds, 1), "again": f"--seed {seed} --only {number}"}
            found += [case]
            seconds = round(time.monotonic() - begin, 1)
            yield (
                {"seed": seed, "lines": done, "seconds": seconds, "verdicts": verdicts}
                | counts
                | {"cases": found, "output": ending.output}
            )


def main() -> int:
    parser = new_parser(__doc__, "mutations")
    parser.add_argument("--lines", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--only", type=int, action="append", help="the number of a line, as printed")
    options = parser.parse_args()
    for found in try_lines(options.seed, options.only or list(range(options.lines))):
        case = found["cases"][-1]
        if case["verdict"] in BAD:
            print(f"{case['verdict']}: {case['line']}\n    {case['said']}\n    {case['again']}", flush=True)
        if options.only:
            print(found["output"], case, sep="\n")
        elif found["lines"] % 100 == 0 or found["lines"] == options.lines:
            print(
                f"seed {options.seed}: {found['lines']} lines in {found['seconds']:.0f} s, {dict(found['verdicts'])}",
                flush=True,
            )
            keep = [case for case in found["cases"] if case["verdict"] not in ("named", "effect")]
            write_result(
                options.json, {key: found[key] for key in found if key not in ("cases", "output")} | {"cases": keep}
            )
    return int(any(found["verdicts"][each] for each in BAD))


if __name__ == "__main__":
    sys.exit(main())
