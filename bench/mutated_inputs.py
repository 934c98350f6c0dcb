"""The commands of bench/mutations.py with a legal line each, and the files that they read, whole and damaged.

Invariant: a damage depends on the file, its kind and its seed alone.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib
import io
import json
import os
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import megatron_2bw.start.preload  # noqa: F401
from scripts.list_flags import parser_of
from tests.distributed.training import TINY
from tests.unit.test_arguments import dataset
from tests.unit.test_planner_calibrate import ROW
from tests.unit.test_planner_model import LLAMA3

_FOLDER: list[Path] = []  # of the inputs, while there are any

RUN = TINY | {"--eval-iters": 1, "--eval-interval": 3, "--train-iters": 4, "--lr-warmup-iters": 1, "--exit-interval": 2, "--lr-decay-iters": 8, "--global-batch-size": 4}
ENTRY = " ".join(f"{flag} {value}" for flag, value in RUN.items()) + " --pipeline-schedule 2bw"
MOCK, SAVE = "--mock-data", "--save new --save-interval 2"
GPT, BERT = "pretrain_gpt_2bw.py", "pretrain_bert_2bw.py"
PLAN, SCRIPTS = "megatron-2bw-plan", "scripts/"
MODEL = "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --vocab-size 5000"
SEARCH = "--max-global-batch-size 64 --pipeline-model-parallel-size 2,4 --micro-batch-size 1 --recompute none --top 2"
TINY_MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 127"
TRAINED = "--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --train-iters 4"
CONVERGENCE = f"tiny --out conv --seeds 1,2 --lr 1e-3,1e-2 -- {TRAINED}"
STATUS = "--file st/status.json --job 1 --start 0 --checkpoints ck"
TEXT = "--task gpt --input text/a.jsonl --output-prefix data/new --train-tokenizer bpe --vocab-size 300 --workers 1"
PROFILE = "--json p.json --microbatches 1,2 --repeats 1 --device cpu --precision fp32"

# share, what is typed, the legal line after it, what it reads, the share of damaged files
_ROWS: tuple[tuple, ...] = (
    (20, GPT, f"{ENTRY} {MOCK}"),
    (
        6,
        GPT,
        f"{ENTRY} {MOCK} --bf16 --use-distributed-optimizer --swiglu --tensorboard-dir board --two-bw-trace trace",
    ),
    (6, GPT, f"{ENTRY} {MOCK} --fp16 --initial-loss-scale 1024 --optimizer sgd --sgd-momentum 0.9"),
    (8, GPT, f"{ENTRY} --data-path data/gpt --num-workers 1 {SAVE}", "data", 0.5),
    (10, GPT, f"{ENTRY} {MOCK} --load ck", "ck", 0.6),
    (4, GPT, f"{ENTRY} {MOCK} --load old --ckpt-format torch", "old", 0.6),
    (10, BERT, f"{ENTRY} {MOCK}"),
    (
        8,
        PLAN,
        f"{MODEL} --cluster cluster.yaml --servers 1 --max-global-batch-size 64 --json p.json",
        "cluster.yaml",
        0.4,
    ),
    (8, PLAN, f"--model config.json --seq-length 1024 --cluster dgx-a100-80 {SEARCH}", "config.json", 0.6),
    (
        6,
        PLAN,
        f"{TINY_MODEL} --attention-dropout 0 --hidden-dropout 0 --cluster p3.16xlarge --profile profile.json "
        "--precision fp32 --max-global-batch-size 16 --script run.sh",
        "profile.json",
        0.7,
    ),
    (
        4,
        f"{PLAN} validate",
        f"{TINY_MODEL} --cluster p3.16xlarge --servers 1 --gpus-per-server 2 {SEARCH} --iterations 8 "
        "--device cpu --out val --precision fp32",
    ),
    (3, f"{PLAN} profile", f"{TINY_MODEL} {PROFILE}"),
    (6, f"{PLAN} simulate", "--schedule 2bw --stages 4 --microbatches 8 --iterations 2 --forward 1 --transfer 0.1"),
    (
        6,
        f"{PLAN} calibrate",
        "runs.csv --cluster p3.16xlarge --rows 1 --out c.yaml --predictions p.csv",
        "runs.csv",
        0.6,
    ),
    (2, "megatron-2bw gpu-check", "--part reference --minutes 1 --device cpu --json g.json"),
    (8, f"{SCRIPTS}preprocess_data.py", TEXT, "text", 0.3),
    (6, f"{SCRIPTS}convergence.py", CONVERGENCE),
    (6, f"{SCRIPTS}convergence.py", f"--report-only {CONVERGENCE}", "conv", 0.7),
    (4, f"{SCRIPTS}slurm/sweep.py", "submit --figure 6 --out sw --dry-run"),
    (4, f"{SCRIPTS}slurm/sweep.py", "collect --out sw --warm-up 1", "sw", 0.7),
    (1, f"{SCRIPTS}slurm/sweep.py", "status --out sw", "sw", 0.7),
    (3, f"{SCRIPTS}slurm/flags.py", "--kind gpt --model gpt-355m --servers 1 --processes 8 --precision bf16"),
    (4, f"{SCRIPTS}slurm/flags.py", "--kind gpt --plan plan.json --servers 1 --processes 8", "plan.json", 0.7),
    (2, f"{SCRIPTS}slurm/status.py", f"start {STATUS}", "st", 0.4),
    (2, f"{SCRIPTS}slurm/status.py", f"end {STATUS}", "st", 0.4),
    (2, f"{SCRIPTS}slurm/status.py", "show st", "st", 0.7),
    (2, "python -m megatron_2bw.timelines.trace", "trace", "trace", 0.8),
    (1, f"{SCRIPTS}demo.py", "--iterations 4 --schedule 2bw --out demo"),
)

_MAINS = {
    PLAN: "megatron_2bw.planner.cli:main",
    "megatron-2bw": "megatron_2bw.cli:main",
    f"{SCRIPTS}preprocess_data.py": "megatron_2bw.data.preprocess_cli:main",
    f"{SCRIPTS}convergence.py": "scripts.convergence:main",
    f"{SCRIPTS}slurm/sweep.py": "scripts.slurm.sweep:main",
    f"{SCRIPTS}slurm/flags.py": "scripts.slurm.flags:main",
    f"{SCRIPTS}slurm/status.py": "scripts.slurm.status:main",
    f"{SCRIPTS}demo.py": "scripts.demo:main",
    "python": "megatron_2bw.timelines.trace:main",
}


@dataclass(frozen=True)
class Command:
    share: int
    typed: str
    text: str
    reads: str = ""
    files: float = 0.0

    @property
    def name(self) -> str:
        return self.typed + (f", {self.reads}" if self.reads else "")

    @property
    def settles(self) -> bool:
        """Whether Megatron's arguments say what the line settles; else what it prints and writes does."""
        return self.typed in (GPT, BERT)

    def line(self) -> list[str]:
        return self.text.split()

    def call(self, words: list[str]) -> int | None:
        if self.settles:
            from megatron_2bw.start.launch import launch

            return launch(f"megatron_2bw.tasks.{'gpt' if self.typed == GPT else 'bert'}")
        sys.argv[1:] = [*self.typed.split()[1:], *words] if self.typed[:7] == "megatro" else words
        module, function = _MAINS[self.typed.split()[0]].split(":")
        return getattr(importlib.import_module(module), function)()


