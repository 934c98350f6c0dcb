"""Finetunes a MegatronBert of transformers on a task of Table 2, once for each seed, and measures the accuracy.

    python scripts/finetune_bert.py --task mnli --model HF_DIR --seeds 1,2,3
    python scripts/finetune_bert.py --task race --model HF_DIR --dataset DIR         # DIR/train.jsonl, validation.jsonl
    torchrun --nproc-per-node 8 scripts/finetune_bert.py --task race --model HF_DIR --precision bf16
    python scripts/finetune_bert.py --task order --model HF_DIR                      # without a download

The Trainer of transformers trains, with the settings of scripts/paper.yaml (`finetuning`). After any end the same
command continues from the last whole checkpoint of a seed, and without the seeds that have ended.
`order` and `choice` are made of the built-in corpus. Their validation examples are of the documents that --split
90,10,0 keeps out of pretraining too.

Invariant: results.json in --out holds the accuracies of one model under one group of settings, and only of seeds that
ended normally. An input is [CLS] first [SEP] second [SEP], as in Megatron's pretraining.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_2bw.data.corpus import DEFAULT_MAX_BYTES, read_library
from megatron_2bw.errors import Parser, UserError, numbers_of, run_program
from megatron_2bw.files import write_json
from megatron_2bw.start.torchrun import ROOT
from scripts.paper_data import PAPER

TASKS: dict[str, dict[str, Any]] = {
    name: PAPER["finetuning"]["common"] | spec for name, spec in PAPER["finetuning"].items() if name != "common"
}
SMALL = tuple(name for name, spec in TASKS.items() if "examples" in spec)
LINES = 2  # of a span
Pairs = list[tuple[str, str]]


def example(task: str, row: Mapping[str, Any], split: str) -> tuple[Pairs, int, str]:
    """(pairs, label, group) of a row as its dataset has it: one pair, or one for each choice. The accuracy of a group
    is also given."""
    if task == "mnli":
        return [(row["premise"], row["hypothesis"])], row["label"], split.removeprefix("validation_")
    if task == "order":
        return [(row["first"], row["second"])], row["label"], split
    if task == "choice":
        return [(row["text"], ending) for ending in row["endings"]], row["label"], split
    # RACE: the answer fills the question's gap, else follows it; it comes before the article, as in Megatron's data.
    question = row["question"]
    filled = [question.replace("_", text) if "_" in question else f"{question} {text}" for text in row["options"]]
    group = re.match("[a-z]+", row["example_id"])[0]  # high19088.txt, middle1.txt
    return [(text, row["article"]) for text in filled], "ABCD".index(row["answer"]), group


def load(task: str, name: str | None) -> dict[str, list[tuple[Pairs, int, str]]]:
    """The examples for training and for validation; those without a label (-1) are left out.

    name: a dataset of the Hub, or a folder of SPLIT.jsonl; None: the task's own
    """
    import datasets

    spec = TASKS[task]
    if name is None and task in SMALL:
        found: Mapping[str, Any] = small_task(task)
    elif name and Path(name).is_dir():
        files = {split: str(Path(name, f"{split}.jsonl")) for split in ("train", *spec["validation"])}
        found = datasets.load_dataset("json", data_files=files)
    else:
        found = datasets.load_dataset(name or spec["dataset"], None if name else spec.get("config"))
    examples = {split: [example(task, row, split) for row in found[split]] for split in ("train", *spec["validation"])}
    tests = [each for split in spec["validation"] for each in examples[split]]
    return {
        split: [each for each in own if each[1] >= 0] for split, own in (("train", examples["train"]), ("tests", tests))
    }


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


def small_task(task: str, max_bytes: int = DEFAULT_MAX_BYTES) -> dict[str, list[dict[str, Any]]]:
    documents, rows = [spans(text) for text in read_library(max_bytes)], {}
    at = len(documents) * 9 // 10
    for split, own in (("train", documents[:at]), ("validation", documents[at:])):
        own = [document for document in own if len(document) > 1]
        rows[split] = small(task, own, TASKS[task]["examples"][split], f"{task} {split}")
    return rows


def dataset(examples: list, tokenizer: Any, length: int) -> Any:
    """The examples as tokens, at most `length` a pair; with several pairs each column has a list for each of them."""
    import datasets

    def encode(row: dict[str, Any]) -> dict[str, list]:
        inputs = tokenizer(*zip(*row["pairs"]), truncation=True, max_length=length, return_token_type_ids=True)
        return {name: value if len(value) > 1 else value[0] for name, value in inputs.items()}

    rows = datasets.Dataset.from_dict({"pairs": [pairs for pairs, _, _ in examples]})
    return rows.map(encode, remove_columns="pairs").add_column("label", [label for _, label, _ in examples])


def tokenizer_of(folder: str) -> Any:
    """A tokenizer whose pairs are those of the module's docstring, whatever its own template is."""
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    cls, sep = tokenizer.cls_token, tokenizer.sep_token
    special = [(cls, tokenizer.cls_token_id), (sep, tokenizer.sep_token_id)]
    pair = f"{cls} $A {sep} $B:1 {sep}:1"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(pair=pair, special_tokens=special)
    return tokenizer


