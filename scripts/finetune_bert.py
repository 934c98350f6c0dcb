"""Finetunes a MegatronBert of transformers on a task of Table 2, once for each seed, and measures the accuracy.

    python scripts/finetune_bert.py --task mnli --model HF_DIR --seeds 1,2,3
    python scripts/finetune_bert.py --task race --model HF_DIR --dataset DIR         # DIR/train.jsonl, validation.jsonl
    torchrun --nproc-per-node 8 scripts/finetune_bert.py --task race --model HF_DIR --precision bf16
    python scripts/finetune_bert.py --task order --model HF_DIR                      # without a download

The Trainer of transformers trains. The settings are those of scripts/paper.yaml (`finetuning`). After any end the same
command continues: from the last whole checkpoint of a seed, and without the seeds that have ended.

Invariant: results.json in --out holds the accuracies of one model under one group of settings, and only of seeds that
ended normally. An input is [CLS] first [SEP] second [SEP], as in Megatron's pretraining.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_2bw.convergence.run import duration
from megatron_2bw.data.hub import tokenizer_of
from megatron_2bw.errors import Parser, UserError, file_errors, numbers_of, run_program
from megatron_2bw.files import write_json
from megatron_2bw.start.torchrun import ROOT
from scripts.finetune_tasks import SMALL, TASKS, load

# --- inputs ----------------------------------------------------------------------------------------------------------


def joined(first: list[int], second: list[int], length: int, cls: int, sep: int) -> tuple[list[int], list[int]]:
    """(tokens, token types) of a pair, at most `length`: the longer text loses tokens from its end."""
    room = length - 3
    of_first = max(room - len(second), min(len(first), (room + 1) // 2))
    first = first[:of_first]
    second = second[: room - len(first)]
    return [cls, *first, sep, *second, sep], [0] * (len(first) + 2) + [1] * (len(second) + 1)


def dataset(examples: list, tokenizer: Any, length: int, types: int) -> Any:
    """The examples as tokens; with several pairs each column holds a list for each of them."""
    import datasets

    def encode(rows: dict[str, list]) -> dict[str, list]:
        found: dict[str, list] = {"input_ids": [], "token_type_ids": [], "attention_mask": []}
        for pairs in rows["pairs"]:
            ids = tokenizer([text for pair in pairs for text in pair], add_special_tokens=False)["input_ids"]
            special = tokenizer.cls_token_id, tokenizer.sep_token_id
            inputs = [joined(one, two, length, *special) for one, two in zip(ids[::2], ids[1::2])]
            columns = zip(*[(tokens, of, [1] * len(tokens)) for tokens, of in inputs])
            for column, value in zip(found.values(), columns):
                column.append(list(value) if len(value) > 1 else value[0])
        if types < 2:
            del found["token_type_ids"]
        return found

    rows = datasets.Dataset.from_dict({"pairs": [pairs for pairs, _, _ in examples]})
    rows = rows.map(encode, batched=True, remove_columns="pairs", desc="tokens")
    return rows.add_column("label", [label for _, label, _ in examples])


def open_tokenizer(options: argparse.Namespace, vocab_size: int) -> Any:
    where = f"--tokenizer {options.tokenizer}" if options.tokenizer else f"--model {options.model} (or --tokenizer)"
    tokenizer = tokenizer_of(where, options.tokenizer or options.model, vocab_size)
    missing = [token for token in ("cls", "sep", "pad") if getattr(tokenizer, f"{token}_token_id") is None]
    if missing:
        raise UserError(f"{where}: the tokenizer has no {missing[0]} token, which a BERT needs")
    return tokenizer


# --- the model -------------------------------------------------------------------------------------------------------


def config_of(folder: Path) -> dict[str, Any]:
    """config.json, checked; it must have layer_norm_eps, for transformers' default, 1e-12, is not Megatron's 1e-5."""
    with file_errors(f"--model {folder}"):
        try:
            config = json.loads((folder / "config.json").read_text())
        except ValueError:
            raise UserError(f"--model {folder}: config.json is not JSON") from None
    if config.get("model_type") != "megatron-bert":
        what = f"its model_type is {config.get('model_type')}, not megatron-bert"
        raise UserError(f"--model {folder}: {what}; give what `megatron-2bw convert export` writes of a BERT")
    for key in ("layer_norm_eps", "max_position_embeddings", "vocab_size"):
        if not isinstance(config.get(key), (int, float)):
            raise UserError(f"--model {folder}: config.json has no {key}")
    return config


def weights_of(folder: Path) -> str:
    """A digest of the folder's weights and configuration."""
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")])
    if not files:
        raise UserError(f"--model {folder}: it holds no weights (*.safetensors)")
    digest = hashlib.sha256()
    for path in (folder / "config.json", *files):
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def open_model(folder: Path, spec: dict[str, Any]) -> Any:
    """The pretrained model with a new head, which the seed of torch draws. Raises UserError if anything else is new."""
    import torch
    import transformers

    kind = "MultipleChoice" if "choices" in spec else "SequenceClassification"
    labels = {} if "choices" in spec else {"num_labels": spec["labels"]}
    load = getattr(transformers, f"MegatronBertFor{kind}").from_pretrained
    try:
        model, loaded = load(folder, output_loading_info=True, dtype=torch.float32, **labels)
    except Exception as error:  # of transformers, safetensors
        line = str(error).strip().splitlines()[0]
        raise UserError(f"--model {folder}: its weights cannot be loaded, {line}") from None
    lacking = [name for name in loaded["missing_keys"] if not name.startswith(("classifier.", "bert.pooler."))]
    if lacking:
        others = len(lacking) - 1
        raise UserError(f"--model {folder}: it lacks {lacking[0]} and {others} other weights of a MegatronBert")
    return model