COMMANDS = tuple(Command(*row) for row in _ROWS)


def actions(command: Command) -> dict[str, argparse.Action]:
    """The command's flags and their actions."""
    if command.settles:
        from megatron.training.arguments import add_megatron_arguments

        from megatron_2bw.flags.parse import parse_early, prepare

        early = parse_early(["--pipeline-schedule", "2bw"], sys.exit)
        parser = prepare(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)), early, sys.exit)
    elif command.typed.startswith("python"):
        return {}
    else:
        parser = parser_of(lambda: command.call(command.line()), [])
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            parser = action.choices[command.line()[0]]
    return {flag: action for action in parser._actions for flag in action.option_strings if flag[:2] == "--"}


def settled(output: str) -> str:
    """Megatron's arguments after the rules and its own validation, and the losses."""
    from megatron.training import global_vars

    args = global_vars._GLOBAL_ARGS
    return masked(repr(sorted(vars(args).items()))) + repr(re.findall(r"loss[\w ]*: \S+", output)) if args else "nothing"


def masked(text: str) -> str:
    """Without addresses, times and process ids."""
    return re.sub(
        r"0x[0-9a-f]{6,}|\d+(\.\d+)? ?(s|ms|MB/s)\b|\d\d:\d\d:\d\d(\.\d+)?|\d{4}-\d\d-\d\d|port=\d+", "#", text
    )


