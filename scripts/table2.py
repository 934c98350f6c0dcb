"""The paper's Table 2: BERTs of vanilla, of vanilla with 90 % of the iterations, and of 2BW, finetuned and compared.

    python scripts/table2.py --models vanilla=DIR,vanilla-90=DIR,2bw=DIR --seeds 1,2,3 -- --precision bf16
    python scripts/table2.py --gpt vanilla=DIR,2bw=DIR   # word perplexity on WikiText, by lm-eval
    python scripts/table2.py                             # the table of all results in --out

A DIR is a folder of transformers, or a Megatron checkpoint, which `megatron-2bw convert export` converts. Words after
-- go to scripts/finetune_bert.py. The same command continues after any end; a failed model does not stop the others.

Invariant: table2.json, table2.md and table2.png in --out show every result in --out, of this call and of others.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_2bw.convergence.options import VARIANTS
from megatron_2bw.convergence.plot import COLOURS
from megatron_2bw.errors import Parser, UserError, names_of, numbers_of, run_program, words
from megatron_2bw.files import new_figure, write_figure, write_json, write_whole
from megatron_2bw.start.torchrun import ROOT, torchrun
from megatron_2bw.words import split_flags
from scripts.finetune_bert import TASKS
from scripts.paper_data import PAPER

VALUES = PAPER["figures"]["table2"]["values"]
LABELS = ("vanilla", "vanilla-90", *VARIANTS[1:])


def models(text: str) -> list[tuple[str, Path]]:
    """LABEL=DIR,... as (name, folder), for argparse. The name is the label, or LABEL.N of a label's N-th model."""
    found: list[tuple[str, Path]] = []
    for word in words(text):
        label, _, folder = word.partition("=")
        if label not in LABELS or not folder:
            raise argparse.ArgumentTypeError(f"{word}: give LABEL=DIR, LABEL of {', '.join(LABELS)}")
        before = sum(name.split(".")[0] == label for name, _ in found)
        found.append((f"{label}.{before + 1}" if before else label, Path(folder).resolve()))
    return found


def exported(name: str, folder: Path, out: Path) -> Path:
    """The model as a folder of transformers. Raises UserError."""
    latest = folder / "latest_checkpointed_iteration.txt"
    if not latest.is_file():
        return folder
    target = out / "models" / f"{name}-{latest.read_text().strip()}"
    if not (target / "config.json").is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        run([sys.executable, "-m", "megatron_2bw.cli", "convert", "export", str(folder), "--out", str(target)])
    return target


def run(command: list[str]) -> None:
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        raise UserError(f"{' '.join(command[1:5])} ... failed, see above")


def finetune(name: str, folder: Path, task: str, options: argparse.Namespace) -> None:
    print(f"table2.py: {name}, {task}", flush=True)
    script = ROOT / "scripts" / "finetune_bert.py"
    start = [sys.executable, str(script)] if options.gpus == 1 else torchrun(options.gpus, script=script)
    out = options.out / "finetuning" / name / task
    model = exported(name, folder, options.out)
    run([*start, "--task", task, "--model", str(model), "--out", str(out), "--seeds", options.seeds, *options.flags])


def word_perplexity(name: str, folder: Path, text: str | None, out: Path) -> None:
    """By lm-eval's task wikitext, whose test articles are WikiText-103's too; text: JSON lines with "page" instead."""
    import lm_eval
    import torch

    print(f"table2.py: {name}, wikitext", flush=True)
    path, task = out / "wikitext" / f"{name}.json", "wikitext"
    path.parent.mkdir(parents=True, exist_ok=True)
    if text:
        task = str(path.with_name("wikitext.yaml"))
        files = dict.fromkeys(("train", "validation", "test"), str(Path(text).resolve()))
        task_file = Path(lm_eval.__file__).parent / "tasks" / "wikitext" / "wikitext.yaml"
        changes = {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": files}}
        write_json(Path(task), {"include": str(task_file), "task": "wikitext"} | changes)  # JSON is YAML
    arguments = {"pretrained": str(exported(name, folder, out)), "dtype": "float32"}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = lm_eval.simple_evaluate("hf", arguments, [task], batch_size=1, device=device, bootstrap_iters=0)
    write_json(path, {"word_perplexity": found["results"]["wikitext"]["word_perplexity,none"]})


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
    rows = []
    for task in [task for task in (*TASKS, "wikitext") if any(key[0] == task for key in found)]:
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
        here, theirs = [metric, "here"], ["", "paper"]
        for label in labels:
            row = own.get(label, {"runs": {}, "paper": None})
            deviation = f" ± {row['deviation']:.2f}" if "deviation" in row else ""
            here.append(f"{row['mean']:.2f}{deviation} ({len(row['runs'])})" if row["runs"] else "–")
            theirs.append("–" if row["paper"] is None else f"{row['paper']:.2f}")
        lines += [here, theirs] if task in VALUES else [here]
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
        axes.set(title=f"{task} (black: the paper)" if task in VALUES else task, xlim=(-0.6, len(own) - 0.4))
        axes.set_ylabel("word perplexity" if task == "wikitext" else "accuracy in %")
        axes.spines[["top", "right"]].set_visible(False)
    write_figure(path, figure)


def report(out: Path) -> None:
    rows = collect(out)
    if not rows:
        raise UserError(f"--out {out}: no result is there")
    write_json(out / "table2.json", {"rows": rows})
    write_whole(out / "table2.md", markdown(rows))
    draw(rows, out / "table2.png")
    print(f"\n{markdown(rows)}\nwrote table2.json, table2.md and table2.png in {out}", flush=True)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    own, flags = split_flags(argv)
    parser = Parser(prog="table2.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    option = parser.add_argument
    option("--models", type=models, default=[], metavar="LABEL=DIR,...", help=f"BERTs; LABEL of {', '.join(LABELS)}")
    option("--gpt", type=models, default=[], metavar="LABEL=DIR,...", help="GPTs, for the perplexity")
    option("--tasks", type=names_of(TASKS), default=("mnli", "race"), metavar="NAME,...", help="default: mnli,race")
    option("--wikitext", metavar="FILE", help='JSON lines with "page", instead of the Hub\'s')
    meaning = "of the finetuning (1,2,3)"
    option("--seeds", type=lambda text: ",".join(numbers_of(text)), default="1,2,3", metavar="N,...", help=meaning)
    option("--gpus", type=int, default=1, metavar="N", help="processes of a finetuning (1)")
    option("--out", type=lambda text: Path(text).resolve(), default=ROOT / "out" / "table2", metavar="DIR")
    options = parser.parse_args(own)
    options.flags = flags
    return options


def work(options: argparse.Namespace) -> int:
    todo = [(finetune, name, folder, task, options) for name, folder in options.models for task in options.tasks]
    todo += [(word_perplexity, name, folder, options.wikitext, options.out) for name, folder in options.gpt]
    failed = 0
    for function, name, *arguments in todo:
        try:
            function(name, *arguments)
        except UserError as error:
            failed += 1
            print(f"table2.py: {name}: {error}", file=sys.stderr, flush=True)
    report(options.out)
    return int(failed > 0)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 if a model failed, 2 for a wrong option, 130 if interrupted."""
    options = parse(sys.argv[1:] if argv is None else argv)
    return run_program("table2.py", lambda: work(options), "the same command continues from here")


if __name__ == "__main__":
    sys.exit(main())
