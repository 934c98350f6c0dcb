"""megatron-2bw train, evaluate: the entry scripts from a plan, a YAML file and flags, on one host or on several.

Invariant: a wrong flag is answered before a rank starts, and the status is that of the first rank that failed.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_2bw.errors import Parser, UserError, usage_error
from megatron_2bw.files import read_yaml
from megatron_2bw.flags import early
from megatron_2bw.flags.own import whole
from megatron_2bw.flags.rule import installed
from megatron_2bw.start.torchrun import PLAIN_TORCH, run_ranks, torchrun
from megatron_2bw.words import expand_files, flag_of, merged, split_by

SIZES = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size")
OWN = ("-h", "--help", "--nproc", "--nnodes", "--node-rank", "--master-addr", "--master-port", "--dry-run")
DRIVERS = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # of NVIDIA, of WSL, of AMD
DATA = ("--data-path", "--train-data-path", "--data-args-path", "--per-split-data-args-path")

EVALUATE = (
    "--skip-train --use-checkpoint-args --no-load-optim --no-load-rng --micro-batch-size 4 --train-iters 1 --lr 1e-5 "
    "--eval-iters 10 --eval-interval 1"
).split()


def main(argv: Sequence[str], prog: str) -> int:
    """megatron-2bw train gpt|bert [PLAN.json|RUN.yaml] [flags]."""
    meaning = (
        "Trains a GPT or a BERT. Megatron's flags and this project's follow; they take precedence over the "
        f"file's. Examples: {prog} gpt plan.json --train-iters 100 --mock-data | {prog} bert run.yaml | "
        f"{prog} gpt --pipeline-schedule 2bw --pipeline-model-parallel-size 2 ..."
    )
    help = "of megatron-2bw plan --json, or a YAML file of flags: `num-layers: 24`, `bf16: true`"
    known, typed = _parsed(argv, prog, meaning, nargs="?", type=Path, metavar="PLAN.json|RUN.yaml", help=help)
    words, gpus = _of_file(known.file, known.task, typed) if known.file else ([], None)
    return _run(prog, known, merged(words, typed), gpus)


def evaluate(argv: Sequence[str], prog: str) -> int:
    """megatron-2bw evaluate gpt|bert CKPT [flags]."""
    meaning = (
        "The validation and test loss of a checkpoint, with its model and tokenizer. Megatron's flags "
        f"follow. Example: {prog} gpt checkpoints --data-path my_text --split 90,5,5 --eval-iters 100"
    )
    known, typed = _parsed(argv, prog, meaning, metavar="CKPT", help="a run's --save")
    if not known.file or "--load" in map(flag_of, typed):
        usage_error(prog, "CKPT is the checkpoint to load: name its folder, and leave --load out")
    return _run(prog, known, merged([*EVALUATE, "--load", known.file], typed), None)


def _parsed(argv: Sequence[str], prog: str, meaning: str, **file: Any) -> tuple[argparse.Namespace, list[str]]:
    """This command's options, and the flags of the run. The words before the first flag are this command's.

    file: of the argument after the task
    """
    parser = Parser(prog=prog, description=meaning, allow_abbrev=False)
    parser.add_argument("task", choices=("gpt", "bert"))
    parser.add_argument("file", **file)
    add = parser.add_argument_group("processes").add_argument
    ranks = "ranks on each host (default: of the plan, or stages x tensor ranks x context ranks)"
    add("--nproc", type=whole(1), metavar="N", help=ranks)
    add("--nnodes", type=whole(1), metavar="N", help="hosts (default: of the Slurm step, or 1)")
    add("--node-rank", type=whole(0), metavar="N", help="number of this host (default: of the Slurm step)")
    add("--master-addr", metavar="HOST", help="the first host (default: of the Slurm step)")
    add("--master-port", type=whole(1, 65535), metavar="N", help="of several hosts (default: 29500)")
    add("--dry-run", action="store_true", help="print torchrun's command, and start nothing")
    argv = expand_files(argv)
    head = next((at for at, word in enumerate(argv) if word.startswith("-")), len(argv))
    own, typed = split_by(argv[head:], OWN)
    return parser.parse_intermixed_args([*argv[:head], *own]), typed


def _of_file(path: Path, task: str, typed: Sequence[str]) -> tuple[list[str], int | None]:
    """The flags of a plan, or of a YAML file, and the plan's number of GPUs. UserError if it is neither."""
    content = read_yaml(path)  # JSON is YAML
    if isinstance(content, dict) and "plans" in content:
        return _of_plan(path, content, task, typed)
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise UserError(f"{path}: it is neither a plan of megatron-2bw plan --json nor a YAML file of flags")
    words: list[str] = []
    for name, value in content.items():
        flag = "--" + name.removeprefix("--").replace("_", "-")
        if value is None or value is False or value == [] or flag in OWN:
            raise UserError(f"{path}: {name}: leave it out, or give the flag on the command line")
        words += [flag, *([] if value is True else map(str, value if isinstance(value, list) else [value]))]
    return words, None


