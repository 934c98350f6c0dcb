"""The paper's Table 2: BERTs of vanilla, of vanilla with 90 % of the iterations, and of
2BW, finetuned and compared.

    python scripts/table2.py --models vanilla=DIR,2bw=DIR --seeds 1,2,3 -- --bf16
    python scripts/table2.py --gpt vanilla=DIR,2bw=DIR   # word perplexity on WikiText
    python scripts/table2.py                             # the table of all results

A DIR is a folder of transformers, or a Megatron checkpoint, which `megatron-2bw convert
export` converts. A second pretraining of the same kind is vanilla.2=DIR. The perplexity
is lm-eval's. Words after -- go to scripts/finetune_bert.py. The same command continues
after any end.

Invariant: table2.json and table2.md in --out show every result in --out, of this call
and of others.
"""

import argparse
import json
import statistics
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import tables
from megatron_2bw.base.argv import split_flags
from megatron_2bw.base.errors import (
    Parser,
    UserError,
    comma_separated,
    list_of,
    run_program,
)
from megatron_2bw.base.files import write_json, write_whole
from megatron_2bw.mcore.checkpoints.folder import TRACKER
from megatron_2bw.run.start.torchrun import ROOT, torchrun
from scripts.paper_data import PAPER, Row

VALUES = PAPER["figures"]["table2"]["values"]
TASKS = (*PAPER["finetuning"], "wikitext")


def models(text: str) -> list[tuple[str, Path]]:
    """LABEL=DIR,... or LABEL.N=DIR,... as (name, folder), for argparse."""
    pairs = []
    for word in comma_separated(text):
        name, _, folder = word.partition("=")
        if not folder:
            raise argparse.ArgumentTypeError(f"{name}: give LABEL=DIR")
        pairs.append((name, Path(folder).resolve()))
    return pairs


def run(command: Sequence[str | Path]) -> None:
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        shown = " ".join(map(str, command[1:5]))
        raise UserError(f"{shown} ... failed, see above")


def exported(name: str, folder: Path, out: Path) -> Path:
    """The model as a folder of transformers. Raises UserError."""
    latest = folder / TRACKER
    if not latest.is_file():
        return folder
    target = out / "models" / f"{name}-{latest.read_text().strip()}"
    if not (target / "config.json").is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "megatron_2bw.cli", "convert", "export"]
        run([*command, folder, "--out", target])
    return target


def finetune(name: str, folder: Path, task: str, options: Namespace) -> None:
    script = ROOT / "scripts" / "finetune_bert.py"
    command = [sys.executable, script]
    if options.gpus > 1:
        command = torchrun(options.gpus, script=script)
    command += ["--task", task, "--model", exported(name, folder, options.out)]
    command += ["--out", options.out / "finetuning" / name / task]
    run([*command, "--seeds", options.seeds, *options.flags])


def word_perplexity(name: str, folder: Path, options: Namespace) -> None:
    """By lm-eval's task wikitext, whose test articles are WikiText-103's too;
    --wikitext: JSON lines with "page"."""
    import lm_eval
    import torch

    results = options.out / "wikitext"
    results.mkdir(parents=True, exist_ok=True)
    tasks = ["wikitext"]
    if options.wikitext:
        tasks = [str(results / "wikitext.yaml")]
        tasks_of_lm_eval = Path(lm_eval.__file__).parent / "tasks"
        articles = str(options.wikitext.resolve())
        files = dict.fromkeys(("train", "validation", "test"), articles)
        content = {
            "include": str(tasks_of_lm_eval / "wikitext" / "wikitext.yaml"),
            "task": "wikitext",
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": files},
        }
        write_json(tasks[0], content)  # JSON is YAML
    model = str(exported(name, folder, options.out))
    found = lm_eval.simple_evaluate(
        "hf",
        {"pretrained": model, "dtype": "float32"},
        tasks,
        batch_size=1,
        device="cuda" if torch.cuda.is_available() else "cpu",
        bootstrap_iters=0,
    )
    value = found["results"]["wikitext"]["word_perplexity,none"]
    write_json(results / f"{name}.json", {"word_perplexity": value})


