"""Measures the paper's figures (scripts/paper.yaml) on a Slurm cluster: jobs, then a
table of their speeds.

Invariant: every submitted run has a row, with the word of its status file.

    python scripts/slurm/sweep.py submit --figure 6 --out out/figure6 --dry-run
    python scripts/slurm/sweep.py submit --figure 6 --out out/figure6  # what is missing
    python scripts/slurm/sweep.py status --out out/figure6
    python scripts/slurm/sweep.py collect --out out/figure6            # sweep.csv
    python scripts/paper.py --figure 6 --collect out/figure6
"""

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from operator import attrgetter, itemgetter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.tables import table
from megatron_2bw.base import run_log
from megatron_2bw.base.argv import split_flags
from megatron_2bw.base.errors import Parser, UserError, list_of, run_program
from megatron_2bw.base.files import set_aside, write_csv, write_json
from megatron_2bw.run.start.torchrun import ROOT
from megatron_2bw.tools.planner.descriptions import cluster
from megatron_2bw.tools.planner.descriptions.cluster_file import named_cluster
from megatron_2bw.tools.planner.descriptions.inputs import numbers
from megatron_2bw.tools.planner.descriptions.model import PRESETS
from megatron_2bw.tools.slurm import status
from scripts.paper_data import FIRST, PAPER, SYSTEMS, Panel, PaperRun, Row, grid, panels

COLUMNS = """
    figure model system schedule servers gpus tensor depth width microbatch recompute round batch status reason
    samples_per_second ms_per_iteration iterations peak_memory_gib validation_loss job run
""".split()
WARM_UP = 10  # iterations that are not counted
PLACE = ("figure", "model", "gpus", "batch", "system")


def on_cluster(own: Sequence[Panel], name: str) -> list[Panel]:
    """The panels with as many GPUs of the planner's cluster `name`; those for which it
    is too small are left out."""
    servers = named_cluster(name)
    each = servers.gpus_per_server
    most = math.inf
    where = name
    if name not in cluster.PRESETS:
        most = servers.gpus
        where = str(Path(name).resolve())
    fitting = []
    for panel in own:
        if panel.gpus > most:
            sizes = f"it needs {panel.gpus} GPUs, {name} has {most}"
            print(f"sweep.py: {panel.figure} is left out: {sizes}", file=sys.stderr)
            continue
        count = math.ceil(panel.gpus / each)
        local = min(each, panel.gpus)
        fitting.append(
            replace(panel, cluster=where, servers=count, gpus_per_server=local)
        )
    return fitting


def sbatch(
    run: PaperRun, folder: Path, options: Namespace
) -> tuple[dict[str, str], list[str]]:
    """(variables, command) of a job: short, without checkpoints, ended by its first
    error; or a whole training."""
    panel = run.panel
    kind = PRESETS[panel.model].kind
    precision = panel.precision or options.precision
    variables = {
        "MODEL": panel.model,
        "PLAN": "",
        "PRECISION": precision,
        "CHECKPOINTS": "none",
        "PROCESSES_PER_NODE": str(panel.gpus_per_server),
        "RESTARTS": "0",
        "MEGATRON_2BW": str(ROOT),
        "LOGS": str(folder),
    }
    command = f"sbatch --parsable --job-name={run.name} --nodes={panel.servers}"
    if not options.cpu:
        command += f" --gpus-per-node={panel.gpus_per_server}"
    iterations = panel.iterations or options.train_iters
    training = f"--train-iters {iterations} --lr {PAPER['training']['lr']}"
    if panel.iterations:
        prefix = options.out / f"openwebtext-{kind}"
        variables["DATA_ARGS"] = f"--data-path {prefix} {PAPER['data'][kind]}"
        variables["CHECKPOINTS"] = str(folder / "checkpoints")
        variables["RESTARTS"] = "3"
        training += " " + PAPER["training"]["flags"]
    else:
        command += " --time=15 --no-requeue"
        training += " --eval-iters 0 --log-interval 1"
    words = [*command.split(), f"--output={folder / 'batch.log'}"]
    words += shlex.split(options.sbatch)
    words.append(str(ROOT / "scripts" / "slurm" / f"pretrain_{kind}_2bw.sbatch"))
    words += run.plan.flags(precision)
    # what the user gives comes last
    return variables, [*words, *training.split(), *panel.flags, *options.flags]


