"""The tasks of scripts/finetune_bert.py: datasets of examples, which are pairs of texts with a label.

An example of a classification has one pair, of a multiple choice one for each choice. `group` names the part of the
validation data that the accuracy is also given for.

`order` and `choice` are made of the built-in corpus, without a download. Invariant: they depend on the corpus alone,
and their validation examples are of the documents that --split 90,10,0 keeps out of pretraining too.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_2bw.data import hub
from megatron_2bw.data.corpus import DEFAULT_MAX_BYTES, read_library
from megatron_2bw.errors import UserError
from megatron_2bw.files import write_whole
from scripts.paper_data import PAPER

TASKS: dict[str, dict[str, Any]] = {
    name: PAPER["finetuning"]["common"] | spec for name, spec in PAPER["finetuning"].items() if name != "common"
}
SMALL = tuple(name for name, spec in TASKS.items() if "examples" in spec)
LINES = 2  # of a span

Pairs = list[tuple[str, str]]


def example(task: str, row: Mapping[str, Any], split: str) -> tuple[Pairs, int, str]:
    """(pairs, label, group) of a row as its dataset has it. Raises LookupError, TypeError or ValueError."""
    if task == "mnli":
        return [(row["premise"], row["hypothesis"])], int(row["label"]), split.removeprefix("validation_")
    if task == "order":
        return [(row["first"], row["second"])], int(row["label"]), split
    if task == "choice":
        return [(row["text"], ending) for ending in row["endings"]], int(row["label"]), split
    # RACE: the answer fills the question's gap, else follows it; it comes before the article, as in Megatron's data.
    question = row["question"]
    filled = [question.replace("_", text) if "_" in question else f"{question} {text}" for text in row["options"]]
    group = re.match("[a-z]+", row["example_id"])[0]  # high19088.txt, middle1.txt
    return [(text, row["article"]) for text in filled], "ABCD".index(row["answer"]), group


def examples(task: str, data: Any, split: str, where: str) -> list[tuple[Pairs, int, str]]:
    """Of all rows; those without a label (-1) are left out. Raises UserError, which names --dataset."""
    spec, found = TASKS[task], []
    for number, row in enumerate(data):
        try:
            pairs, label, group = example(task, row, split)
            if label == -1:
                continue
            good = 0 <= label < (spec.get("choices") or spec["labels"]) and len(pairs) == spec.get("choices", 1)
            good &= all(isinstance(text, str) for pair in pairs for text in pair)
        except (LookupError, TypeError, ValueError, AttributeError):
            good = False
        if not good:
            row = str(row)[:120]
            raise UserError(f"--dataset {where}: row {number} of {split} is no example of --task {task}: {row}")
        found.append((pairs, label, group))
    if not found:
        raise UserError(f"--dataset {where}: {split} is empty")
    return found


def load(task: str, name: str | None, out: Path) -> dict[str, list[tuple[Pairs, int, str]]]:
    """Split -> examples; name: a dataset of the Hub, a folder of SPLIT.jsonl, or one of save_to_disk.

    None stands for the task's dataset on the Hub; a small task's files are written to `out` then.
    """
    splits = ("train", *TASKS[task]["validation"])
    if task in SMALL and name is None:
        write_small(task, out)
        name = str(out)
    where, files = name or TASKS[task]["dataset"], None
    if name and Path(name).expanduser().is_dir() and not hub.saved(name):
        files = {split: f"{split}.jsonl" for split in splits}
        if missing := [file for file in files.values() if not (Path(name).expanduser() / file).is_file()]:
            needs = ", ".join(files.values())
            raise UserError(f"--dataset {name}: it has no {missing[0]}; --task {task} needs {needs}")
    found = hub.load(where, None if name else TASKS[task].get("config"), data_files=files)
    has = list(found) if isinstance(found, dict) else []
    if missing := [split for split in splits if split not in has]:
        raise UserError(f"--dataset {where}: it has no split {missing[0]}, which --task {task} needs")
    return {split: examples(task, found[split], split, where) for split in splits}


# --- small tasks of the built-in corpus ------------------------------------------------------------------------------


def spans(text: str) -> list[str]:
    """The text as consecutive spans of LINES lines that are not empty."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return [" ".join(lines[at : at + LINES]) for at in range(0, len(lines) - LINES + 1, LINES)]


def small(task: str, documents: list[list[str]], count: int, seed: str) -> list[dict[str, Any]]:
    """`count` rows of documents, each of two spans at least.

    order: two consecutive spans, swapped in half of the rows (label 1)
    choice: a span; of the four that may follow it, one does (the label) and three are of other documents
    """
    draw, rows = random.Random(seed), []
    for _ in range(count):
        document = draw.choice(documents)
        at = draw.randrange(len(document) - 1)
        text, following = document[at : at + 2]
        if task == "order":
            label = draw.randrange(2)
            first, second = (following, text) if label else (text, following)
            rows.append({"first": first, "second": second, "label": label})
        else:
            others = draw.sample([other for other in documents if other is not document], TASKS[task]["choices"] - 1)
            label = draw.randrange(TASKS[task]["choices"])
            endings = [draw.choice(other) for other in others]
            rows.append({"text": text, "endings": [*endings[:label], following, *endings[label:]], "label": label})
    return rows


def write_small(task: str, folder: Path, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
    """train.jsonl and validation.jsonl of a small task."""
    folder.mkdir(parents=True, exist_ok=True)
    documents = [spans(text) for text in read_library(max_bytes)]
    at = len(documents) * 9 // 10
    for split, own in (("train", documents[:at]), ("validation", documents[at:])):
        own = [document for document in own if len(document) > 1]
        rows = small(task, own, TASKS[task]["examples"][split], f"{task} {split}")
        write_whole(folder / f"{split}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
