"""The commands of mutations.py with a legal line each, and the files that they read, whole and damaged.

Invariant: a damage depends on the file, its kind and its seed alone.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib
import io
import json
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

from megatron_2bw import cpu
from scripts.list_flags import parser_of
from tests.distributed.training import TINY
from tests.unit.command_lines import dataset
from tests.unit.test_planner_calibrate import ROW
from tests.unit.test_planner_model import LLAMA3

UNREAD = ("timeline.png", "timeline.html", "trace.json", "arguments.txt")  # no command reads what it finds there
_FOLDER: list[Path] = []  # of the inputs, while there are any

RUN = TINY | {"--eval-iters": 1, "--eval-interval": 3, "--train-iters": 4, "--lr-warmup-iters": 1}
RUN |= {"--exit-interval": 2, "--lr-decay-iters": 8, "--global-batch-size": 4, "--pipeline-schedule": "2bw"}
ENTRY = " ".join(f"{flag} {value}" for flag, value in RUN.items())
GPT, BERT, PLAN = "pretrain_gpt_2bw.py", "pretrain_bert_2bw.py", "megatron-2bw-plan"
TINY_MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 127"
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
SEARCH = "--max-global-batch-size 64 --pipeline-model-parallel-size 2,4 --micro-batch-size 1 --recompute none --top 2"
TRAINED = "--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --train-iters 4"
CONVERGENCE = f"tiny --out conv --seeds 1,2 --lr 1e-3,1e-2 -- {TRAINED}"
STATUS = "--file st/status.json --job 1 --start 0 --checkpoints ck"
PROFILE = f"profile {TINY_MODEL} --json p.json --microbatches 1,2 --repeats 1 --device cpu --precision fp32"

# How often; what the command reads, and how often that is damaged; a legal line.
TABLE = f"""
20 -            0   {GPT} {ENTRY} --mock-data
6  -            0   {GPT} {ENTRY} --mock-data --bf16 --use-distributed-optimizer --swiglu --tensorboard-dir board
6  -            0   {GPT} {ENTRY} --mock-data --fp16 --initial-loss-scale 1024 --optimizer sgd --two-bw-trace trace
8  data         0.5 {GPT} {ENTRY} --data-path data/gpt --save new --save-interval 2
10 ck           0.6 {GPT} {ENTRY} --mock-data --load ck
4  old          0.6 {GPT} {ENTRY} --mock-data --load old --ckpt-format torch
10 -            0   {BERT} {ENTRY} --mock-data
8  cluster.yaml 0.4 {PLAN} {TINY_MODEL} --cluster cluster.yaml --servers 1 --max-global-batch-size 64 --json p.json
8  config.json  0.6 {PLAN} --model config.json --seq-length 1024 --cluster dgx-a100-80 {SEARCH}
6  profile.json 0.7 {PLAN} {TINY_MODEL} {NO_DROPOUT} --cluster p3.16xlarge --profile profile.json --precision fp32 \
--max-global-batch-size 16 --script run.sh
4  -            0   {PLAN} validate {TINY_MODEL} --cluster p3.16xlarge --gpus-per-server 2 {SEARCH} --device cpu \
--iterations 8 --out val --precision fp32
3  -            0   {PLAN} {PROFILE}
6  -            0   {PLAN} simulate --schedule 2bw --stages 4 --microbatches 8 --iterations 3 --transfer 0.1
6  runs.csv     0.6 {PLAN} calibrate runs.csv --cluster p3.16xlarge --rows 1 --out c.yaml --predictions p.csv
2  -            0   megatron-2bw gpu-check --part reference --minutes 1 --device cpu --json g.json
8  text         0.3 scripts/preprocess_data.py --task gpt --input text/a.jsonl --output-prefix data/new \
--train-tokenizer bpe --vocab-size 300 --workers 1
6  -            0   scripts/convergence.py {CONVERGENCE}
6  conv         0.7 scripts/convergence.py --report-only {CONVERGENCE}
4  -            0   scripts/slurm/sweep.py submit --figure 6 --out sw --dry-run
4  sw           0.7 scripts/slurm/sweep.py collect --out sw --warm-up 1
1  sw           0.7 scripts/slurm/sweep.py status --out sw
3  -            0   megatron_2bw/slurm/flags.py --kind gpt --model gpt-355m --servers 1 --processes 8 --precision bf16
4  plan.json    0.7 megatron_2bw/slurm/flags.py --kind gpt --plan plan.json --servers 1 --processes 8
2  st           0.4 megatron_2bw/slurm/status.py start {STATUS}
2  st           0.4 megatron_2bw/slurm/status.py end {STATUS}
2  st           0.7 megatron_2bw/slurm/status.py show st
2  trace        0.8 megatron_2bw.timelines.trace trace
1  -            0   scripts/demo.py --iterations 4 --schedule gpipe --out demo
"""

# Flags and files without which the result of the lines above is the same, and why.
INERT = {
    "--checkpoints": "a job's first start has no such folder yet",
    "--data": "of spaces only is that of none",
    "--extra-warmup": "0 is none",
    "--input-format": "auto is the default",
    "--max-position-embeddings": "the planner takes it with Megatron's other flags; the sequence says it",
    "--no-check-for-nan-in-loss-and-grad": "Megatron sets it with a dynamic loss scale",
    "--no-distributed-optimizer": "the best plan has none",
    "--no-extra-warmup": "the best plan has none",
    "--no-masked-softmax-fusion": "a default on the CPU",
    "--no-sequence-parallel": "the best plan has none",
    "--no-uneven-stages": "the best plan has none",
    "--precision": "that of the profile, or of the plan, is the default",
    "--workers": "the same files by any number of processes",
    "st/status.json": "its other entries are for later starts",
}

MODULES = {
    PLAN: "megatron_2bw.planner.cli",
    "megatron-2bw": "megatron_2bw.cli",
    "scripts/preprocess_data.py": "megatron_2bw.data.preprocess_cli",
}  # of commands without a module of their own name


@dataclass(frozen=True)
class Command:
    """`share` and `damaged` are how often it is drawn, and with a damaged file; `reads` its file or folder, or "-"."""

    share: int
    reads: str
    damaged: float
    program: str
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        command = [self.words[0]] if self.words[0].isidentifier() and self.words[0] != self.reads else []
        return " ".join([self.program, *command, *[f"({self.reads})"] * (self.reads != "-")])

    @property
    def trains(self) -> bool:
        """Whether Megatron's arguments say what the line settles; else what it prints and writes does."""
        return self.program in (GPT, BERT)

    def call(self, words: list[str]) -> int | None:
        sys.argv = [self.program, *words]
        if self.trains:
            from megatron_2bw.start.launch import launch

            return launch(f"megatron_2bw.tasks.{'gpt' if self.program == GPT else 'bert'}")
        if self.program == "megatron-2bw":  # it asks for GPUs, in whose place the CPU stands here
            cpu.uninstall()
        module = MODULES.get(self.program, self.program.removesuffix(".py").replace("/", "."))
        return importlib.import_module(module).main()


