"""megatron-2bw finetune: a model of Hugging Face and conversations in, the tuned model
or its adapters out.

Invariant: each step is a command of this project, which is printed; what a step has
finished is not done again, and a run that was stopped goes on from its last checkpoint.
"""

import math
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_2bw.base.argv import groups, merged
from megatron_2bw.base.errors import Parser, UserError
from megatron_2bw.base.files import read_yaml, set_aside
from megatron_2bw.mcore.checkpoints.folder import TRACKER
from megatron_2bw.run.flags import indexed_dataset
from megatron_2bw.run.start import train

EXAMPLE = (
    "model: llama, data: chats.jsonl, output: tuned, lora-rank: 16, epochs: 3, lr: "
    "2e-4, global-batch-size: 32"
)
NEEDED = ("model", "data", "output")
DEFAULTS = (
    "--split 100,0,0 --eval-iters 0 --log-interval 10 --save-interval 500 "
    "--lr-decay-style cosine"
).split()


def main(argv: Sequence[str], prog: str) -> int:
    """megatron-2bw finetune RUN.yaml [flags]. Its status is that of the first step that
    failed."""
    parser = Parser(
        prog=prog,
        description=f"Finetunes by one file. Example: {EXAMPLE}",
        allow_abbrev=False,
    )
    parser.add_argument(
        "file",
        type=Path,
        metavar="RUN.yaml",
        help="model (a folder of save_pretrained), data (JSON lines), output (a "
        "folder), epochs, flags of train gpt",
    )
    options, typed = parser.parse_known_args(argv)
    content = _read(options.file)
    model, data, output = (Path(content.pop(name)) for name in NEEDED)
    epochs = float(content.pop("epochs", 1))
    lines = train.flags_of_file(options.file, content)
    flags = merged(merged(DEFAULTS, lines), typed)
    settings = {}
    for word, *values in groups(flags):
        flag, _, value = word.partition("=")
        settings[flag] = value or "".join(values[:1])

    base = output / "base"
    if not (base / TRACKER).exists():
        words = ["import", model, "--save", base]
        if "--seq-length" in settings:
            words += ["--seq-length", settings["--seq-length"]]
        _step("convert", *words)
    prefix = output / "data"
    if not prefix.with_suffix(".idx").exists():
        words = ["--task", "sft", "--input", data, "--output-prefix", prefix]
        _step("preprocess", *words, "--tokenizer-model", model)
    if "--train-iters" not in settings and "--train-samples" not in settings:
        samples = epochs * _samples(prefix, base, settings)
        batch = int(settings.get("--global-batch-size", "1"))
        flags += ["--train-iters", str(math.ceil(samples / batch))]
    run = output / "run"
    adapters = "--lora-rank" in settings
    start = ["--lora-base", base] if adapters else []
    if (run / TRACKER).exists():
        start += ["--load", run]
    elif not adapters:
        start += ["--load", base, "--finetune"]
    files = ["--sft-data", "--data-path", prefix, *start, "--save", run]
    words = ["train", "gpt", f"@{base / 'model_flags.txt'}", *flags, *files]
    if status := train.main(_shown(*words)[1:], "megatron-2bw train"):
        return status
    tuned = output / ("adapters" if adapters else "model")
    set_aside(tuned)
    _step("convert", "export", run, "--out", tuned, "--like", model)
    return 0


def _read(file: Path) -> dict[str, object]:
    """The lines of RUN.yaml; UserError if one is missing."""
    lines = read_yaml(file)
    content = {}
    if isinstance(lines, dict):
        for name, value in lines.items():
            content[str(name).replace("_", "-")] = value
    for name in NEEDED:
        if not content.get(name):
            raise UserError(
                f"{file}: {name} is missing: give the lines of, for example, {EXAMPLE}"
            )
    return content


def _samples(prefix: Path, base: Path, settings: dict[str, str]) -> float:
    """The samples of an epoch; with --sft-packed about so many, by the tokens."""
    if "--sft-packed" not in settings:
        return indexed_dataset.divided(str(prefix), bert=False)
    length = settings.get("--seq-length")
    if length is None:
        words = shlex.split((base / "model_flags.txt").read_text())
        length = words[words.index("--seq-length") + 1]
    tokens = prefix.with_suffix(".bin").stat().st_size / 4
    return tokens / (int(length) + 1)


def _shown(*words: object) -> list[str]:
    print(f"> megatron-2bw {shlex.join(map(str, words))}", flush=True)
    return [*map(str, words)]


def _step(*words: object) -> None:
    """Run a command of this project in a process of its own."""
    command = [sys.executable, "-m", "megatron_2bw.cli", *_shown(*words)]
    if status := subprocess.call(command):
        sys.exit(status)  # it has said why