def _of_plan(path: Path, content: dict[str, Any], task: str, typed: Sequence[str]) -> tuple[list[str], int | None]:
    try:
        kind, run, plan = content["model"]["kind"], content["run"], content["plans"][0]
        words = [str(word) for word in (*run["model"], *plan["flags"], *plan["training"])]
        data, save = list(map(str, run["data"])), ["--save-interval", str(plan["save_interval"])]
        gpus = plan["tensor"] * plan["depth"] * plan["width"]
    except (KeyError, IndexError, TypeError):
        raise UserError(f"{path}: it is no plan of this release: make it again with megatron-2bw plan --json") from None
    if kind != task:
        raise UserError(f"{path}: it is the plan of a {kind}: train {kind}")
    if "--save" in map(flag_of, typed):
        words += save
    if not {*DATA} & {*map(flag_of, typed)}:
        if "--mock-data" not in typed:
            print("> no --data-path: training on mock data, random tokens", flush=True)
        words += data
    return words, gpus


def _hosts(prog: str, known: argparse.Namespace) -> tuple[int, list[str]]:
    """The number of hosts, and torchrun's options for several, as typed or of the Slurm step."""
    step = os.environ if "SLURM_STEP_ID" in os.environ and known.nnodes is None else {}
    nnodes, rank, first = known.nnodes or int(step.get("SLURM_STEP_NUM_NODES", "1")), known.node_rank, known.master_addr
    if step and step["SLURM_STEP_NUM_TASKS"] != str(nnodes):
        usage_error(prog, "start one task on each node: srun --ntasks-per-node 1")
    if nnodes == 1:
        return 1, []
    if step:
        rank = int(step["SLURM_NODEID"]) if rank is None else rank
        show = ["scontrol", "show", "hostnames", step["SLURM_STEP_NODELIST"]]
        first = first or subprocess.run(show, capture_output=True, text=True, check=True).stdout.split()[0]
    if rank is None or not first:
        usage_error(prog, "--nnodes needs --node-rank and --master-addr: add them")
    place = f"--master-addr {first} --master-port {known.master_port or 29500}"
    return nnodes, f"--nnodes {nnodes} --node-rank {rank} {place}".split()


def _run(prog: str, known: argparse.Namespace, flags: list[str], gpus: int | None) -> int:
    """Start the ranks of this host and wait for them; their status."""
    nnodes, several = _hosts(prog, known)
    nproc = known.nproc or (-(-gpus // nnodes) if gpus else _product(flags))
    flags = merged(_without_libraries(flags), flags)
    if line := early.mistake(flags, known.task, nproc * nnodes):
        usage_error(prog, line)
    command = [*torchrun(nproc, known.task, *several), *flags]
    if known.dry_run:
        print(shlex.join(command))
        return 0
    print(f"> {nproc} process{'es' * (nproc > 1)} on this host" + f", {nnodes} hosts" * (nnodes > 1), flush=True)
    return run_ranks(prog, command)


def _product(flags: Sequence[str]) -> int:
    """Stages x tensor ranks x context ranks; a word that is no number is reported later."""
    sizes = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in SIZES:
        sizes.add_argument(flag, type=int, default=1)
    try:
        return max(1, math.prod(vars(sizes.parse_known_args(flags)[0]).values()))
    except argparse.ArgumentError:
        return 1


def _without_libraries(flags: Sequence[str]) -> list[str]:
    """Flags for a GPU host without Transformer Engine or Apex, where their absence would end the run."""
    if not any(map(os.path.exists, DRIVERS)) or any(word.startswith("--transformer-impl") for word in flags):
        return []
    if not installed("transformer_engine"):
        print(f"> without Transformer Engine: {' '.join(PLAIN_TORCH)}", flush=True)
        return PLAIN_TORCH
    return [] if installed("apex") else ["--no-gradient-accumulation-fusion"]