def submit(options: Namespace) -> None:
    """Submit the runs that are missing or have failed; run.json in a run's folder
    records its job."""
    own = options.panels
    if options.cluster:
        own = on_cluster(own, options.cluster)
    before = stored(options.out) if options.dry_run else _refresh(options.out)
    words = {}
    for run, _, folder in before:
        words[run.name] = _state(folder).get("status")
    runs = []
    for run in grid(own, options.systems, options.micro_batch_size):
        # out of memory is a result
        if words.get(run.name) in (None, "failed", "timeout"):
            runs.append(run)
    if options.dry_run:
        for run in runs:
            variables, command = sbatch(run, options.out / run.name, options)
            for name, value in variables.items():
                print(f"{name}={shlex.quote(value)}", end=" ")
            print(shlex.join(command))
        return
    for number, run in enumerate(runs, 1):
        job = _submit(run, options)
        print(f"{number}/{len(runs)} {run.name}: job {job}", flush=True)
    again = f"python scripts/slurm/sweep.py status --out {options.out}"
    print(f"submitted {len(runs)} runs; {again}")


def _submit(run: PaperRun, options: Namespace) -> str:
    """The job's number. Raises UserError."""
    folder = options.out / run.name
    variables, command = sbatch(run, folder, options)
    set_aside(folder)
    status.write(folder / "status.json", status.Outcome("pending", "submitted"))
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | variables,
        start_new_session=True,  # a terminal's Ctrl-C does not reach sbatch
    )
    if done.returncode:
        why = " ".join(done.stderr.split())
        raise UserError(f"sbatch does not take {run.name}: {why}")
    job = done.stdout.strip().split(";")[0]
    write_json(folder / "run.json", {"run": asdict(run), "job": job})
    return job


def _state(folder: Path) -> Row:
    return status.read(folder / "status.json")


def stored(out: Path) -> list[tuple[PaperRun, str, Path]]:
    """(run, job, folder) of all submitted runs, without earlier tries."""
    runs = []
    for path in sorted(out.glob("*/run.json")):
        content = json.loads(path.read_text())
        fields = content["run"]
        fields |= {"panel": Panel.of(fields["panel"]), "reading": FIRST}
        run = PaperRun(**fields)
        if run.name == path.parent.name:
            runs.append((run, str(content["job"]), path.parent))
    return runs


def _refresh(out: Path) -> list[tuple[PaperRun, str, Path]]:
    """`stored`, after the status files of dead jobs are corrected."""
    runs = stored(out)
    for _, job, folder in runs:
        status.current(folder / "status.json", job)
    return runs


def show(options: Namespace) -> None:
    counts = Counter()
    for run, job, folder in _refresh(options.out):
        state = _state(folder)
        counts[state["status"]] += 1
        print(f"{run.name} (job {job}): {state['status']}, {state['reason']}")
    texts = [f"{counts[word]} {word}" for word in status.WORDS if counts[word]]
    print(", ".join(texts) or f"nothing in {options.out}")


def rows(out: Path, warm_up: int = WARM_UP) -> list[Row]:
    """A row for each run; its speed only if it completed."""
    table_rows = []
    for run, job, folder in _refresh(out):
        state = _state(folder)
        row = dict.fromkeys(COLUMNS, "") | run.row()
        row |= {"job": job, "run": run.name}
        row |= {"status": state["status"], "reason": state["reason"]}
        if state["status"] == "completed":
            text = ""
            for path in sorted(folder.glob("start-*-node-*.log")):
                text += path.read_text(errors="replace") + "\n"
            row |= measured(text, warm_up)
        table_rows.append(row)
    return table_rows


def measured(text: str, warm_up: int) -> Row:
    """Speed from Megatron's log lines after `warm_up` iterations; empty if there is
    none."""
    times = []
    memory = 0.0
    before = 0
    for line in run_log.training(text):
        size = line.fields.get("global batch size")
        if line.milliseconds is None or size is None:  # cut off
            continue
        if before >= warm_up:
            times += [line.milliseconds] * (line.iteration - before)
        before = line.iteration
        batch = int(size)
        memory = max(memory, *line.stage_memory, 0.0)
    if not times:
        return {}
    mean = sum(times) / len(times)
    loss = ""
    for line in run_log.validations(text):
        if line.loss is not None:
            loss = line.loss
    return {
        "samples_per_second": round(1000 * batch / mean, 3),
        "ms_per_iteration": round(mean, 3),
        "iterations": len(times),
        "peak_memory_gib": memory or "",
        "validation_loss": loss,
    }


