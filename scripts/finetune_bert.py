"""Finetunes a MegatronBert of transformers on a task of Table 2, once for each seed,
and measures the accuracy.

    python scripts/finetune_bert.py --task mnli --model HF_DIR --seeds 1,2,3
    python scripts/finetune_bert.py --task race --model HF_DIR --dataset DIR
    torchrun --nproc-per-node 8 scripts/finetune_bert.py --task race --model HF_DIR --bf16
    python scripts/finetune_bert.py --task choice --model HF_DIR   # without a download

--dataset has train.jsonl and validation.jsonl. All other flags are those of
transformers' TrainingArguments, whose defaults here are the task's settings in
scripts/paper.yaml. After any end the same command continues from the last whole
checkpoint of a seed, and without the seeds that have ended. `choice` and `order` are
made of the built-in corpus; their validation examples are of the documents that --split
90,10,0 keeps out of pretraining too.

Invariant: results.json in --out holds the accuracies of one model under one group of
settings, and only of seeds that ended normally. An input is [CLS] first [SEP] second
[SEP], as in Megatron's pretraining.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import random
import shutil
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_2bw.base.errors import UserError, comma_separated, run_program
from megatron_2bw.base.files import write_json
from megatron_2bw.run.start.torchrun import ROOT
from megatron_2bw.tools.data.corpus import DEFAULT_MAX_BYTES, read_library
from scripts.paper_data import PAPER, Row

TASKS: dict[str, Row] = PAPER["finetuning"]
LINES = 2  # of a span
Pairs = list[tuple[str, str]]


# --- the tasks
# --------------------------------------------------------------------------------------


def example(task: str, row: Row) -> tuple[Pairs, int]:
    """(pairs, label) of a row as its dataset has it: one pair, or one for each
    choice."""
    if task == "mnli":
        return [(row["premise"], row["hypothesis"])], row["label"]
    pairs = []
    if "dataset" not in TASKS[task]:
        for ending in row["endings"]:
            pairs.append((row["text"], ending))
        return pairs, row["label"]
    # RACE: the answer fills the question's gap, else follows it; it comes before the
    # article, as in Megatron's data.
    question = row["question"]
    if "_" not in question:
        question += " _"
    for text in row["options"]:
        pairs.append((question.replace("_", text), row["article"]))
    return pairs, "ABCD".index(row["answer"])


def load(task: str, name: str | None) -> Any:
    """The splits of a task. name: a dataset of the Hub, or a folder of SPLIT.jsonl;
    None: the task's own."""
    import datasets

    spec = TASKS[task]
    found = {}
    if name is None and "dataset" not in spec:
        for split, rows in small_task(task).items():
            found[split] = datasets.Dataset.from_list(rows)
        return found
    if name is None:
        return datasets.load_dataset(spec["dataset"], spec.get("config"))
    if not Path(name).is_dir():
        return datasets.load_dataset(name)
    for split in ("train", *spec["validation"]):
        found[split] = str(Path(name, f"{split}.jsonl"))
    return datasets.load_dataset("json", data_files=found)


def encoded(task: str, rows: Any, tokenizer: Any, length: int) -> Any:
    """A split as tokens, at most `length` a pair; with several pairs each column has a
    list for each of them.

    Rows without a label (-1) are left out.
    """

    def encode(row: Row) -> Row:
        pairs, label = example(task, row)
        texts = pairs[0] if len(pairs) == 1 else zip(*pairs)
        options = {"truncation": True, "max_length": length}
        columns = tokenizer(*texts, **options, return_token_type_ids=True)
        return {**columns, "label": label}

    def labelled(row: Row) -> bool:
        return row["label"] >= 0

    return rows.map(encode, remove_columns=rows.column_names).filter(labelled)


