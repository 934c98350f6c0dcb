"""Measures the paper's figures (scripts/paper.yaml) on a Slurm cluster: jobs, then a CSV and bars.

Invariant: every submitted run has a row, with the word of its status file.

    python scripts/slurm/sweep.py submit --figure 6 --out out/figure6 --dry-run     # what it would submit
    python scripts/slurm/sweep.py submit --figure 6 --out out/figure6               # again: what has failed
    python scripts/slurm/sweep.py status --out out/figure6
    python scripts/slurm/sweep.py collect --out out/figure6                         # sweep.csv and sweep.png
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_2bw import run_log
from megatron_2bw.errors import Parser, UserError, names_of, run_program
from megatron_2bw.files import set_aside, write_csv, write_json
from megatron_2bw.models.inputs import numbers
from megatron_2bw.models.model import PRESETS
from megatron_2bw.slurm import status
from megatron_2bw.start.torchrun import ROOT
from megatron_2bw.words import split_flags
from scripts.paper_data import PAPER, SYSTEMS, Panel, Run, grid, panels
from scripts.paper_picture import draw

AGAIN = ("failed", "timeout")  # out of memory is a result
UNCORRECTED = ("--two-bw-correction", "none")  # as in the paper
COLUMNS = """
    figure model system schedule servers gpus tensor depth width microbatch recompute round batch status reason
    samples_per_second ms_per_iteration iterations peak_memory_gib validation_loss job run