def speed(row: Row) -> float:
    return row["samples_per_second"] or 0.0


def collect(options: Namespace) -> None:
    """Write sweep.csv, and print each system's fastest microbatch, or the word of its
    run."""
    entries = rows(options.out, options.warm_up)
    if not entries:
        raise UserError(f"--out {options.out}: nothing was submitted to it")
    write_csv(options.out / "sweep.csv", entries)
    place = itemgetter(*PLACE)
    columns = (*PLACE, "microbatch", "samples_per_second", "status")
    fastest = {}
    for entry in sorted(entries, key=speed):
        fastest[place(entry)] = {name: entry[name] for name in columns}
    print(table([fastest[key] for key in sorted(fastest)]))
    print(f"wrote {options.out}/sweep.csv ({len(entries)} runs)")


def parse(words: Sequence[str]) -> Namespace:
    words, flags = split_flags(words)
    parser = Parser(
        prog="sweep.py", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True)
    for name, function in (("submit", submit), ("status", show), ("collect", collect)):
        command = commands.add_parser(name, allow_abbrev=False)
        command.set_defaults(function=function, flags=flags)
        command.add_argument("--out", type=Path, required=True, metavar="DIR")
        if function is submit:
            _add_submit_flags(command)
        if function is collect:
            meaning = "iterations not counted (10)"
            command.add_argument("--warm-up", type=int, default=WARM_UP, help=meaning)
    options = parser.parse_args(words)
    options.out = options.out.resolve()
    if options.function is submit:
        _choose_panels(options, parser)
    elif flags:
        parser.error(f"{flags[0]}: Megatron's flags go with submit")
    return options


def _add_submit_flags(command: argparse.ArgumentParser) -> None:
    command.epilog = "Words after -- are Megatron's flags for every run."
    figures = [name for name in PAPER["figures"] if panels(name)]
    systems = tuple(SYSTEMS)
    option = command.add_argument
    option("--figure", choices=figures, help="of the paper (scripts/paper.yaml)")
    option("--cluster", help="of the planner: the figure's GPUs on its servers")
    option("--model", choices=PRESETS, help="instead of a figure, with the next four")
    option("--nodes", type=int, help="servers of a job")
    option("--gpus-per-node", type=int, help="with --cpu: processes")
    option(
        "--model-parallel-size",
        type=int,
        help="GPUs for a copy of the model: stages or tensor ranks",
    )
    option("--batch-sizes", type=numbers, help="also instead of the figure's")
    known = list_of(systems)
    option("--systems", type=known, default=systems, help=", ".join(systems))
    meaning = "the fastest counts (default: the figure's, or 1,2,4,8)"
    option("--micro-batch-size", type=numbers, default=(), help=meaning)
    option("--precision", choices=("bf16", "fp16", "fp32"), default="fp16")
    option("--train-iters", type=int, default=30)
    option("--cpu", action="store_true", help="the nodes have no GPUs")
    meaning = 'such as "--partition=gpu --account=me --time=30"'
    option("--sbatch", default="", help=meaning)
    option("--dry-run", action="store_true", help="print the commands")


def _choose_panels(options: Namespace, parser: Parser) -> None:
    names = "model nodes gpus_per_node model_parallel_size batch_sizes"
    own = attrgetter(*names.split())(options)
    if options.figure:
        options.panels = panels(options.figure)
    elif all(own):
        options.panels = [Panel("own", *own, rounds=False)]
    else:
        parser.error(
            "give --figure, or --model, --nodes, --gpus-per-node, "
            "--model-parallel-size and --batch-sizes"
        )
    if options.batch_sizes:
        batches = options.batch_sizes
        options.panels = [replace(panel, batches=batches) for panel in options.panels]
    if not grid(options.panels, options.systems, options.micro_batch_size):
        parser.error(
            "--batch-sizes: no microbatch of --micro-batch-size divides them and fills the stages"
        )


def main() -> int:
    options = parse(sys.argv[1:])
    return run_program(
        "sweep.py",
        partial(options.function, options),
        "the same command continues from here",
    )


if __name__ == "__main__":
    sys.exit(main())
