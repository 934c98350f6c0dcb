"""Measures the paper's figures (scripts/paper.yaml) on a Slurm cluster: jobs, then a
table of their speeds.

Invariant: every submitted run has a row, with the word of its status file.

    python scripts/slurm/sweep.py submit --figure 6 --out out/figure6 --dry-run     #
    what it would submit
    python scripts/slurm/sweep.py submit --figure 6 --out out/figure6               #
    again: what has failed
    python scripts/slurm/sweep.py status --out out/figure6
    python scripts/slurm/sweep.py collect --out out/figure6                         #
    sweep.csv
    python scripts/paper.py --figure 6 --collect out/figure6                        #
    beside the paper's values
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.tables import table
from megatron_2bw.base import run_log
from megatron_2bw.base.argv import split_flags
from megatron_2bw.base.errors import Parser, UserError, names_of, run_program
from megatron_2bw.base.files import set_aside, write_csv, write_json
from megatron_2bw.run.start.torchrun import ROOT
from megatron_2bw.tools.planner.descriptions import cluster
from megatron_2bw.tools.planner.descriptions.cluster_file import named_cluster
from megatron_2bw.tools.planner.descriptions.inputs import numbers
from megatron_2bw.tools.planner.descriptions.model import PRESETS
from megatron_2bw.tools.slurm import status
from scripts.paper_data import FIRST, PAPER, SYSTEMS, Panel, Run, grid, panels
from scripts.paper_figures import largest_panels

AGAIN = ("failed", "timeout")  # out of memory is a result
UNCORRECTED = ("--two-bw-correction", "none")  # as in the paper
COLUMNS = """
    figure model system schedule servers gpus tensor depth width microbatch recompute round batch status reason
    samples_per_second ms_per_iteration iterations peak_memory_gib validation_loss job run