# --- training --------------------------------------------------------------------------------------------------------


def last_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint: the Trainer writes trainer_state.json last."""
    for path in sorted(folder.glob("checkpoint-*"), key=lambda path: -int(path.name.split("-")[1])):
        try:
            json.loads((path / "trainer_state.json").read_text())
            return path
        except (OSError, ValueError):  # the run ended while it was written
            continue
    return None


def progress(title: str) -> Any:
    """A callback of the Trainer that prints a line at each of its logs."""
    from transformers import TrainerCallback

    class Progress(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            self.begun, self.first = time.monotonic(), state.global_step

        def on_log(self, args, state, control, logs=None, **kwargs):
            done, seconds = state.global_step - self.first, time.monotonic() - self.begun
            if state.is_world_process_zero and "loss" in logs and done:
                left = duration((state.max_steps - state.global_step) * seconds / done)
                head = f"{title}: step {state.global_step}/{state.max_steps}, loss {float(logs['loss']):.4f}"
                print(f"{head}, {duration(seconds)} elapsed, about {left} left", flush=True)

    return Progress()


def trainer_of(options: argparse.Namespace, seed: int, title: str, train: Any, tokenizer: Any) -> Any:
    import transformers

    spec, folder = options.spec, options.out / f"seed{seed}"
    transformers.set_seed(seed)
    model = open_model(options.model, spec)
    # The loss is a mean, though forward takes any keyword: the Trainer must divide it by the number of microbatches.
    model.accepts_loss_kwargs = False
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=spec["epochs"],
        max_steps=options.max_steps or -1,
        learning_rate=spec["lr"],
        lr_scheduler_type="linear",
        warmup_steps=spec["warm_up"],  # below 1: a share of all steps
        weight_decay=spec["weight_decay"],
        max_grad_norm=spec["clip"],
        per_device_train_batch_size=options.micro_batch_size,
        per_device_eval_batch_size=options.micro_batch_size,
        gradient_accumulation_steps=spec["batch"] // (options.micro_batch_size * options.world),
        save_steps=options.save_steps,
        save_total_limit=1,
        logging_steps=options.log_steps,
        disable_tqdm=True,
        report_to=[],
        seed=seed,
        use_cpu=options.device == "cpu",
        bf16=options.precision == "bf16",
        fp16=options.precision == "fp16",
    )
    name = "DataCollatorForMultipleChoice" if "choices" in spec else "DataCollatorWithPadding"
    collator = getattr(transformers, name)(tokenizer)
    trainer = transformers.Trainer(model, arguments, collator, train)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.add_callback(progress(title))
    return trainer


def accuracy(logits: Any, examples: list) -> dict[str, float]:
    """The share of right answers in percent: of all examples, and of each group if there are several."""
    right = [int(row.argmax()) == label for row, (_, label, _) in zip(logits, examples, strict=True)]
    groups = {group for _, _, group in examples}
    of = {"all": right}
    if len(groups) > 1:
        of |= {name: [hit for hit, (*_, group) in zip(right, examples) if group == name] for name in sorted(groups)}
    return {name: 100 * sum(hits) / len(hits) for name, hits in of.items()}


def finetune(options: argparse.Namespace, seed: int, title: str, data: dict[str, Any], tests: list, tokenizer: Any):
    """The result of a seed; `logits` is a digest, by which two runs can be compared bit for bit."""
    trainer = trainer_of(options, seed, title, data["train"], tokenizer)
    checkpoint = last_checkpoint(options.out / f"seed{seed}")
    if checkpoint and trainer.is_world_process_zero():
        print(f"{title}: continues from {checkpoint.name}", flush=True)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    logits = trainer.predict(data["validation"]).predictions
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "accuracy": accuracy(logits, tests),
        "steps": trainer.state.global_step,
        "loss": losses[-1] if losses else None,
        "logits": hashlib.sha256(logits.tobytes()).hexdigest()[:16],
    }


# --- the whole -------------------------------------------------------------------------------------------------------


def stored(options: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """results.json, or a new one. Raises UserError if it is of other settings."""
    path = options.out / "results.json"
    if not path.exists():
        return {"settings": settings, "seeds": {}}
    try:
        content = json.loads(path.read_text())
        before, seeds = dict(content["settings"]), dict(content["seeds"])
    except (OSError, ValueError, LookupError, TypeError):
        raise UserError(f"{path}: not what this script writes; give another --out") from None
    other = [name for name in settings | before if settings.get(name) != before.get(name)]
    if other:
        name, was, now = other[0], before.get(other[0]), settings.get(other[0])
        raise UserError(f"--out {options.out}: it holds results with {name} {was}, not {now}; give another --out")
    return {"settings": settings, "seeds": seeds}


def run(options: argparse.Namespace) -> int:
    try:
        import accelerate  # noqa: F401
    except ImportError:
        line = "accelerate, which the Trainer needs, is missing: pip install 'megatron_2bw[finetune]'"
        raise UserError(line) from None
    config = config_of(options.model)
    spec = options.spec
    length = min(spec["length"], config["max_position_embeddings"])
    names = ("epochs", "lr", "warm_up", "weight_decay", "clip", "batch")
    settings = {"task": options.task, "weights": weights_of(options.model)}
    settings |= {"dataset": options.dataset or spec.get("dataset", "built-in"), "length": length}
    settings |= {name: spec[name] for name in names} | {"max_steps": options.max_steps, "precision": options.precision}
    with file_errors(f"--out {options.out}"):
        options.out.mkdir(parents=True, exist_ok=True)
        content = stored(options, settings)
        first = os.environ.get("RANK", "0") == "0"
        if first:
            write_json(options.out / "results.json", content)
    waiting = [seed for seed in options.seeds if seed not in content["seeds"]]
    if waiting:
        import transformers

        transformers.utils.logging.set_verbosity_error()
        tokenizer = open_tokenizer(options, config["vocab_size"])
        found = load(options.task, options.dataset, options.out / "data")
        tests = [each for split in spec["validation"] for each in found[split]]
        both = {"train": found["train"], "validation": tests}
        types = config.get("type_vocab_size", 2)
        data = {split: dataset(own, tokenizer, length, types) for split, own in both.items()}
    for seed in waiting:
        title = f"finetune_bert.py: {options.task} seed {seed} ({options.seeds.index(seed) + 1}/{len(options.seeds)})"
        result = finetune(options, int(seed), title, data, tests, tokenizer)
        content["seeds"][seed] = result
        if first:
            write_json(options.out / "results.json", content)
            shutil.rmtree(options.out / f"seed{seed}", ignore_errors=True)  # checkpoints
    if first:
        for seed in options.seeds:
            found = content["seeds"][seed]["accuracy"]
            parts = ", ".join(f"{name} {value:.2f} %" for name, value in found.items())
            print(f"finetune_bert.py: {options.task} seed {seed}: {parts}", flush=True)
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="finetune_bert.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    option = parser.add_argument
    option("--task", choices=tuple(TASKS), required=True, help=f"{', '.join(SMALL)}: of the built-in corpus")
    option("--model", type=Path, required=True, metavar="DIR", help="a MegatronBert of transformers")
    option("--tokenizer", metavar="DIR", help="default: that of --model")
    option("--dataset", metavar="NAME|DIR", help="instead of the task's on the Hub: see scripts/finetune_tasks.py")
    option("--out", type=Path, metavar="DIR", help="default: out/finetune/TASK-MODEL")
    option("--seeds", type=numbers_of, default=("1",), metavar="N,...", help="default: 1")
    for name in ("epochs", "lr", "batch", "length"):
        kind = float if name in ("epochs", "lr") else int
        option(f"--{name}", type=kind, metavar="N", help="default: that of scripts/paper.yaml")
    option("--micro-batch-size", type=int, metavar="N", help="examples of one forward (default: as --lr)")
    option("--max-steps", type=int, default=0, metavar="N", help="end after N updates instead of --epochs")
    option("--save-steps", type=int, default=500, metavar="N", help="updates between checkpoints (500)")
    option("--log-steps", type=int, default=50, metavar="N", help="updates between lines (50)")
    option("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="default: %(default)s")
    option("--device", choices=("auto", "cpu"), default="auto", help="default: a GPU if there is one")
    options = parser.parse_args(argv)
    options.spec = dict(TASKS[options.task])
    for name in ("epochs", "lr", "batch", "length"):
        if (value := getattr(options, name)) is not None:
            options.spec[name] = value
        if not (math.isfinite(options.spec[name]) and options.spec[name] > 0):
            parser.error(f"--{name} {options.spec[name]}: it must be above 0")
    options.micro_batch_size = options.micro_batch_size or min(options.spec["micro"], options.spec["batch"])
    for name, least in (("micro_batch_size", 1), ("max_steps", 0), ("save_steps", 1), ("log_steps", 1)):
        if (value := getattr(options, name)) < least:
            parser.error(f"--{name.replace('_', '-')} {value}: it must be at least {least}")
    options.world = int(os.environ.get("WORLD_SIZE", "1"))
    batch, micro = options.spec["batch"], options.micro_batch_size
    if batch % (micro * options.world):
        parser.error(f"--batch {batch}: {options.world} processes with --micro-batch-size {micro} do not divide it")
    if options.spec["length"] < 8:
        parser.error(f"--length {options.spec['length']}: it must be at least 8")
    options.model = options.model.expanduser()
    options.out = options.out or ROOT / "out" / "finetune" / f"{options.task}-{options.model.resolve().name}"
    return options


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0, 1 if it failed, 2 for a wrong option, 130 if interrupted."""
    options = parse(sys.argv[1:] if argv is None else argv)
    return run_program("finetune_bert.py", lambda: run(options), "the same command continues from here")


if __name__ == "__main__":
    sys.exit(main())
