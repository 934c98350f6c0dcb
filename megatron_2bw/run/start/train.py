"""megatron-2bw train, evaluate: the entry scripts from a plan, a YAML file and flags,
on one host or on several.

Invariant: a wrong flag is answered before a rank starts, and the status is that of the
first rank that failed.
"""

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
from megatron_2bw.base.command_line import add_options, table_of
from megatron_2bw.base.errors import Parser, UserError, usage_error, whole_number
from megatron_2bw.base.files import read_yaml
from megatron_2bw.mcore.checkpoints.folder import TRACKER
from megatron_2bw.run.flags import quick_check
from megatron_2bw.run.flags.plain_torch import PLAIN_TORCH
from megatron_2bw.run.flags.rule import installed
from megatron_2bw.run.start.plan_file import first_plan
from megatron_2bw.run.start.torchrun import run_ranks, torchrun

TABLES = table_of(__file__)


def main(argv: Sequence[str], prog: str) -> int:
    """megatron-2bw train gpt|bert [PLAN.json|RUN.yaml] [flags]."""
    parser = _parser(
        prog,
        "Trains a GPT or a BERT. Megatron's flags and this project's follow, also in "
        "files of words (@FILE); they take precedence over the file's. Examples: "
        f"{prog} gpt plan.json --train-iters 100 --mock-data | {prog} bert run.yaml | "
        f"{prog} gpt --pipeline-schedule 2bw --pipeline-model-parallel-size 2 ...",
    )
    parser.add_argument(
        "file",
        nargs="?",
        metavar="PLAN.json|RUN.yaml",
        help="of megatron-2bw plan --json, or a YAML file of flags: `num-layers: 24`, "
        "`bf16: true`",
    )
    options, flags = _parsed(parser, argv)
    gpus = None
    if options.file:
        of_file, gpus = _read_file(Path(options.file), options.task, flags)
        flags = merged(of_file, flags)
    return _run(prog, options, flags, gpus)


def evaluate(argv: Sequence[str], prog: str) -> int:
    """megatron-2bw evaluate gpt|bert CKPT [flags]."""
    parser = _parser(
        prog,
        "The validation and test loss of a checkpoint, with its model and tokenizer. "
        f"Megatron's flags follow. Example: {prog} gpt checkpoints --data-path my_text "
        "--split 90,5,5 --eval-iters 100",
    )
    parser.add_argument("file", metavar="CKPT", help="a run's --save")
    options, flags = _parsed(parser, argv)
    folder = options.file
    is_saved = "://" in folder or Path(folder, TRACKER).is_file()
    if not is_saved and "--ckpt-step" not in flags:
        raise UserError(
            f"{folder}: it holds no checkpoint: give the folder that a run has as --save"
        )
    return _run(
        prog, options, [*merged(TABLES["evaluate"], flags), "--load", folder], None
    )


# --- this command's options
# --------------------------------------------------------------------------------------


def _parser(prog: str, meaning: str) -> Parser:
    parser = Parser(prog=prog, description=meaning, allow_abbrev=False)
    parser.add_argument("task", choices=("gpt", "bert"))
    group = parser.add_argument_group(
        "processes; by default the hosts are those of the Slurm step"
    )
    add_options(group, TABLES["options"])
    return parser