""".split()


def on_cluster(own: Sequence[Panel], name: str) -> list[Panel]:
    """The panels with as many GPUs of the planner's cluster `name`; those for which it
    is too small are left out."""
    servers, where = (
        named_cluster(name),
        name if name in cluster.PRESETS else str(Path(name).resolve()),
    )
    fitting = [
        panel for panel in own if name in cluster.PRESETS or panel.gpus <= servers.gpus
    ]
    for panel in (panel for panel in own if panel not in fitting):
        line = (
            f"sweep.py: {panel.figure} is left out: it needs {panel.gpus} GPUs, "
            f"{name} has {servers.gpus}"
        )
        print(line, file=sys.stderr)
    if not fitting:
        raise UserError(
            f"--cluster {name}: it has {servers.gpus} GPUs, fewer than any of the runs"
        )
    each = servers.gpus_per_server
    return [
        replace(
            panel,
            cluster=where,
            servers=math.ceil(panel.gpus / each),
            gpus_per_server=min(each, panel.gpus),
        )
        for panel in fitting
    ]


def sbatch(
    run: Run, folder: Path, options: argparse.Namespace
) -> tuple[dict[str, str], list[str]]:
    """(variables, command) of a job: short, without checkpoints, ended by its first
    error; or a whole training."""
    panel, whole = run.panel, run.panel.iterations
    precision, kind = panel.precision or options.precision, PRESETS[panel.model].kind
    variables = {
        "MODEL": panel.model,
        "PLAN": "",
        "PRECISION": precision,
        "CHECKPOINTS": str(folder / "checkpoints") if whole else "none",
        "PROCESSES_PER_NODE": str(panel.gpus_per_server),
        "RESTARTS": "3" if whole else "0",
        "MEGATRON_2BW": str(ROOT),
        "LOGS": str(folder),
    }
    head = [
        "sbatch",
        "--parsable",
        f"--job-name={run.name}",
        f"--nodes={panel.servers}",
    ]
    head += [] if options.cpu else [f"--gpus-per-node={panel.gpus_per_server}"]
    training = [
        "--train-iters",
        str(whole or options.train_iters),
        "--lr",
        PAPER["training"]["lr"],
    ]
    if whole:
        data = [
            "--data-path",
            str(data_prefix(options.out, kind)),
            *PAPER["data"][kind]["flags"].split(),
        ]
        variables["DATA_ARGS"] = shlex.join(data)
        training += PAPER["training"]["flags"].split()
    else:
        head += ["--time=15", "--no-requeue"]
        training += ["--eval-iters", "0", "--log-interval", "1"]
    # what the user gives comes last
    head += [f"--output={folder / 'batch.log'}", *shlex.split(options.sbatch)]
    script = str(ROOT / "scripts" / "slurm" / f"pretrain_{kind}_2bw.sbatch")
    flags = [
        *run.plan.flags(precision),
        *UNCORRECTED,
        *training,
        *panel.flags,
        *options.flags,
    ]
    return variables, [*head, script, *flags]


def data_prefix(out: Path, kind: str) -> Path:
    return out / f"{PAPER['data']['name']}-{kind}"


def preparations(runs: Sequence[Run], out: Path) -> list[str]:
    """The commands that make the data of whole trainings which are not there yet."""
    kinds, data = (
        sorted({PRESETS[run.panel.model].kind for run in runs if run.panel.iterations}),
        PAPER["data"],
    )
    return [
        f"megatron-2bw preprocess --task {kind} --dataset {data['dataset']} "
        f"{data[kind]['prepare']} "
        f"--output-prefix {shlex.quote(str(data_prefix(out, kind)))}"
        for kind in kinds
        if not data_prefix(out, kind).with_suffix(".idx").exists()
    ]


def submit(options: argparse.Namespace) -> int:
    """Submit the runs that are missing or have failed; run.json in a run's folder
    records its job."""
    own = (
        on_cluster(options.panels, options.cluster)
        if options.cluster
        else options.panels
    )
    before = stored(options.out) if options.dry_run else _refresh(options.out)
    words = {
        run.name: status.read(folder / "status.json").get("status")
        for run, _, folder in before
    }
    runs = grid(own, options.systems, options.micro_batch_size)
    runs = [run for run in runs if words.get(run.name) in (None, *AGAIN)]
    first = preparations(runs, options.out)
    if first and not options.dry_run:
        raise UserError(
            f"the trainings need data; prepare it first: {' && '.join(first)}"
        )
    for line in first:
        print(line)
    for number, run in enumerate(runs, 1):
        folder = options.out / run.name
        variables, command = sbatch(run, folder, options)
        if options.dry_run:
            print(
                " ".join(
                    f"{name}={shlex.quote(value)}" for name, value in variables.items()
                ),
                shlex.join(command),
            )
            continue
        set_aside(folder)
        status.write(folder / "status.json", status.Outcome("pending", "submitted"))
        # A terminal's Ctrl-C does not reach sbatch.
        environment = dict(cwd=ROOT, env=os.environ | variables, start_new_session=True)
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, **environment
        )
        if done.returncode:
            why = f"sbatch does not take {run.name}: {' '.join(done.stderr.split())}"
            status.write(folder / "status.json", status.Outcome("failed", why[:300]))
            raise UserError(why)
        job = done.stdout.strip().split(";")[0]
        write_json(folder / "run.json", {"run": asdict(run), "job": job})
        print(f"{number}/{len(runs)} {run.name}: job {job}", flush=True)
    if not options.dry_run:
        print(
            f"submitted {len(runs)} runs; python scripts/slurm/sweep.py status --out {options.out}"
        )
    return 0


def stored(out: Path) -> list[tuple[Run, str, Path]]:
    """(run, job, folder) of all submitted runs, without earlier tries."""
    found = []
    for path in sorted(out.glob("*/run.json")):
        content = json.loads(path.read_text())
        run = Run(
            **content["run"]
            | {"panel": Panel.of(content["run"]["panel"]), "reading": FIRST}
        )
        if run.name == path.parent.name:
            found.append((run, str(content["job"]), path.parent))
    return found


def _refresh(out: Path) -> list[tuple[Run, str, Path]]:
    """As `stored`, with the status files of dead jobs corrected."""
    runs = stored(out)
    for _, job, folder in runs:
        status.current(folder / "status.json", job)
    return runs


def show(options: argparse.Namespace) -> int:
    words = Counter()
    for run, job, folder in _refresh(options.out):
        content = status.read(folder / "status.json")
        words[content["status"]] += 1
        print(f"{run.name} (job {job}): {content['status']}, {content['reason']}")
    print(
        ", ".join(f"{words[word]} {word}" for word in status.WORDS if words[word])
        or f"nothing in {options.out}"
    )
    return 0


def rows(out: Path, warm_up: int) -> list[dict[str, Any]]:
    """A row for each run; its speed only if it completed."""
    found = []
    for run, job, folder in _refresh(out):
        content = status.read(folder / "status.json")
        logs = "\n".join(
            path.read_text(errors="replace")
            for path in sorted(folder.glob("start-*-node-*.log"))
        )
        speed = measured(logs, warm_up) if content["status"] == "completed" else {}
        word = {
            "status": content["status"],
            "reason": content["reason"],
            "job": job,
            "run": run.name,
        }
        found.append(dict.fromkeys(COLUMNS, "") | run.row() | word | speed)
    return found


def measured(text: str, warm_up: int) -> dict[str, Any]:
    """Speed from Megatron's log lines after `warm_up` iterations; empty if there is
    none."""
    times, batch, memory, before = [], 0, 0.0, 0
    for line in run_log.training(text):
        size = line.fields.get("global batch size")
        if line.milliseconds is None or size is None:  # cut off
            continue
        if before >= warm_up:
            times += [line.milliseconds] * (line.iteration - before)
        before, batch = line.iteration, int(size)
        memory = max([memory, *line.stage_memory])
    if not times:
        return {}
    mean = sum(times) / len(times)
    losses = [line.loss for line in run_log.validations(text) if line.loss is not None]
    speed = {
        "samples_per_second": round(1000 * batch / mean, 3),
        "ms_per_iteration": round(mean, 3),
    }
    speed |= {"iterations": len(times), "peak_memory_gib": memory or ""}
    return speed | {"validation_loss": losses[-1] if losses else ""}


def collect(options: argparse.Namespace) -> int:
    """Write sweep.csv, and print each system's fastest microbatch, or the word of its
    run."""
    entries = rows(options.out, options.warm_up)
    if not entries:
        raise UserError(f"--out {options.out}: nothing was submitted to it")
    write_csv(options.out / "sweep.csv", entries)
    fastest: dict[tuple, dict[str, Any]] = {}
    for entry in sorted(entries, key=lambda entry: entry["samples_per_second"] or 0.0):
        names = ("figure", "model", "gpus", "batch", "system")
        fastest[tuple(entry[name] for name in names)] = entry
    shown = (
        "figure",
        "model",
        "gpus",
        "batch",
        "system",
        "microbatch",
        "samples_per_second",
        "status",
    )
    print(
        table([{name: fastest[key][name] for name in shown} for key in sorted(fastest)])
    )
    print(f"wrote {options.out}/sweep.csv ({len(entries)} runs)")
    return 0


def parse(words: Sequence[str]) -> argparse.Namespace:
    words, flags = split_flags(words)
    parser = Parser(
        prog="sweep.py", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True)
    for name, function in (("submit", submit), ("status", show), ("collect", collect)):
        command = commands.add_parser(name, allow_abbrev=False)
        command.set_defaults(function=function, flags=flags)
        command.add_argument(
            "--out",
            type=lambda text: Path(text).resolve(),
            required=True,
            metavar="DIR",
        )
        if name == "collect":
            command.add_argument(
                "--warm-up",
                type=int,
                default=10,
                metavar="N",
                help="iterations not counted (10)",
            )
        if name == "submit":
            _add_submit_flags(command)
    options = parser.parse_args(words)
    if options.function is submit:
        _choose_panels(options, parser)
    elif flags:
        parser.error(f"{flags[0]}: Megatron's flags go with submit")
    return options


def _add_submit_flags(command: argparse.ArgumentParser) -> None:
    command.epilog = "Words after -- are Megatron's flags for every run."
    trained = [name for name, figure in PAPER["figures"].items() if "runs" in figure]
    option = command.add_argument
    option(
        "--figure", choices=[*trained, "11"], help="of the paper (scripts/paper.yaml)"
    )
    option(
        "--cluster",
        metavar="NAME|FILE.yaml",
        help="of the planner: the figure's GPUs on its servers",
    )
    option(
        "--model",
        choices=PRESETS,
        metavar="NAME",
        help="instead of a figure, with the next four",
    )
    option("--nodes", type=int, help="servers of a job")
    option("--gpus-per-node", type=int, help="with --cpu: processes")
    option(
        "--model-parallel-size",
        type=int,
        help="GPUs for a copy of the model: stages or tensor ranks",
    )
    option(
        "--batch-sizes",
        type=numbers,
        metavar="N,...",
        help="also instead of the figure's",
    )
    systems = tuple(SYSTEMS)
    option(
        "--systems",
        type=names_of(systems),
        default=systems,
        metavar="NAME,...",
        help=", ".join(systems),
    )
    meaning = "the fastest counts (default: the figure's, or 1,2,4,8)"
    option(
        "--micro-batch-size", type=numbers, default=(), metavar="N,...", help=meaning
    )
    option(
        "--precision",
        choices=("bf16", "fp16", "fp32"),
        default="fp16",
        help="default: the paper's",
    )
    option("--train-iters", type=int, default=30)
    option("--cpu", action="store_true", help="the nodes have no GPUs")
    option(
        "--sbatch",
        default="",
        metavar="OPTIONS",
        help='such as "--partition=gpu --account=me --time=30"',
    )
    option("--dry-run", action="store_true", help="print the commands")


def _choose_panels(options: argparse.Namespace, parser: Parser) -> None:
    own = (
        options.model,
        options.nodes,
        options.gpus_per_node,
        options.model_parallel_size,
        options.batch_sizes,
    )
    if options.figure:
        options.panels = (
            largest_panels() if options.figure == "11" else panels(options.figure)
        )
        if options.batch_sizes:
            options.panels = [
                replace(panel, batches=options.batch_sizes) for panel in options.panels
            ]
    elif not all(own):
        parser.error(
            "give --figure, or --model, --nodes, --gpus-per-node, "
            "--model-parallel-size and --batch-sizes"
        )
    else:
        options.panels = [Panel("own", *own, rounds=False)]
    if not grid(options.panels, options.systems, options.micro_batch_size):
        parser.error(
            "--batch-sizes: no microbatch of --micro-batch-size divides them and fills the stages"
        )


def main() -> int:
    options = parse(sys.argv[1:])
    return run_program(
        "sweep.py",
        lambda: options.function(options),
        "the same command continues from here",
    )


if __name__ == "__main__":
    sys.exit(main())