""".split()


def job(name: str, nodes: int, log: str | Path, options: argparse.Namespace, *flags: str) -> list[str]:
    """The beginning of a command of sbatch. options: with --sbatch, whose flags come last."""
    head = ["sbatch", "--parsable", f"--job-name={name}", f"--nodes={nodes}", *flags, f"--output={log}"]
    return [*head, *shlex.split(options.sbatch)]


def sbatch(run: Run, folder: Path, options: argparse.Namespace) -> tuple[dict[str, str], list[str]]:
    """(variables, command) of a job: short, without checkpoints, ended by its first error; or a whole training."""
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
    head = [] if options.cpu else [f"--gpus-per-node={panel.gpus_per_server}"]
    training = ["--train-iters", str(whole or options.train_iters), "--lr", PAPER["training"]["lr"]]
    if whole:
        prefix = options.out / f"{PAPER['data']['name']}-{kind}"
        variables["DATA_ARGS"] = shlex.join(["--data-path", str(prefix), *PAPER["data"][kind]["flags"].split()])
        training += PAPER["training"]["flags"].split()
    else:
        head += [f"--time={options.minutes}", "--no-requeue"]
        training += ["--eval-iters", "0", "--log-interval", "1"]
    head = job(run.name, panel.servers, folder / "batch.log", options, *head)
    script = str(ROOT / "scripts" / "slurm" / f"pretrain_{kind}_2bw.sbatch")
    flags = [*run.plan.flags(precision), *UNCORRECTED, *training, *panel.flags, *options.flags]
    return variables, [*head, script, *flags]


def preparation(out: Path, kind: str, options: argparse.Namespace) -> list[str]:
    """The command of the job that prepares the data of whole trainings, once."""
    data = PAPER["data"]
    words = f"--task {kind} --dataset {data['dataset']} {data[kind]['prepare']}".split()
    script = [sys.executable, str(ROOT / "scripts" / "preprocess_data.py"), *words]
    prepare = shlex.join([*script, "--output-prefix", str(out / f"{data['name']}-{kind}")])
    name = f"{data['name']}-{kind}"
    return [*job(name, 1, out / f"{name}.log", options, "--exclusive"), f"--wrap={prepare}"]


def wanted(folder: Path, again: Sequence[str]) -> bool:
    """Whether to submit a run: it has no job yet, or ended with one of the words `again`."""
    if not (folder / "run.json").exists():  # an earlier call ended before sbatch returned a job
        return True
    word = status.read(folder / "status.json").get("status")
    return word is None or word in again


def submit(options: argparse.Namespace) -> int:
    """Submit the runs that are missing or have failed; run.json in a run's folder records its job."""
    runs = grid(options.panels, options.systems, options.micro_batch_size)
    if not options.dry_run:
        _refresh(options.out)
    runs = [run for run in runs if wanted(options.out / run.name, options.again)]
    after = prepare(runs, options)
    for number, run in enumerate(runs, 1):
        folder = options.out / run.name
        variables, command = sbatch(run, folder, options)
        command[2:2] = after.get(PRESETS[run.panel.model].kind, []) if run.panel.iterations else []
        if options.dry_run:
            print(" ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items()), shlex.join(command))
            continue
        set_aside(folder)
        status.write(folder / "status.json", status.Outcome("pending", "submitted"))
        try:
            job = queue(command, run.name, variables)
        except UserError as error:
            status.write(folder / "status.json", status.Outcome("failed", str(error)[:300]))
            raise
        write_json(folder / "run.json", {"run": asdict(run), "job": job})
        print(f"{number}/{len(runs)} {run.name}: job {job}", flush=True)
    if not options.dry_run:
        print(f"submitted {len(runs)} runs; python scripts/slurm/sweep.py status --out {options.out}")
    return 0


def prepare(runs: Sequence[Run], options: argparse.Namespace) -> dict[str, list[str]]:
    """Submit the preparation of the data that whole trainings read and that is missing. Kind -> sbatch's dependency."""
    after = {}
    for kind in sorted({PRESETS[run.panel.model].kind for run in runs if run.panel.iterations}):
        command = preparation(options.out, kind, options)
        if (options.out / f"{PAPER['data']['name']}-{kind}.idx").exists():
            continue
        if options.dry_run:
            print(shlex.join(command))
            after[kind] = [f"--dependency=afterok:JOB_OF_{kind.upper()}"]
            continue
        options.out.mkdir(parents=True, exist_ok=True)
        after[kind] = [f"--dependency=afterok:{queue(command, 'the preparation of the data')}"]
    return after


def queue(command: Sequence[str], what: str, variables: Mapping[str, str] = {}) -> str:
    """Submit a job. Returns its number. A terminal's Ctrl-C does not reach sbatch."""
    options = dict(cwd=ROOT, env=os.environ | variables, start_new_session=True)
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if done.returncode:
        raise UserError(f"sbatch does not take {what}: {' '.join(done.stderr.split())}")
    return done.stdout.strip().split(";")[0]


def stored(out: Path) -> list[tuple[Run, str, Path]]:
    """(run, job, folder) of all submitted runs, without earlier tries."""
    found = []
    for path in sorted(out.glob("*/run.json")):
        content = json.loads(path.read_text())
        run = Run(**content["run"] | {"panel": Panel.of(content["run"]["panel"])})
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
    print(", ".join(f"{words[word]} {word}" for word in status.WORDS if words[word]) or f"nothing in {options.out}")
    return 0


def rows(out: Path, warm_up: int) -> list[dict[str, Any]]:
    """A row for each run; its speed only if it completed."""
    found = []
    for run, job, folder in _refresh(out):
        content = status.read(folder / "status.json")
        logs = "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("start-*-node-*.log")))
        speed = measured(logs, warm_up) if content["status"] == "completed" else {}
        word = {"status": content["status"], "reason": content["reason"], "job": job, "run": run.name}
        found.append(dict.fromkeys(COLUMNS, "") | run.row() | word | speed)
    return found


def measured(text: str, warm_up: int) -> dict[str, Any]:
    """Speed from Megatron's log lines after `warm_up` iterations; empty if there is none."""
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
    speed = {"samples_per_second": round(1000 * batch / mean, 3), "ms_per_iteration": round(mean, 3)}
    speed |= {"iterations": len(times), "peak_memory_gib": memory or ""}
    return speed | {"validation_loss": losses[-1] if losses else ""}


def bars(entries: list[dict[str, Any]]) -> dict[tuple[str, str, int], dict[tuple[str, int], float | str]]:
    """Panel (figure, model, GPUs) -> (system, batch) -> samples a second of the fastest microbatch, or the word."""
    found: dict[tuple[str, str, int], dict[tuple[str, int], float | str]] = {}
    for entry in entries:
        panel = found.setdefault((entry["figure"], entry["model"], entry["gpus"]), {})
        key, speed = (entry["system"], entry["batch"]), entry["samples_per_second"] or entry["status"]
        best = panel.get(key)
        if best is None or isinstance(speed, float) and (isinstance(best, str) or speed > best):
            panel[key] = speed
    return found


def collect(options: argparse.Namespace) -> int:
    entries = rows(options.out, options.warm_up)
    if not entries:
        raise UserError(f"--out {options.out}: nothing was submitted to it")
    write_csv(options.out / "sweep.csv", entries)
    fastest = bars(entries)
    titles = {f"{name}  {model}, {gpus} GPUs".strip(): values for (name, model, gpus), values in fastest.items()}
    draw(titles, options.out / "sweep.png", "samples / s", "global batch size")
    for (name, model, gpus), values in fastest.items():
        for (system, batch), value in values.items():
            speed = f"{value:.3f} samples/s" if isinstance(value, float) else value
            print(f"{name} {model} on {gpus} GPUs, batch {batch}, {system}: {speed}")
    print(f"wrote {options.out}/sweep.csv ({len(entries)} runs) and sweep.png")
    return 0


def parse(words: Sequence[str]) -> argparse.Namespace:
    words, flags = split_flags(words)
    parser = Parser(prog="sweep.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    commands = parser.add_subparsers(required=True)
    for name, function in (("submit", submit), ("status", show), ("collect", collect)):
        command = commands.add_parser(name, allow_abbrev=False)
        command.set_defaults(function=function, flags=flags)
        command.add_argument("--out", type=lambda text: Path(text).resolve(), required=True, metavar="DIR")
        if name == "collect":
            command.add_argument("--warm-up", type=int, default=10, metavar="N", help="iterations not counted (10)")
        if name == "submit":
            _add_submit_flags(command)
    options = parser.parse_args(words)
    if options.function is submit:
        _check_submit(options, parser)
    elif flags:
        parser.error(f"{flags[0]}: Megatron's flags go with submit")
    return options


def _add_submit_flags(command: argparse.ArgumentParser) -> None:
    command.epilog = "Words after -- are Megatron's flags for every run."
    trained = [name for name, figure in PAPER["figures"].items() if "runs" in figure]
    option = command.add_argument
    option("--figure", choices=trained, help="of the paper (scripts/paper.yaml)")
    meaning = "of the figure, if it has several (of 6 and 7, a: one server; b, c: eight)"
    option("--panel", type=names_of(("a", "b", "c")), default="a,b,c", metavar="a,...", help=meaning)
    option("--model", choices=PRESETS, metavar="NAME", help="instead of a figure, with the next four")
    option("--nodes", type=int, help="servers of a job")
    option("--gpus-per-node", type=int, help="with --cpu: processes")
    option("--model-parallel-size", type=int, help="GPUs for a copy of the model: stages or tensor ranks")
    option("--batch-sizes", type=numbers, metavar="N,...", help="also instead of the figure's")
    systems = tuple(SYSTEMS)
    option("--systems", type=names_of(systems), default=systems, metavar="NAME,...", help=", ".join(systems))
    meaning = "the fastest counts (default: the figure's, or 1,2,4,8)"
    option("--micro-batch-size", type=numbers, default=(), metavar="N,...", help=meaning)
    option("--precision", choices=("bf16", "fp16", "fp32"), default="fp16", help="default: the paper's")
    option("--train-iters", type=int, default=30)
    option("--minutes", type=int, default=15, help="time limit of a job")
    option("--cpu", action="store_true", help="the nodes have no GPUs")
    option("--sbatch", default="", metavar="OPTIONS", help='such as "--partition=gpu --account=me"')
    meaning = f"default: {','.join(AGAIN)}"
    option("--again", type=names_of(status.WORDS), default=AGAIN, metavar="WORD,...", help=meaning)
    option("--dry-run", action="store_true", help="print the commands")


def _check_submit(options: argparse.Namespace, parser: Parser) -> None:
    """Set `panels`."""
    own = (options.model, options.nodes, options.gpus_per_node, options.model_parallel_size, options.batch_sizes)
    if options.figure:
        found = panels(options.figure)
        lettered = [panel for panel in found if panel.figure[-1] in options.panel]
        options.panels = lettered if len({panel.figure for panel in found}) > 1 and lettered else found
        if options.batch_sizes:
            options.panels = [replace(panel, batches=options.batch_sizes) for panel in options.panels]
    elif not all(own):
        parser.error("give --figure, or --model, --nodes, --gpus-per-node, --model-parallel-size and --batch-sizes")
    else:
        options.panels = [Panel("own", *own, rounds=False)]
    if not grid(options.panels, options.systems, options.micro_batch_size):
        parser.error("--batch-sizes: no microbatch of --micro-batch-size divides them and fills the stages")


def main() -> int:
    options = parse(sys.argv[1:])
    return run_program("sweep.py", lambda: options.function(options), "the same command continues from here")


if __name__ == "__main__":
    sys.exit(main())