def open_model(folder: Path, spec: dict[str, Any]) -> Any:
    """The pretrained model with a new head, which the seed of torch draws. Raises UserError if anything else is new."""
    import torch
    import transformers

    if "layer_norm_eps" not in json.loads((folder / "config.json").read_text()):
        raise UserError(
            f"--model {folder}: config.json has no layer_norm_eps, and transformers' default is not Megatron's"
        )
    kind, labels = (
        ("MultipleChoice", {}) if "choices" in spec else ("SequenceClassification", {"num_labels": spec["labels"]})
    )
    load = getattr(transformers, f"MegatronBertFor{kind}").from_pretrained
    model, loaded = load(folder, output_loading_info=True, dtype=torch.float32, **labels)
    if lacking := [name for name in loaded["missing_keys"] if not name.startswith(("classifier.", "bert.pooler."))]:
        raise UserError(f"--model {folder}: it lacks {sorted(lacking)[0]} of a MegatronBert")
    # The loss is a mean, though forward takes any keyword: the Trainer must divide it by the number of microbatches.
    model.accepts_loss_kwargs = False
    return model


def last_checkpoint(folder: Path) -> str | None:
    """The newest whole checkpoint: the Trainer writes trainer_state.json last, and a kill may have cut it."""
    for path in sorted(folder.glob("checkpoint-*"), key=lambda path: -int(path.name.split("-")[1])):
        try:
            json.loads((path / "trainer_state.json").read_text())
            return str(path)
        except (OSError, ValueError):
            continue
    return None


def accuracy(logits: Any, examples: list) -> dict[str, float]:
    """The share of right answers in percent: of all examples, and of each group if there are several."""
    right = [int(row.argmax()) == label for row, (_, label, _) in zip(logits, examples, strict=True)]
    groups = {group for _, _, group in examples}
    of = {"all": right}
    if len(groups) > 1:
        of |= {name: [hit for hit, (*_, group) in zip(right, examples) if group == name] for name in sorted(groups)}
    return {name: 100 * sum(hits) / len(hits) for name, hits in of.items()}


def finetune(options: argparse.Namespace, seed: str, examples: dict[str, list], tokenizer: Any) -> dict[str, Any]:
    """The result of a seed; `logits` is a digest, by which two runs can be compared bit for bit."""
    import transformers

    spec, folder, micro = options.spec, options.out / f"seed{seed}", options.micro_batch_size
    transformers.set_seed(int(seed))
    model = open_model(options.model, spec)
    length = min(spec["length"], model.config.max_position_embeddings)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=spec["epochs"],
        max_steps=options.max_steps or -1,
        learning_rate=spec["lr"],
        warmup_steps=spec["warm_up"],  # below 1: a share of all steps
        weight_decay=spec["weight_decay"],
        max_grad_norm=spec["clip"],
        per_device_train_batch_size=micro,
        per_device_eval_batch_size=micro,
        gradient_accumulation_steps=spec["batch"] // (micro * int(os.environ.get("WORLD_SIZE", "1"))),
        save_steps=options.save_steps,
        save_total_limit=1,
        logging_steps=options.log_steps,
        disable_tqdm=True,
        report_to=[],
        seed=int(seed),
        use_cpu=options.device == "cpu",
        bf16=options.precision == "bf16",
        fp16=options.precision == "fp16",
    )
    collator = getattr(transformers, f"DataCollator{'ForMultipleChoice' if 'choices' in spec else 'WithPadding'}")
    data = {split: dataset(own, tokenizer, length) for split, own in examples.items()}
    trainer = transformers.Trainer(model, arguments, collator(tokenizer), data["train"])
    checkpoint = last_checkpoint(folder)
    print(f"finetune_bert.py: {options.task} seed {seed}: starts from {checkpoint or 'the model'}", flush=True)
    trainer.train(resume_from_checkpoint=checkpoint)
    logits = trainer.predict(data["tests"]).predictions
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    digest = hashlib.sha256(logits.tobytes()).hexdigest()[:16]
    found = {"accuracy": accuracy(logits, examples["tests"]), "steps": trainer.state.global_step}
    return found | {"loss": losses[-1] if losses else None, "logits": digest}