# --- the files -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    """While the block runs there are the files that the commands read."""
    from bench import mutations

    with tempfile.TemporaryDirectory(prefix="mutations_") as name:
        folder = Path(name)
        _FOLDER[:] = [folder]
        _write(folder)
        gpt = Command(1, GPT, f"{ENTRY} {MOCK} --save ck --save-interval 2 --two-bw-trace trace")
        old = Command(1, GPT, f"{ENTRY} {MOCK} --save old --save-interval 2 --ckpt-format torch")
        plan = Command(1, PLAN, f"--model gpt-355m --cluster p3.16xlarge {SEARCH} --json plan.json --precision fp16")
        profile = Command(1, f"{PLAN} profile", f"{TINY_MODEL} --attention-dropout 0 --hidden-dropout 0 {PROFILE}")
        for command, *kept in ((gpt, "ck", "trace"), (old, "old"), (plan, "plan.json"), (profile, "p.json")):
            line = mutations.Line(command, "", command.line(), ())
            ending = mutations.run(line, folder)
            assert ending.status == 0 and all((folder / each).exists() for each in kept), ending.output
        (folder / "p.json").rename(folder / "profile.json")
        for path in folder.rglob(".owner.json"):
            path.unlink()
        try:
            yield
        finally:
            _FOLDER.clear()


def _write(folder: Path) -> None:
    from megatron_2bw.planner.describe.cluster import PRESETS, to_yaml
    from scripts.convergence_options import grid, parse
    from scripts.slurm import status
    from scripts.slurm.figures import PANELS, Run

    def put(name: str, content: Any) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content, indent=1))

    (folder / "data").mkdir()
    dataset(folder / "data" / "gpt", (20,) * 200)
    to_yaml(PRESETS["p3.16xlarge"], folder / "cluster.yaml")
    put("config.json", LLAMA3)
    rows = [",".join(ROW), *(",".join(map(str, (ROW | {"seconds": 0.5 + place}).values())) for place in range(3))]
    put("runs.csv", "\n".join(rows) + "\n")
    put(
        "text/a.jsonl",
        "".join(json.dumps({"text": f"A text of words, number {n}. It ends."}) + "\n" for n in range(50)),
    )
    outcome = {
        "training": [[2, 5.0], [4, 4.5]],
        "validation": [[4, 4.6]],
        "seconds_per_iteration": 0.1,
        "diverged": False,
    }
    with contextlib.chdir(folder):
        for run in grid(parse(CONVERGENCE.split()), []):
            name = f"conv/runs/{run.folder.name}"
            put(f"{name}/result.json", {"command": run.command, "seconds": 1.0} | outcome)
            put(f"{name}/command.json", {"command": run.command})
    log = "".join(
        f" [2026-01-01 00:00:00] iteration {n:8}/{9:8} | consumed samples: {n:12} | elapsed time per iteration (ms): 100.0 "
        f"| learning rate: 1.0E-03 | global batch size: {64:5} | lm loss: 5.0E+00 | loss scale: 1.0 | "
        "number of skipped iterations:   0 | number of nan iterations:   0 |\n"
        for n in range(1, 10)
    )
    for microbatch in (1, 2):
        run = Run(PANELS[0], "PipeDream-2BW", 64, microbatch)
        put(
            f"sw/{run.name}/run.json",
            {
                "run": {"panel": vars(run.panel)} | {"system": run.system, "batch": 64, "microbatch": microbatch},
                "job": "1",
            },
        )
        status.write(folder / "sw" / run.name / "status.json", status.Outcome("completed", "iteration 9 of 9"))
        put(f"sw/{run.name}/start-0-node-0-a.log", log)
    status.write(
        folder / "st" / "status.json", status.Outcome("completed", "iteration 9 of 9"), job="1", start=0, saved=0
    )
    put("st/start-0-node-0-a.log", log)
    put("ck/latest_checkpointed_iteration.txt", "2")