def command(row: str) -> Command:
    share, reads, damaged, program, *words = row.split()
    return Command(int(share), reads, float(damaged), program, tuple(words))


COMMANDS = tuple(map(command, TABLE.strip().splitlines()))


def actions(command: Command) -> dict[str, argparse.Action]:
    """The command's flags and their actions."""
    if command.trains:
        from megatron.training.arguments import add_megatron_arguments

        from megatron_2bw.flags.parse import parse_early, prepare

        early = parse_early(["--pipeline-schedule", "2bw"], sys.exit)
        parser = prepare(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)), early, sys.exit)
    else:
        parser = parser_of(lambda: command.call(command.words), [])
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            parser = action.choices[command.words[0]]
    return {flag: action for action in parser._actions for flag in action.option_strings if flag[:2] == "--"}


def settled(output: str) -> str:
    """Megatron's arguments after the rules and its own validation, and the losses."""
    from megatron.training import global_vars

    args = global_vars._GLOBAL_ARGS
    return (
        masked(repr(sorted(vars(args).items()))) + repr(re.findall(r"loss[\w ]*: \S+", output)) if args else "nothing"
    )


def masked(text: str) -> str:
    """Without addresses, times and process ids."""
    return re.sub(
        r"0x[0-9a-f]{6,}|\d+(\.\d+)? ?(s|ms|MB/s)\b|\d\d:\d\d:\d\d(\.\d+)?|\d{4}-\d\d-\d\d|port=\d+", "#", text
    )


# --- the files -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    """While the block runs there are the files that the commands read."""
    import megatron_2bw.start.preload  # noqa: F401
    from tests.distributed import mutations

    with tempfile.TemporaryDirectory(prefix="mutations_") as name:
        folder = Path(name)
        _FOLDER[:] = [folder]
        _write(folder)
        for row, *kept in (
            (f"{GPT} {ENTRY} --mock-data --save ck --save-interval 2 --two-bw-trace trace", "ck", "trace"),
            (f"{GPT} {ENTRY} --mock-data --save old --save-interval 2 --ckpt-format torch", "old"),
            (f"{PLAN} --model gpt-355m --cluster p3.16xlarge {SEARCH} --json plan.json --precision fp16", "plan.json"),
            (f"{PLAN} {PROFILE} {NO_DROPOUT}", "p.json"),
        ):
            ending = mutations.run(mutations.legal(command(f"1 - 0 {row}")), folder)
            assert ending.status == 0 and all((folder / each).exists() for each in kept), ending.output
        (folder / "p.json").rename(folder / "profile.json")
        for path in folder.rglob(".owner.json"):
            path.unlink()
        try:
            yield
        finally:
            _FOLDER.clear()


def _write(folder: Path) -> None:
    from megatron_2bw.convergence.options import grid, parse
    from megatron_2bw.models.cluster import PRESETS, to_yaml
    from megatron_2bw.slurm import status
    from scripts.paper_data import Run, panels

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
        f" iteration {n:8}/{9:8} | consumed samples: {n:12} | elapsed time per iteration (ms): 100.0 | learning rate: "
        f"1.0E-03 | global batch size: {64:5} | lm loss: 5.0E+00 | number of skipped iterations:   0 |\n"
        for n in range(1, 10)
    )
    for microbatch in (1, 2):
        run = Run(panels("6")[0], "PipeDream-2BW", 64, microbatch)
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
    return [each.relative_to(_FOLDER[0]) for each in sorted(found) if each.name not in UNREAD]


def copy_inputs(name: str, folder: Path) -> None:
    source = _FOLDER[0] / name
    if source.is_dir():
        shutil.copytree(source, folder / name)
    elif source.exists():
        shutil.copy(source, folder / name)


def content(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


# --- damage ----------------------------------------------------------------------------------------------------------

TYPES = [None, True, "four", "", [], {}, [1, "two"], {"a": 1}, "x" * 300, "naïve"]
NUMBERS = [-1, 0, 1.5, 10**20, 1e300, 10**400]


def structured(path: Path) -> bool:
    """Whether its entries may be others. Of metadata.json Megatron reads one."""
    return path.suffix in (".json", ".yaml", ".csv") and path.parts[0] != "trace" and path.name != "metadata.json"


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
        at, size = draw.randrange(max(1, len(data))), len(data)
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
