"""megatron-2bw train, evaluate: the entry scripts from a plan, a YAML file and flags,
on one host or on several.

Invariant: a wrong flag is answered before a rank starts, and the status is that of the
first rank that failed.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_2bw.base.argv import expand_files, flag_of, groups, merged, split_by
from megatron_2bw.base.errors import Parser, UserError, usage_error, whole
from megatron_2bw.base.files import read_yaml
from megatron_2bw.mcore.checkpoints.folder import TRACKER
from megatron_2bw.run.flags import quick_check
from megatron_2bw.run.flags.plain_torch import PLAIN_TORCH
from megatron_2bw.run.flags.rule import installed
from megatron_2bw.run.start.torchrun import run_ranks, torchrun

SIZES = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
)
OWN = (
    "-h --help --nproc --nnodes --node-rank --master-addr --master-port --dry-run "
    "--rehearse"
).split()
FILE = "of megatron-2bw plan --json, or a YAML file of flags: `num-layers: 24`, `bf16: true`"
DATA = (
    "--data-path",
    "--train-data-path",
    "--data-args-path",
    "--per-split-data-args-path",
)
# What --rehearse changes, and the beginnings of what it leaves out.
REHEARSE = "--device cpu --exit-interval 2 --log-interval 1 --eval-interval 2 --eval-iters 1".split()
LEFT_OUT = (
    "--save",
    "--async-save",
    "--tensorboard",
    "--wandb",
    "--two-bw-trace",
    "--exit-duration-in-mins",
)

EVALUATE = (
    "--skip-train --use-checkpoint-args --no-load-optim --no-load-rng "
    "--micro-batch-size 4 --train-iters 1 --lr 1e-5 "
    "--eval-iters 10 --eval-interval 1"
).split()


def main(argv: Sequence[str], prog: str) -> int:
    """megatron-2bw train gpt|bert [PLAN.json|RUN.yaml] [flags]."""
    meaning = (
        "Trains a GPT or a BERT. Megatron's flags and this project's follow, "
        "also in files of words (@FILE); they take "
        f"precedence over the file's. Examples: {prog} gpt plan.json "
        f"--train-iters 100 --mock-data | {prog} bert "
        f"run.yaml | {prog} gpt --pipeline-schedule 2bw --pipeline-model-parallel-size 2 ..."
    )
    known, typed = _parsed(
        argv, prog, meaning, nargs="?", metavar="PLAN.json|RUN.yaml", help=FILE
    )
    words, gpus = (
        _of_file(Path(known.file), known.task, typed) if known.file else ([], None)
    )
    return _run(prog, known, merged(words, typed), gpus)


def evaluate(argv: Sequence[str], prog: str) -> int:
    """megatron-2bw evaluate gpt|bert CKPT [flags]."""
    meaning = (
        "The validation and test loss of a checkpoint, with its model and "
        "tokenizer. Megatron's flags "
        f"follow. Example: {prog} gpt checkpoints --data-path my_text --split "
        "90,5,5 --eval-iters 100"
    )
    known, typed = _parsed(argv, prog, meaning, metavar="CKPT", help="a run's --save")
    if (
        "://" not in known.file
        and not Path(known.file, TRACKER).is_file()
        and "--ckpt-step" not in typed
    ):
        raise UserError(
            f"{known.file}: it holds no checkpoint: give the folder that a run has as --save"
        )
    return _run(prog, known, [*merged(EVALUATE, typed), "--load", known.file], None)


def _parsed(
    argv: Sequence[str], prog: str, meaning: str, **file: Any
) -> tuple[argparse.Namespace, list[str]]:
    """This command's options, and the flags of the run. The words before the first flag
    are this command's.

    file: of the argument after the task
    """
    step = os.environ if "SLURM_STEP_ID" in os.environ else {}
    parser = Parser(prog=prog, description=meaning, allow_abbrev=False)
    parser.add_argument("task", choices=("gpt", "bert"))
    parser.add_argument("file", **file)
    add = parser.add_argument_group(
        "processes; by default the hosts are those of the Slurm step"
    ).add_argument
    ranks = "ranks on each host (default: of the plan, or stages x tensor ranks x context ranks)"
    add("--nproc", type=whole(1), metavar="N", help=ranks)
    add(
        "--nnodes",
        type=whole(1),
        metavar="N",
        default=step.get("SLURM_STEP_NUM_NODES", "1"),
        help="hosts",
    )
    add(
        "--node-rank",
        type=whole(0),
        metavar="N",
        default=step.get("SLURM_NODEID"),
        help="number of this host",
    )
    add("--master-addr", metavar="HOST", help="the first host")
    add(
        "--master-port",
        type=whole(1, 65535),
        metavar="N",
        help="on it (default: 29500)",
    )
    add(
        "--dry-run",
        action="store_true",
        help="check all as GPUs would, print torchrun's command, and start nothing",
    )
    add(
        "--rehearse",
        action="store_true",
        help="two iterations of one pipeline on this host's CPUs; saves nothing",
    )
    argv = expand_files(argv)
    head = next((at for at, word in enumerate(argv) if word.startswith("-")), len(argv))
    own, typed = split_by(argv[head:], OWN)
    known = parser.parse_intermixed_args([*argv[:head], *own])
    if step and step["SLURM_STEP_NUM_TASKS"] != step["SLURM_STEP_NUM_NODES"]:
        parser.error("start one task on each node: srun --ntasks-per-node 1")
    if known.nnodes > 1 and step:
        show = ["scontrol", "show", "hostnames", step["SLURM_STEP_NODELIST"]]
        known.master_addr = (
            known.master_addr or subprocess.check_output(show, text=True).split()[0]
        )
    if known.nnodes > 1 and (known.node_rank is None or not known.master_addr):
        parser.error("--nnodes needs --node-rank and --master-addr: add them")
    return known, typed


def _of_file(
    path: Path, task: str, typed: Sequence[str]
) -> tuple[list[str], int | None]:
    """The flags of a plan and its number of GPUs, or the flags of a YAML file.
    UserError if it is neither."""
    content = read_yaml(path)  # JSON is YAML
    if not isinstance(content, dict):
        raise UserError(
            f"{path}: it is neither a plan of megatron-2bw plan --json nor a YAML file of flags"
        )
    if "plans" in content:
        return flags_of_plan(path, content, task, typed)
    return flags_of_file(path, content), None


def flags_of_file(path: Path, content: dict[str, Any]) -> list[str]:
    """The flags of a YAML file's entries."""
    words: list[str] = []
    for name, value in content.items():
        if value is None or value is False:
            raise UserError(
                f"{path}: {name}: leave it out, or give the flag on the command line"
            )
        flag = "--" + str(name).removeprefix("--").replace("_", "-")
        words += [
            flag,
            *(
                []
                if value is True
                else map(str, value if isinstance(value, list) else [value])
            ),
        ]
    return words