def spans(text: str) -> list[str]:
    """The text as consecutive spans of LINES lines that are not empty."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    del lines[len(lines) // LINES * LINES :]
    return list(map(" ".join, itertools.batched(lines, LINES)))


def small_task(task: str, max_bytes: int = DEFAULT_MAX_BYTES) -> dict[str, list[Row]]:
    """Rows of a span and others. choice: of four one follows it (the label), and three
    are of other documents. order: one that follows it (0), comes before it (1), or is
    of another document (2)."""
    documents = [spans(text) for text in read_library(max_bytes)]
    at = len(documents) * 9 // 10
    choices = TASKS[task].get("choices", 3)
    rows = {}
    for split, own in (("train", documents[:at]), ("validation", documents[at:])):
        own = [document for document in own if len(document) > 1]
        draw = random.Random(f"{task} {split}")
        rows[split] = []
        for _ in range(TASKS[task]["examples"]):
            document = draw.choice(own)
            place = draw.randrange(len(document) - 1)
            rest = [other for other in own if other is not document]
            others = draw.sample(rest, choices - 1)
            label = draw.randrange(choices)
            endings = [draw.choice(other) for other in others]
            first, following = document[place : place + 2]
            if task == "choice":
                endings.insert(label, following)
            else:
                endings = [[following], [first], endings[:1]][label]
                first = following if label == 1 else first
            rows[split].append({"text": first, "endings": endings, "label": label})
    return rows


# --- a run
# --------------------------------------------------------------------------------------


def tokenizer_of(folder: str) -> Any:
    """A tokenizer whose pairs are those of the module's docstring, whatever its own
    template is."""
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    cls = tokenizer.cls_token
    sep = tokenizer.sep_token
    special = [(cls, tokenizer.cls_token_id), (sep, tokenizer.sep_token_id)]
    pair = f"{cls} $A {sep} $B:1 {sep}:1"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        pair=pair, special_tokens=special
    )
    return tokenizer


def open_model(folder: Path, spec: Row) -> Any:
    """The pretrained model with a new head, which the seed of torch draws. Raises
    UserError if anything else is new."""
    import torch
    import transformers

    options = {"output_loading_info": True, "dtype": torch.float32}
    kind = transformers.MegatronBertForMultipleChoice
    if "choices" not in spec:
        kind = transformers.MegatronBertForSequenceClassification
        options["num_labels"] = 3
    model, loaded = kind.from_pretrained(folder, **options)
    for name in sorted(loaded["missing_keys"]):
        if not name.startswith(("classifier.", "bert.pooler.")):
            raise UserError(f"--model {folder}: it lacks {name} of a MegatronBert")
    # The loss is a mean, though forward takes any keyword: the Trainer must divide it
    # by the number of microbatches.
    model.accepts_loss_kwargs = False
    return model


def last_checkpoint(folder: Path) -> str | None:
    """The newest whole checkpoint: the Trainer writes trainer_state.json last, and a
    kill may have cut it."""
    newest = 0
    checkpoint = None
    for path in folder.glob("checkpoint-*"):
        with contextlib.suppress(OSError, ValueError):
            json.loads((path / "trainer_state.json").read_text())
            step = int(path.name.split("-")[1])
            if step > newest:
                newest = step
                checkpoint = str(path)
    return checkpoint


def finetune(options: Namespace, seed: str, data: Any, tokenizer: Any) -> Row:
    """The result of a seed: accuracies in percent, of all examples and of each split if
    there are several.

    `logits` is a digest, by which two runs can be compared bit for bit.
    """
    import transformers

    task = options.task
    spec = TASKS[task]
    folder = options.out / f"seed{seed}"
    transformers.set_seed(int(seed))
    model = open_model(options.model, spec)
    length = min(spec["length"], model.config.max_position_embeddings)
    arguments = {"output_dir": str(folder), "seed": int(seed)}
    for field in dataclasses.fields(transformers.TrainingArguments):
        arguments.setdefault(field.name, getattr(options, field.name))
    collator = transformers.DataCollatorWithPadding
    if "choices" in spec:
        collator = transformers.DataCollatorForMultipleChoice
    splits = {}
    for name in ("train", *spec["validation"]):
        splits[name] = encoded(task, data[name], tokenizer, length)
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(**arguments),
        collator(tokenizer),
        splits.pop("train"),
    )
    checkpoint = last_checkpoint(folder)
    begin = checkpoint or "the model"
    print(f"finetune_bert.py: {task} seed {seed}: starts from {begin}", flush=True)
    trainer.train(resume_from_checkpoint=checkpoint)
    digest = hashlib.sha256()
    accuracy = {"all": 0.0}
    hits = []
    for name, split in splits.items():
        found = trainer.predict(split)
        digest.update(found.predictions.tobytes())
        right = (found.predictions.argmax(-1) == found.label_ids).tolist()
        hits += right
        if len(splits) > 1:
            accuracy[name] = 100 * sum(right) / len(right)
    accuracy["all"] = 100 * sum(hits) / len(hits)
    loss = None
    for entry in trainer.state.log_history:
        loss = entry.get("loss", loss)
    return {
        "accuracy": accuracy,
        "steps": trainer.state.global_step,
        "loss": loss,
        "logits": digest.hexdigest()[:16],
    }


def run(options: Namespace) -> None:
    path = options.out / "results.json"
    first = os.environ.get("RANK", "0") == "0"
    settings = {}
    for name, value in vars(options).items():
        if name not in ("out", "seeds"):
            settings[name] = str(value)
    content = {"settings": settings, "seeds": {}}
    if path.exists():
        content = json.loads(path.read_text())
    if content["settings"] != settings:
        raise UserError(
            f"--out {options.out}: it holds results of other settings; give another --out"
        )
    results = content["seeds"]
    if first:  # also for the checkpoints, which are of the same settings
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, content)
    waiting = [seed for seed in options.seeds if seed not in results]
    if waiting:
        tokenizer = tokenizer_of(str(options.model))
        data = load(options.task, options.dataset)
    for seed in waiting:
        results[seed] = finetune(options, seed, data, tokenizer)
        if first:
            write_json(path, content)
            # checkpoints
            shutil.rmtree(options.out / f"seed{seed}", ignore_errors=True)
    for seed in options.seeds if first else ():
        accuracy = results[seed]["accuracy"].items()
        parts = ", ".join(f"{name} {value:.2f} %" for name, value in accuracy)
        print(f"finetune_bert.py: {options.task} seed {seed}: {parts}", flush=True)


def parse(argv: list[str]) -> Namespace:
    from transformers import HfArgumentParser, TrainingArguments

    parser = HfArgumentParser(
        TrainingArguments, description=__doc__.splitlines()[0], allow_abbrev=False
    )
    option = parser.add_argument
    tasks = tuple(TASKS)
    meaning = "choice, order: of the built-in corpus"
    option("--task", choices=tasks, required=True, help=meaning)
    meaning = "a MegatronBert of transformers, with a tokenizer"
    option("--model", type=Path, required=True, help=meaning)
    meaning = "of the Hub, or a folder of SPLIT.jsonl (default: the task's)"
    option("--dataset", help=meaning)
    option("--out", type=Path, help="default: out/finetune/TASK-MODEL")
    option("--seeds", type=comma_separated, default=("1",), help="default: 1")
    meaning = "examples of an update, of all processes (default: the task's)"
    option("--batch", type=int, help=meaning)
    spec = TASKS[parser.parse_known_args(argv)[0].task]
    parser.set_defaults(
        batch=spec["batch"],
        save_total_limit=1,
        logging_steps=50,
        disable_tqdm=True,
        **spec["train"],
    )
    options = parser.parse_args(argv)
    each = min(options.per_device_train_batch_size, options.batch)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    steps, rest = divmod(options.batch, each * processes)
    if rest:
        parser.error(
            f"--batch {options.batch}: the processes with "
            "--per_device_train_batch_size do not divide it"
        )
    options.per_device_train_batch_size = each
    options.gradient_accumulation_steps = steps
    options.model = options.model.resolve()
    if options.out is None:
        name = f"{options.task}-{options.model.name}"
        options.out = ROOT / "out" / "finetune" / name
    return options


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0, 1 if it failed, 2 for a wrong option, 130 if interrupted."""
    options = parse(sys.argv[1:] if argv is None else argv)
    again = "the same command continues from here"
    return run_program("finetune_bert.py", functools.partial(run, options), again)


if __name__ == "__main__":
    sys.exit(main())
