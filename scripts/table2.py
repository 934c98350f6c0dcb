"""The paper's Table 2: BERTs of vanilla, of vanilla with 90 % of the iterations, and of
2BW, finetuned and compared.

    python scripts/table2.py --models vanilla=DIR,vanilla-90=DIR,2bw=DIR --seeds 1,2,3
    -- --bf16
    python scripts/table2.py --gpt vanilla=DIR,2bw=DIR   # word perplexity on WikiText,
    by lm-eval
    python scripts/table2.py                             # the table of all results in
    --out

A DIR is a folder of transformers, or a Megatron checkpoint, which `megatron-2bw convert
export` converts. A second pretraining of the same kind is vanilla.2=DIR. Words after --
go to scripts/finetune_bert.py. The same command continues after any end; a failed model
does not stop the others.

Invariant: table2.json and table2.md in --out show every result in --out, of this call
and of others.
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

from megatron_2bw.base.argv import split_flags
from megatron_2bw.base.errors import Parser, UserError, names_of, run_program, words
from megatron_2bw.base.files import write_json, write_whole
from megatron_2bw.mcore.checkpoints.folder import TRACKER
from megatron_2bw.run.start.torchrun import ROOT, torchrun
from scripts.paper_data import PAPER

VALUES, TASKS = PAPER["figures"]["table2"]["values"], (*PAPER["finetuning"], "wikitext")


def models(text: str) -> list[tuple[str, Path]]:
    """LABEL=DIR,... or LABEL.N=DIR,... as (name, folder), for argparse."""
    pairs = [word.partition("=") for word in words(text)]
    if wrong := [name for name, _, folder in pairs if not folder]:
        raise argparse.ArgumentTypeError(f"{wrong[0]}: give LABEL=DIR")
    return [(name, Path(folder).resolve()) for name, _, folder in pairs]


def run(command: list[str]) -> None:
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        raise UserError(f"{' '.join(command[1:5])} ... failed, see above")


def exported(name: str, folder: Path, out: Path) -> Path:
    """The model as a folder of transformers. Raises UserError."""
    latest = folder / TRACKER
    if not latest.is_file():
        return folder
    target = out / "models" / f"{name}-{latest.read_text().strip()}"
    if not (target / "config.json").is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        run(
            [
                sys.executable,
                "-m",
                "megatron_2bw.cli",
                "convert",
                "export",
                str(folder),
                "--out",
                str(target),
            ]
        )
    return target


def finetune(name: str, folder: Path, task: str, options: argparse.Namespace) -> None:
    script = ROOT / "scripts" / "finetune_bert.py"
    start = (
        [sys.executable, str(script)]
        if options.gpus == 1
        else torchrun(options.gpus, script=script)
    )
    model, out = (
        exported(name, folder, options.out),
        options.out / "finetuning" / name / task,
    )
    run(
        [
            *start,
            "--task",
            task,
            "--model",
            str(model),
            "--out",
            str(out),
            "--seeds",
            options.seeds,
            *options.flags,
        ]
    )


def word_perplexity(
    name: str, folder: Path, _task: str, options: argparse.Namespace
) -> None:
    """By lm-eval's task wikitext, whose test articles are WikiText-103's too;
    --wikitext: JSON lines with "page"."""
    import lm_eval
    import torch

    path, task = options.out / "wikitext" / f"{name}.json", "wikitext"
    path.parent.mkdir(parents=True, exist_ok=True)
    if options.wikitext:
        task = str(path.with_name("wikitext.yaml"))
        files = dict.fromkeys(
            ("train", "validation", "test"), str(Path(options.wikitext).resolve())
        )
        task_file = (
            Path(lm_eval.__file__).parent / "tasks" / "wikitext" / "wikitext.yaml"
        )
        changes = {
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": files},
        }
        # JSON is YAML
        write_json(
            Path(task), {"include": str(task_file), "task": "wikitext"} | changes
        )
    arguments = {
        "pretrained": str(exported(name, folder, options.out)),
        "dtype": "float32",
    }
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = lm_eval.simple_evaluate(
        "hf", arguments, [task], batch_size=1, device=device, bootstrap_iters=0
    )
    write_json(
        path, {"word_perplexity": found["results"]["wikitext"]["word_perplexity,none"]}
    )


def collect(out: Path) -> list[dict[str, Any]]:
    """A row for each task and label with a result or a value of the paper."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for path in sorted(out.glob("finetuning/*/*/results.json")):
        task, name = path.parent.name, path.parent.parent.name
        for seed, result in json.loads(path.read_text())["seeds"].items():
            found.setdefault((task, name.split(".")[0]), {})[f"{name} seed {seed}"] = (
                result["accuracy"]["all"]
            )
    for path in sorted(out.glob("wikitext/*.json")):
        content = json.loads(path.read_text())
        found.setdefault(("wikitext", path.stem.split(".")[0]), {})[path.stem] = (
            content["word_perplexity"]
        )
    rows = []
    for task in [task for task in TASKS if any(key[0] == task for key in found)]:
        for label in dict.fromkeys(
            [*VALUES.get(task, ()), *sorted(key[1] for key in found if key[0] == task)]
        ):
            runs, paper_value = (
                found.get((task, label), {}),
                VALUES.get(task, {}).get(label),
            )
            if runs or paper_value is not None:
                spread = {"mean": statistics.fmean(runs.values())} if runs else {}
                spread |= (
                    {"deviation": statistics.stdev(runs.values())}
                    if len(runs) > 1
                    else {}
                )
                rows.append(
                    {
                        "task": task,
                        "label": label,
                        "paper": paper_value,
                        "runs": runs,
                        **spread,
                    }
                )
    return rows


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each label of a task: here, mean ± standard deviation (number of
    runs), and the paper's value."""
    lines = ["| task | model | here | paper |", "| --- | --- | ---: | ---: |"]
    for row in rows:
        task = (
            "WikiText, word perplexity"
            if row["task"] == "wikitext"
            else f"{row['task'].upper()}, accuracy in %"
        )
        deviation = f" ± {row['deviation']:.2f}" if "deviation" in row else ""
        here = (
            f"{row['mean']:.2f}{deviation} ({len(row['runs'])})" if row["runs"] else "–"
        )
        lines.append(f"| {task} | {row['label']} | {here} | {row['paper'] or '–'} |")
    return "\n".join(lines) + "\n"