def files(name: str) -> list[Path]:
    """The files of an input, relative to the inputs' folder."""
    path = _FOLDER[0] / name
    found = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return [each.relative_to(_FOLDER[0]) for each in sorted(found) if each.name not in ("timeline.png", "trace.json")]


def copy_inputs(name: str, folder: Path) -> None:
    source = _FOLDER[0] / name
    if name and source.is_dir():
        shutil.copytree(source, folder / name)
    elif name:
        shutil.copy(source, folder / name)


def content(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


# --- damage ----------------------------------------------------------------------------------------------------------

TYPES = [None, True, "four", "", [], {}, [1, "two"], {"a": 1}, "x" * 300, "naïve"]
NUMBERS = [-1, 0, 1.5, 10**20, 1e300, 10**400]


def structured(path: Path) -> bool:
    return path.suffix in (".json", ".yaml", ".csv") and path.parts[0] != "trace"


def damage(path: Path, kind: str, seed: float) -> None:
    """Damage the file in the current folder."""
    draw, data = random.Random(seed), path.read_bytes()
    if kind == "removed":
        path.unlink()
    elif kind == "folder":
        path.unlink()
        path.mkdir()
    elif structured(path) and kind not in ("cut", "emptied", "flipped", "random", "text"):
        path.write_text(_other_entries(draw, path, kind))
    else:
        at, size = draw.randrange(len(data) + 1), len(data)
        path.write_bytes(
            {
                "cut": data[: min(at, size - 1)],
                "emptied": b"",
                "flipped": data[:at] + bytes(255 - byte for byte in data[at : at + 3]) + data[at + 3 :],
                "random": draw.randbytes(max(size, 100)),
                "text": b"stray words\n",
            }[kind]
        )


def _other_entries(draw: random.Random, path: Path, kind: str) -> str:
    if path.suffix == ".csv":
        return _other_cells(draw, path, kind)
    read, write = (json.loads, json.dumps) if path.suffix == ".json" else (yaml.safe_load, yaml.safe_dump)
    tree = read(path.read_text())
    place, key = draw.choice(list(_places(tree)))
    entry = place[key]
    if kind == "key twice" and isinstance(place, dict):
        place["AGAIN"] = draw.choice(NUMBERS)
        return write(tree).replace("AGAIN", str(key))
    if kind == "key misspelt" and isinstance(place, dict):
        place[f"{key}q"] = place.pop(key)
    elif kind in ("key removed", "key misspelt", "key twice"):
        place.pop(key)
    else:
        values = {"type": TYPES, "number": NUMBERS, "nan": [float("nan"), float("inf"), -float("inf")]}[kind]
        place[key] = draw.choice([each for each in values if each != entry])
    return write(tree)


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    for key, entry in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield tree, key
        if isinstance(entry, (dict, list)):
            yield from _places(entry)


def _other_cells(draw: random.Random, path: Path, kind: str) -> str:
    rows = list(csv.reader(io.StringIO(path.read_text())))
    column, row = draw.randrange(len(rows[0])), draw.randrange(1, len(rows))
    if kind == "key removed":
        rows = [each[:column] + each[column + 1 :] for each in rows]
    elif kind == "key misspelt":
        rows[0][column] += "q"
    elif kind == "key twice":
        rows = [[*each, each[column] + "1" * bool(place)] for place, each in enumerate(rows)]
        rows[0][-1] = rows[0][column]
    else:
        values = {"type": ["four", "", "naïve", "x" * 300], "number": [str(n) for n in NUMBERS], "nan": ["nan", "inf"]}
        rows[row][column] = draw.choice(values[kind])
    return "\n".join(map(",".join, rows)) + "\n"
