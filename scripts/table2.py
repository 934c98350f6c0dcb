"""The paper's Table 2: BERTs of vanilla, of vanilla with 90 % of the iterations, and of 2BW, finetuned and compared.

    python scripts/table2.py --models vanilla=DIR,vanilla-90=DIR,2bw=DIR --seeds 1,2,3 -- --precision bf16
    python scripts/table2.py --small                     # pretrains small BERTs first, on the built-in corpus
    python scripts/table2.py --gpt vanilla=DIR,2bw=DIR   # word perplexity on WikiText, by lm-eval
    python scripts/table2.py --cluster mine.yaml         # prints the Slurm jobs; --submit submits them

A DIR is a folder of transformers, or a Megatron checkpoint, which `megatron-2bw convert export` converts. Words after
-- go to scripts/finetune_bert.py. The same command continues after any end; a failed model does not stop the others.

Invariant: table2.json, table2.md and table2.png in --out show every result in --out, of this call and of others.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_2bw.convergence import options as convergence_options
from megatron_2bw.convergence import run as convergence
from megatron_2bw.convergence.plot import COLOURS
from megatron_2bw.errors import Parser, UserError, file_errors, names_of, numbers_of, run_program, words
from megatron_2bw.files import new_figure, write_figure, write_json, write_whole
from megatron_2bw.processes import exit_on_signals
from megatron_2bw.slurm import status
from megatron_2bw.start.torchrun import ROOT
from megatron_2bw.words import split_flags
from scripts import paper
from scripts.finetune_tasks import SMALL, TASKS
from scripts.paper_data import PAPER, grid
from scripts.slurm import sweep

VALUES = PAPER["figures"]["table2"]["values"]
LABELS = ("vanilla", "vanilla-90", *convergence_options.VARIANTS[1:])
# Where the pretraining jobs of Figure 5 give the model of a label.
JOBS = {
    ("5-bert", "PipeDream-Flush"): "vanilla",
    ("5-bert-90", "PipeDream-Flush"): "vanilla-90",
    ("5-bert", "PipeDream-2BW"): "2bw",
}

Models = list[tuple[str, Path]]  # (name, folder); the name is the label, or LABEL.N of a label's N-th model


def names(pairs: Sequence[tuple[str, str | Path]]) -> Models:
    """(label, folder) pairs as Models."""
    found: Models = []
    for label, folder in pairs:
        before = sum(name.split(".")[0] == label for name, _ in found)
        found.append((f"{label}.{before + 1}" if before else label, Path(folder).expanduser().resolve()))
    return found


# --- models ----------------------------------------------------------------------------------------------------------


def pretrain(options: argparse.Namespace) -> Models:
    """Train the small BERTs by scripts/convergence.py. vanilla-90 is a run of its own, whose rate also decays."""
    works = [("", [label for label in options.variants if label != "vanilla-90"], options.iterations)]
    if "vanilla-90" in options.variants:
        works.append(("-90", ["vanilla"], options.iterations * 9 // 10))
    found = []
    for suffix, labels, iterations in works:
        name = f"pretraining{suffix}"
        line = [name, "--task", "bert", "--out", str(options.out / name), "--lr", options.pretraining_lr]
        line += ["--variants", ",".join(labels), "--seeds", ",".join(options.pretraining_seeds)]
        flags = f"-- --train-iters {iterations} --save-interval {iterations}".split()
        chosen = convergence_options.parse([*line, *flags])
        if convergence.work(chosen):
            raise UserError(f"the pretraining failed, see {chosen.out}/report.md; the same command tries it again")
        found += [(run.variant + suffix, run.checkpoints) for run in convergence_options.grid(chosen, [])]
    return names(found)


def exported(name: str, folder: Path, out: Path) -> Path:
    """The model as a folder of transformers. Raises UserError."""
    if (folder / "config.json").is_file():
        return folder
    latest = folder / "latest_checkpointed_iteration.txt"
    if not latest.is_file():
        raise UserError(f"{folder} holds neither a config.json of transformers nor a Megatron checkpoint")
    target = out / "models" / f"{name}-{latest.read_text().strip()}"
    if not (target / "config.json").is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "megatron_2bw.cli", "convert", "export", str(folder), "--out", str(target)]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            raise UserError(f"the checkpoint {folder} could not be exported, see above")
    return target


# --- evaluation ------------------------------------------------------------------------------------------------------


def finetune(name: str, folder: Path, task: str, options: argparse.Namespace) -> None:
    launcher = [sys.executable]
    if options.gpus > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.gpus)]
    command = [*launcher, str(ROOT / "scripts" / "finetune_bert.py"), "--task", task, "--model", str(folder)]
    command += ["--out", str(options.out / "finetuning" / name / task), "--seeds", ",".join(options.seeds)]
    command += ["--dataset", options.datasets[task]] if task in options.datasets else []
    print(f"table2.py: {name}, {task}", flush=True)
    if subprocess.run([*command, *options.flags], check=False).returncode:
        raise UserError("finetune_bert.py failed, see above")


def word_perplexity(folder: Path, text: str | None, scratch: Path) -> float:
    """By lm-eval's task wikitext, whose test articles are WikiText-103's too; text: JSON lines with "page" instead."""
    try:
        import lm_eval
        import torch
    except ImportError:
        raise UserError("--gpt: lm-eval is missing: pip install 'megatron_2bw[eval]'") from None
    task = "wikitext"
    if text:
        task = str(scratch / "wikitext.yaml")
        files = dict.fromkeys(("train", "validation", "test"), str(Path(text).resolve()))
        task_file = Path(lm_eval.__file__).parent / "tasks" / "wikitext" / "wikitext.yaml"
        changes = {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": files}}
        write_json(task, {"include": str(task_file), "task": "wikitext"} | changes)  # JSON is YAML
    arguments = {"pretrained": str(folder), "dtype": "float32"}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = lm_eval.simple_evaluate("hf", arguments, [task], batch_size=1, device=device, bootstrap_iters=0)
    return found["results"]["wikitext"]["word_perplexity,none"]


def evaluate(name: str, folder: Path, options: argparse.Namespace) -> None:
    path = options.out / "wikitext" / f"{name}.json"
    model = exported(name, folder, options.out)
    settings = {"model": str(model), "text": options.wikitext}
    if path.exists() and json.loads(path.read_text())["settings"] == settings:
        return
    print(f"table2.py: {name}, wikitext", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    found = word_perplexity(model, options.wikitext, path.parent)
    write_json(path, {"settings": settings, "word_perplexity": found})


# --- the table -------------------------------------------------------------------------------------------------------


def collect(out: Path) -> list[dict[str, Any]]:
    """A row for each task and label with a result or a value of the paper."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for path in sorted(out.glob("finetuning/*/*/results.json")):
        task, name = path.parent.name, path.parent.parent.name
        for seed, result in json.loads(path.read_text())["seeds"].items():
            found.setdefault((task, name.split(".")[0]), {})[f"{name} seed {seed}"] = result["accuracy"]["all"]
    for path in sorted(out.glob("wikitext/*.json")):
        content = json.loads(path.read_text())
        found.setdefault(("wikitext", path.stem.split(".")[0]), {})[path.stem] = content["word_perplexity"]
    tasks = [task for task in (*TASKS, "wikitext") if any(key[0] == task for key in found)]
    rows = []
    for task in tasks:
        for label in LABELS:
            runs, paper_value = found.get((task, label), {}), VALUES.get(task, {}).get(label)
            if runs or paper_value is not None:
                spread = {"mean": statistics.fmean(runs.values())} if runs else {}
                spread |= {"deviation": statistics.stdev(runs.values())} if len(runs) > 1 else {}
                rows.append({"task": task, "label": label, "paper": paper_value, "runs": runs, **spread})
    return rows


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Two lines for each task: here, mean ± standard deviation (number of runs), and the paper's."""
    labels = [label for label in LABELS if any(row["label"] == label for row in rows)]
    lines = [["task", "", *labels], ["---"] * (len(labels) + 2)]
    for task in dict.fromkeys(row["task"] for row in rows):
        own = {row["label"]: row for row in rows if row["task"] == task}
        metric = "WikiText, word perplexity" if task == "wikitext" else f"{task.upper()}, accuracy in %"
        here, theirs = [], []
        for label in labels:
            row = own.get(label, {"runs": {}, "paper": None})
            deviation = f" ± {row['deviation']:.2f}" if "deviation" in row else ""
            here.append(f"{row['mean']:.2f}{deviation} ({len(row['runs'])})" if row["runs"] else "–")
            theirs.append("–" if row["paper"] is None else f"{row['paper']:.2f}")
        lines += [[metric, "here", *here], ["", "paper", *theirs]] if task in VALUES else [[metric, "here", *here]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """A panel for each task: a dot for each run, a line at the mean, a black diamond for the paper's value."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure = new_figure(max(5.0, 4.0 * len(tasks)), 3.8)
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks):
        own = [row for row in rows if row["task"] == task]
        for place, row in enumerate(own):
            colour, values = COLOURS[LABELS.index(row["label"])], list(row["runs"].values())
            axes.plot([place] * len(values), values, "o", color=colour, alpha=0.6)
            if values:
                axes.hlines(row["mean"], place - 0.3, place + 0.3, color=colour, linewidth=2)
            if row["paper"] is not None:
                axes.plot(place, row["paper"], "D", color="black", markersize=5)
        axes.set_xticks(range(len(own)), [row["label"] for row in own], rotation=25, ha="right", rotation_mode="anchor")
        black = " (black: the paper)" if task in VALUES else ""
        axes.set(title=f"{task}{black}", xlim=(-0.6, len(own) - 0.4))
        axes.set_ylabel("word perplexity" if task == "wikitext" else "accuracy in %")
        axes.spines[["top", "right"]].set_visible(False)
    write_figure(path, figure)


def report(out: Path) -> None:
    rows = collect(out)
    if not rows:
        raise UserError(f"--out {out}: no result is there")
    text = markdown(rows)
    write_json(out / "table2.json", {"rows": rows})
    write_whole(out / "table2.md", text)
    draw(rows, out / "table2.png")
    print(f"\n{text}\nwrote table2.json, table2.md and table2.png in {out}", flush=True)


# --- jobs ------------------------------------------------------------------------------------------------------------


def submit(options: argparse.Namespace) -> None:
    """The pretraining jobs of Figure 5's BERTs, and after each a job that finetunes its model on one server."""
    own = [panel for panel in paper.panels_on("5", options.cluster) if panel.figure.startswith("5-bert")]
    folder = ROOT / "out" / "paper"
    paper.submit("5", own, argparse.Namespace(out=folder, sbatch=options.sbatch, submit=options.submit, flags=[]))
    folder = paper.jobs_folder(folder, "5")
    jobs = {run.name: job for run, job, _ in sweep.stored(folder)} if options.submit else {}
    if options.submit:
        options.out.mkdir(parents=True, exist_ok=True)
    for run in grid(own):
        label, gpus = JOBS[run.panel.figure, run.system], run.panel.gpus_per_server
        line = [sys.executable, str(ROOT / "scripts" / "table2.py"), "--out", str(options.out), "--gpus", str(gpus)]
        line += ["--models", f"{label}={folder / run.name / 'checkpoints'}", "--tasks", ",".join(options.tasks)]
        line += ["--seeds", ",".join(options.seeds), *(["--", *options.flags] if options.flags else [])]
        done = status.read(folder / run.name / "status.json").get("status") == "completed"
        after = "" if done else f"afterok:{jobs.get(run.name, f'JOB_OF_{label.upper()}')},"
        name = f"table2-{label}"
        own = (f"--gpus-per-node={gpus}", f"--dependency={after}singleton")  # a model's second job waits for the first
        command = [*sweep.job(name, 1, options.out / f"{name}.log", options, *own), f"--wrap={shlex.join(line)}"]
        print(f"{label}: job {sweep.queue(command, name)}" if options.submit else shlex.join(command))


# --- the command -----------------------------------------------------------------------------------------------------


def pairs_of(known: Sequence[str]):
    """NAME=VALUE,... with known names, for argparse; a name may come again."""

    def parse(text: str) -> list[tuple[str, str]]:
        found = [tuple(re.split("=", word, maxsplit=1)) for word in words(text)]
        for pair in found:
            if len(pair) < 2 or pair[0] not in known or not pair[1]:
                line = f"{pair[0] or 'an empty word'}: give NAME=DIR, NAME of {', '.join(known)}"
                raise argparse.ArgumentTypeError(line)
        return found

    return parse


def parse(argv: Sequence[str]) -> argparse.Namespace:
    own, flags = split_flags(argv)
    parser = Parser(prog="table2.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    option = parser.add_argument
    models = dict(type=pairs_of(LABELS), default=[], metavar="LABEL=DIR,...")
    option("--models", help=f"BERTs; LABEL of {', '.join(LABELS)}", **models)
    option("--gpt", help="GPTs, for the perplexity", **models)
    option("--small", action="store_true", help="pretrain small BERTs here and finetune them on the small tasks")
    option("--variants", type=names_of(LABELS), default=LABELS, metavar="LABEL,...", help="of --small (all)")
    option("--iterations", type=int, default=1000, metavar="N", help="of --small's pretraining (1000)")
    option("--pretraining-seeds", type=numbers_of, default=("1234",), metavar="N,...", help="of --small (1234)")
    option("--pretraining-lr", default="3e-4", metavar="RATE", help="of --small (3e-4)")
    option("--tasks", type=names_of(TASKS), metavar="NAME,...", help="default: mnli,race; of --small order,choice")
    option("--datasets", type=pairs_of(tuple(TASKS)), default=[], metavar="TASK=DIR,...", help="instead of the Hub's")
    option("--wikitext", metavar="FILE", help='JSON lines with "page", instead of the Hub\'s')
    option("--seeds", type=numbers_of, default=("1", "2", "3"), metavar="N,...", help="of the finetuning (1,2,3)")
    option("--gpus", type=int, default=1, metavar="N", help="processes of a finetuning (1)")
    option("--out", type=lambda text: Path(text).resolve(), default=ROOT / "out" / "table2", metavar="DIR")
    option("--report-only", action="store_true", help="run nothing; report on what is in --out")
    options = paper.parse_jobs(parser, own)
    options.flags, options.datasets = flags, dict(options.datasets)
    options.tasks = options.tasks or (SMALL if options.small else ("mnli", "race"))
    modes = {"--models or --gpt": options.models or options.gpt, "--small": options.small}
    modes |= {"--cluster": options.cluster, "--report-only": options.report_only}
    given = [mode for mode, value in modes.items() if value]
    if len(given) != 1:
        parser.error(f"give one of {', '.join(modes)}, not {' and '.join(given) or 'none'}")
    if options.iterations < 20:
        parser.error(f"--iterations {options.iterations}: it must be at least 20")
    if options.gpus < 1:
        parser.error(f"--gpus {options.gpus}: it must be at least 1")
    if options.small and "vanilla" not in options.variants:
        parser.error("--variants: vanilla must be one of them, the others are compared with it")
    if options.wikitext and not Path(options.wikitext).is_file():
        parser.error(f"--wikitext {options.wikitext}: no such file")
    return options


def run(options: argparse.Namespace) -> int:
    if options.cluster:
        submit(options)
        return 0
    with file_errors(f"--out {options.out}"):
        options.out.mkdir(parents=True, exist_ok=True)
    models = pretrain(options) if options.small else names(options.models)
    work = [
        (name, lambda n=name, f=folder, t=task: finetune(n, exported(n, f, options.out), t, options))
        for name, folder in models
        for task in options.tasks
    ]
    work += [(name, lambda n=name, f=folder: evaluate(n, f, options)) for name, folder in names(options.gpt)]
    failed = []
    for name, each in work:
        try:
            each()
        except UserError as error:
            failed.append(name)
            print(f"table2.py: {name}: {error}", file=sys.stderr, flush=True)
    if failed and len(failed) == len(work):
        raise UserError("every model failed, see above")
    report(options.out)
    return 1 if failed else 0


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 if a model failed, 2 for a wrong option, 130 if interrupted."""
    options = parse(sys.argv[1:] if argv is None else argv)
    return run_program("table2.py", lambda: run(options), "the same command continues from here")


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main())