def work(options: argparse.Namespace) -> int:
    todo = [
        (finetune, *model, task) for model in options.models for task in options.tasks
    ]
    todo += [(word_perplexity, *model, "wikitext") for model in options.gpt]
    failed = 0
    for function, name, folder, task in todo:
        print(f"table2.py: {name}, {task}", flush=True)
        try:
            function(name, folder, task, options)
        except UserError as error:
            failed += 1
            print(f"table2.py: {name}: {error}", file=sys.stderr, flush=True)
    rows = collect(options.out)
    if not rows:
        raise UserError(f"--out {options.out}: no result is there")
    write_json(options.out / "table2.json", {"rows": rows})
    write_whole(options.out / "table2.md", markdown(rows))
    print(
        f"\n{markdown(rows)}\nwrote table2.json and table2.md in {options.out}",
        flush=True,
    )
    return int(failed > 0)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 if a model failed, 2 for a wrong option, 130 if
    interrupted."""
    own, flags = split_flags(sys.argv[1:] if argv is None else argv)
    parser = Parser(
        prog="table2.py", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    option = parser.add_argument
    option("--models", type=models, default=[], metavar="LABEL=DIR,...", help="BERTs")
    option(
        "--gpt",
        type=models,
        default=[],
        metavar="LABEL=DIR,...",
        help="GPTs, for the perplexity",
    )
    option(
        "--tasks",
        type=names_of(TASKS[:-1]),
        default=("mnli", "race"),
        metavar="NAME,...",
        help="of mnli,race,choice,order",
    )
    option(
        "--wikitext",
        metavar="FILE",
        help='JSON lines with "page", instead of the Hub\'s',
    )
    option(
        "--seeds", default="1,2,3", metavar="N,...", help="of the finetuning (1,2,3)"
    )
    option(
        "--gpus", type=int, default=1, metavar="N", help="processes of a finetuning (1)"
    )
    option(
        "--out",
        type=lambda text: Path(text).resolve(),
        default=ROOT / "out" / "table2",
        metavar="DIR",
    )
    options = parser.parse_args(own)
    options.flags = flags
    return run_program(
        "table2.py", lambda: work(options), "the same command continues from here"
    )


if __name__ == "__main__":
    sys.exit(main())