def collect(out: Path) -> list[Row]:
    """A row for each task and label with a result or a value of the paper."""
    found = {task: {} for task in TASKS}
    for path in sorted(out.glob("finetuning/*/*/results.json")):
        task = path.parent.name
        name = path.parents[1].name
        label = name.partition(".")[0]
        runs = found[task].setdefault(label, {})
        seeds = json.loads(path.read_text())["seeds"]
        for seed, result in seeds.items():
            runs[f"{name} seed {seed}"] = result["accuracy"]["all"]
    for path in sorted(out.glob("wikitext/*.json")):
        label = path.stem.partition(".")[0]
        runs = found["wikitext"].setdefault(label, {})
        content = json.loads(path.read_text())
        runs[path.stem] = content["word_perplexity"]
    rows = []
    for task, results in found.items():
        values = VALUES.get(task, {})
        labels = [*values, *sorted(results)] if results else []
        for label in dict.fromkeys(labels):
            runs = results.get(label, {})
            row = {"task": task, "label": label}
            row["paper"] = values.get(label)
            row["runs"] = runs
            numbers = runs.values()
            if numbers:
                row["mean"] = statistics.fmean(numbers)
            if len(numbers) > 1:
                row["deviation"] = statistics.stdev(numbers)
            rows.append(row)
    return rows


def markdown(rows: Sequence[Row]) -> str:
    """A line for each label of a task: here, mean ± standard deviation (number of
    runs), and the paper's value."""
    lines = []
    for row in rows:
        task = f"{row['task'].upper()}, accuracy in %"
        if row["task"] == "wikitext":
            task = "WikiText, word perplexity"
        here = "–"
        if row["runs"]:
            here = f"{row['mean']:.2f}"
            if "deviation" in row:
                here += f" ± {row['deviation']:.2f}"
            here += f" ({len(row['runs'])})"
        cells = {"task": task, "model": row["label"], "here": here}
        lines.append(cells | {"paper": row["paper"] or "–"})
    return tables.markdown(lines) + "\n"


def work(options: Namespace) -> None:
    for name, folder in options.models:
        for task in options.tasks:
            print(f"table2.py: {name}, {task}", flush=True)
            finetune(name, folder, task, options)
    for name, folder in options.gpt:
        print(f"table2.py: {name}, wikitext", flush=True)
        word_perplexity(name, folder, options)
    rows = collect(options.out)
    if not rows:
        raise UserError(f"--out {options.out}: no result is there")
    write_json(options.out / "table2.json", {"rows": rows})
    text = markdown(rows)
    write_whole(options.out / "table2.md", text)
    print(f"\n{text}\nwrote table2.json and table2.md in {options.out}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 if a model failed, 2 for a wrong option, 130 if
    interrupted."""
    own, flags = split_flags(sys.argv[1:] if argv is None else argv)
    parser = Parser(
        prog="table2.py", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    option = parser.add_argument
    option("--models", type=models, default=[], help="BERTs: LABEL=DIR,...")
    option("--gpt", type=models, default=[], help="GPTs, for the perplexity")
    tasks = list_of(TASKS[:-1])
    two = ("mnli", "race")
    option("--tasks", type=tasks, default=two, help="of mnli,race,choice,order")
    meaning = 'JSON lines with "page", instead of the Hub\'s'
    option("--wikitext", type=Path, help=meaning)
    option("--seeds", default="1,2,3", help="of the finetuning (1,2,3)")
    option("--gpus", type=int, default=1, help="processes of a finetuning (1)")
    option("--out", type=Path, default=ROOT / "out" / "table2")
    options = parser.parse_args(own)
    options.flags = flags
    options.out = options.out.resolve()
    return run_program(
        "table2.py", partial(work, options), "the same command continues from here"
    )


if __name__ == "__main__":
    sys.exit(main())