def run(options: argparse.Namespace) -> int:
    path, first = options.out / "results.json", os.environ.get("RANK", "0") == "0"
    names = ("task", "model", "dataset", "max_steps", "precision")
    settings = options.spec | {name: getattr(options, name) for name in names} | {"model": str(options.model.resolve())}
    content = json.loads(path.read_text()) if path.exists() else {"settings": settings, "seeds": {}}
    if content["settings"] != settings:
        raise UserError(f"--out {options.out}: it holds results of other settings; give another --out")
    if first:  # also for the checkpoints, which are of the same settings
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, content)
    if waiting := [seed for seed in options.seeds if seed not in content["seeds"]]:
        tokenizer, examples = tokenizer_of(options.tokenizer or options.model), load(options.task, options.dataset)
    for seed in waiting:
        content["seeds"][seed] = finetune(options, seed, examples, tokenizer)
        if first:
            write_json(path, content)
            shutil.rmtree(options.out / f"seed{seed}", ignore_errors=True)  # checkpoints
    for seed in options.seeds if first else ():
        parts = ", ".join(f"{name} {value:.2f} %" for name, value in content["seeds"][seed]["accuracy"].items())
        print(f"finetune_bert.py: {options.task} seed {seed}: {parts}", flush=True)
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="finetune_bert.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    option = parser.add_argument
    option("--task", choices=tuple(TASKS), required=True, help=f"{', '.join(SMALL)}: of the built-in corpus")
    option("--model", type=Path, required=True, metavar="DIR", help="a MegatronBert of transformers")
    option("--tokenizer", metavar="DIR", help="default: that of --model")
    option("--dataset", metavar="NAME|DIR", help="of the Hub, or a folder of SPLIT.jsonl (default: the task's)")
    option("--out", type=Path, metavar="DIR", help="default: out/finetune/TASK-MODEL")
    option("--seeds", type=numbers_of, default=("1",), metavar="N,...", help="default: 1")
    for name, kind in {"epochs": float, "lr": float, "batch": int, "length": int}.items():
        option(f"--{name}", type=kind, metavar="N", help="default: that of scripts/paper.yaml")
    option("--micro-batch-size", type=int, metavar="N", help="examples of one forward (default: as --lr)")
    option("--max-steps", type=int, default=0, metavar="N", help="end after N updates instead of --epochs")
    option("--save-steps", type=int, default=500, metavar="N", help="updates between checkpoints (500)")
    option("--log-steps", type=int, default=50, metavar="N", help="updates between lines (50)")
    option("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="default: %(default)s")
    option("--device", choices=("auto", "cpu"), default="auto", help="default: a GPU if there is one")
    options = parser.parse_args(argv)
    own = {name: value for name in ("epochs", "lr", "batch", "length") if (value := getattr(options, name)) is not None}
    options.spec = TASKS[options.task] | own
    options.micro_batch_size = options.micro_batch_size or min(options.spec["micro"], options.spec["batch"])
    if options.spec["batch"] % (options.micro_batch_size * int(os.environ.get("WORLD_SIZE", "1"))):
        parser.error(f"--batch {options.spec['batch']}: the processes with --micro-batch-size do not divide it")
    options.out = options.out or ROOT / "out" / "finetune" / f"{options.task}-{options.model.resolve().name}"
    return options


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0, 1 if it failed, 2 for a wrong option, 130 if interrupted."""
    options = parse(sys.argv[1:] if argv is None else argv)
    return run_program("finetune_bert.py", lambda: run(options), "the same command continues from here")


if __name__ == "__main__":
    sys.exit(main())