def flags_of_plan(
    path: Path, content: dict[str, Any], task: str, typed: Sequence[str]
) -> tuple[list[str], int]:
    """The flags of a plan's entries, and its number of GPUs."""
    try:
        kind, run, plan = content["model"]["kind"], content["run"], content["plans"][0]
        words = [
            str(word) for word in (*run["model"], *plan["flags"], *plan["training"])
        ]
        data, save = (
            list(map(str, run["data"])),
            ["--save-interval", str(plan["save_interval"])],
        )
        gpus = plan["tensor"] * plan["context"] * plan["depth"] * plan["width"]
    except (LookupError, TypeError):
        raise UserError(
            f"{path}: it is no plan of this release: make it with megatron-2bw plan --json"
        ) from None
    if kind != task:
        raise UserError(f"{path}: it is the plan of a {kind}: train {kind}")
    if "--save" in map(flag_of, typed):
        words += save
    if not {*DATA} & {*map(flag_of, typed)}:
        if "--mock-data" not in typed:
            print("> no --data-path: training on mock data, random tokens", flush=True)
        words += data
    return words, gpus


def _run(
    prog: str, known: argparse.Namespace, flags: list[str], gpus: int | None
) -> int:
    """Start the ranks of this host and wait for them; their status."""
    hosts, (pipeline, batch) = known.nnodes, _sizes(prog, flags)
    nproc = known.nproc or (-(-gpus // hosts) if gpus else pipeline)
    flags = merged(_without_libraries(flags), flags)
    if line := quick_check.mistake(flags, known.task, nproc * hosts):
        usage_error(prog, line)
    several: list[str] = []
    if known.rehearse:
        fewer = (
            ["--global-batch-size", str(batch * pipeline // (nproc * hosts))]
            if batch
            else []
        )
        kept = [
            word
            for flag in groups(flags)
            if not flag[0].startswith(LEFT_OUT)
            for word in flag
        ]
        flags = merged(kept, [*REHEARSE, *fewer])
        nproc, hosts = pipeline, 1
    elif hosts > 1 or known.master_port:
        place = (
            f"--nnodes {hosts} --node-rank {known.node_rank or 0} --master-addr "
            f"{known.master_addr or '127.0.0.1'}"
        )
        several = f"{place} --master-port {known.master_port or 29500}".split()
    command = torchrun(nproc, known.task, *several)
    if known.dry_run:
        world = os.environ | {"WORLD_SIZE": str(nproc * hosts), "RANK": "0"}
        if status := subprocess.call(
            [sys.executable, command[-1], *flags, "--dry-run"], env=world
        ):
            return status
        print(shlex.join([*command, *flags]))
        return 0
    print(
        f"> {nproc} process{'es' * (nproc > 1)} on this host"
        + f", {hosts} hosts" * (hosts > 1),
        flush=True,
    )
    status = run_ranks(prog, [*command, *flags])
    if known.rehearse and status == 0:
        print("> --rehearse: the job starts and computes; nothing was saved")
    return status


def _sizes(prog: str, flags: Sequence[str]) -> tuple[int, int]:
    """The ranks of a pipeline (stages x tensor ranks x context ranks), and the global
    batch size, 0 if not given."""
    sizes = Parser(prog=prog, add_help=False, allow_abbrev=False)
    for flag in SIZES:
        sizes.add_argument(flag, type=whole(1), default=1)
    sizes.add_argument("--global-batch-size", type=whole(1), default=0)
    *ranks, batch = vars(sizes.parse_known_args(flags)[0]).values()
    return math.prod(ranks), batch


def _without_libraries(flags: Sequence[str]) -> list[str]:
    """Flags for GPUs without Transformer Engine or Apex, where their absence would end
    the run; the CPU has neither."""
    if installed("transformer_engine"):
        return [] if installed("apex") else ["--no-gradient-accumulation-fusion"]
    return (
        []
        if any(word.startswith("--transformer-impl") for word in flags)
        else PLAIN_TORCH
    )