def _parsed(
    parser: Parser, argv: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    """This command's options, and the flags of the run. The words before the first flag
    are this command's."""
    step = os.environ if "SLURM_STEP_ID" in os.environ else {}
    if step:
        parser.set_defaults(
            nnodes=step["SLURM_STEP_NUM_NODES"], node_rank=step["SLURM_NODEID"]
        )
    argv = expand_files(argv)
    head = 0
    while head < len(argv) and not argv[head].startswith("-"):
        head += 1
    own, flags = split_by(argv[head:], ["-h", "--help", *TABLES["options"]])
    options = parser.parse_intermixed_args([*argv[:head], *own])
    if step and step["SLURM_STEP_NUM_TASKS"] != step["SLURM_STEP_NUM_NODES"]:
        parser.error("start one task on each node: srun --ntasks-per-node 1")
    if options.nnodes > 1:
        if step and not options.master_addr:
            show = ["scontrol", "show", "hostnames", step["SLURM_STEP_NODELIST"]]
            hosts = subprocess.check_output(show, text=True)
            options.master_addr = hosts.split()[0]
        if options.node_rank is None or not options.master_addr:
            parser.error("--nnodes needs --node-rank and --master-addr: add them")
    return options, flags


# --- files
# --------------------------------------------------------------------------------------


def _read_file(
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
    words = []
    for name, value in content.items():
        if value is None or value is False:
            raise UserError(
                f"{path}: {name}: leave it out, or give the flag on the command line"
            )
        words.append("--" + str(name).removeprefix("--").replace("_", "-"))
        if value is not True:
            values = value if isinstance(value, list) else [value]
            words += map(str, values)
    return words


def flags_of_plan(
    path: Path, content: dict[str, Any], task: str, typed: Sequence[str]
) -> tuple[list[str], int]:
    """The flags of a plan's entries, and its number of GPUs."""
    try:
        plan = first_plan(content)
    except (LookupError, TypeError):
        raise UserError(
            f"{path}: it is no plan of this release: make it with megatron-2bw plan --json"
        ) from None
    if plan.kind != task:
        raise UserError(f"{path}: it is the plan of a {plan.kind}: train {plan.kind}")
    words = list(plan.flags)
    typed_flags = {flag_of(word) for word in typed}
    if "--save" in typed_flags:
        words += plan.save_interval
    if typed_flags.isdisjoint(TABLES["data"]):
        if "--mock-data" not in typed_flags:
            print("> no --data-path: training on mock data, random tokens", flush=True)
        words += plan.mock_data
    return words, plan.gpus


# --- ranks
# --------------------------------------------------------------------------------------


def _run(
    prog: str, options: argparse.Namespace, flags: list[str], gpus: int | None
) -> int:
    """Start the ranks of this host and wait for them; their status."""
    hosts = options.nnodes
    pipeline, batch = _sizes(prog, flags)
    nproc = options.nproc
    if nproc is None:
        nproc = math.ceil(gpus / hosts) if gpus else pipeline
    flags = merged(_without_libraries(flags), flags)
    if line := quick_check.mistake(flags, options.task, nproc * hosts):
        usage_error(prog, line)
    place = []
    if options.rehearse:
        flags = _rehearsed(flags, batch * pipeline // (nproc * hosts))
        nproc = pipeline
        hosts = 1
    elif hosts > 1 or options.master_port:
        address = options.master_addr or "127.0.0.1"
        place = (
            f"--nnodes {hosts} --node-rank {options.node_rank or 0} "
            f"--master-addr {address} --master-port {options.master_port or 29500}"
        ).split()
    command = torchrun(nproc, options.task, *place)
    if options.dry_run:
        return _dry_run(command, flags, nproc * hosts)
    print(f"> hosts: {hosts}, processes on this one: {nproc}", flush=True)
    status = run_ranks(prog, [*command, *flags])
    if options.rehearse and status == 0:
        print("> --rehearse: the job starts and computes; nothing was saved")
    return status


def _rehearsed(flags: list[str], batch: int) -> list[str]:
    """The flags of two iterations on one pipeline, with its part of the batch."""
    kept = []
    for group in groups(flags):
        if not group[0].startswith(tuple(TABLES["left out"])):
            kept += group
    sizes = ["--global-batch-size", str(batch)] if batch else []
    return merged(kept, [*TABLES["rehearse"], *sizes])


def _dry_run(command: list[str], flags: list[str], ranks: int) -> int:
    """Let the entry script check the flags of so many ranks; print the command."""
    script = command[-1]
    world = os.environ | {"WORLD_SIZE": str(ranks), "RANK": "0"}
    check = [sys.executable, script, *flags, "--dry-run"]
    if status := subprocess.call(check, env=world):
        return status
    print(shlex.join([*command, *flags]))
    return 0


def _sizes(prog: str, flags: Sequence[str]) -> tuple[int, int]:
    """The ranks of a pipeline (stages x tensor ranks x context ranks), and the global
    batch size, 0 if not given."""
    parser = Parser(prog=prog, add_help=False, allow_abbrev=False)
    for flag in TABLES["sizes"]:
        parser.add_argument(flag, type=whole_number(1), default=1)
    parser.add_argument("--global-batch-size", type=whole_number(1), default=0)
    sizes, _ = parser.parse_known_args(flags)
    *ranks, batch = vars(sizes).values()
    return math.prod(ranks), batch


def _without_libraries(flags: Sequence[str]) -> list[str]:
    """Flags for GPUs without Transformer Engine or Apex, where their absence would end
    the run; the CPU has neither."""
    if installed("transformer_engine"):
        return [] if installed("apex") else ["--no-gradient-accumulation-fusion"]
    if any(word.startswith("--transformer-impl") for word in flags):
        return []
    return PLAIN_TORCH
