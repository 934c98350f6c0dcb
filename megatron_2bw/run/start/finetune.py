"""megatron-2bw finetune: a model of Hugging Face and conversations in, the tuned model
or its adapters out.

Invariant: each step is a command of this project, which is printed; what a step has
finished is not done again, and a run that was stopped goes on from its last checkpoint.
"""

from __future__ import annotations

import math
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_2bw.base.argv import flag_of, merged
from megatron_2bw.base.errors import Parser, UserError
from megatron_2bw.base.files import read_yaml, set_aside
from megatron_2bw.mcore.checkpoints.folder import TRACKER
from megatron_2bw.run.flags import indexed_dataset
from megatron_2bw.run.start import train

EXAMPLE = (
    "model: llama, data: chats.jsonl, output: tuned, lora-rank: 16, epochs: 3, lr: "
    "2e-4, global-batch-size: 32"
)
OWN = ("model", "data", "output", "epochs")
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
    meaning = (
        "model (a folder of save_pretrained), data (JSON lines), output (a folder), "
        "epochs, flags of train gpt"
    )
    parser.add_argument("file", type=Path, metavar="RUN.yaml", help=meaning)
    known, typed = parser.parse_known_args(argv)
    content = read_yaml(known.file)
    content = content if isinstance(content, dict) else {}
    content = {str(name).replace("_", "-"): value for name, value in content.items()}
    if missing := [name for name in OWN[:3] if not content.get(name)]:
        raise UserError(
            f"{known.file}: {missing[0]} is missing: give the lines of, for example, {EXAMPLE}"
        )
    model, data, output = (Path(content[name]) for name in OWN[:3])
    base, prefix, run = output / "base", output / "data", output / "run"
    lines = train.flags_of_file(
        known.file, {name: value for name, value in content.items() if name not in OWN}
    )
    flags = merged(merged(DEFAULTS, lines), typed)
    given = {
        flag_of(flag): flags[at + 1 : at + 2]
        for at, flag in enumerate(flags)
        if flag.startswith("--")
    }
    if not (base / TRACKER).exists():
        length = (
            ["--seq-length", *given["--seq-length"]] if "--seq-length" in given else []
        )
        _step("convert", "import", model, "--save", base, *length)
    if not prefix.with_suffix(".idx").exists():
        _step(
            "preprocess",
            "--task",
            "sft",
            "--input",
            data,
            "--output-prefix",
            prefix,
            "--tokenizer-model",
            model,
        )
    if "--train-iters" not in given and "--train-samples" not in given:
        samples = float(content.get("epochs", 1)) * indexed_dataset.divided(
            str(prefix), False
        )
        if "--sft-packed" in given:  # about so many, by the tokens
            own = shlex.split((base / "model_flags.txt").read_text())
            length = int(
                given.get("--seq-length", own[own.index("--seq-length") + 1 :])[0]
            )
            tokens = prefix.with_suffix(".bin").stat().st_size / 4
            samples *= (
                tokens / (length + 1) / indexed_dataset.divided(str(prefix), False)
            )
        flags += [
            "--train-iters",
            str(math.ceil(samples / int(given.get("--global-batch-size", ["1"])[0]))),
        ]
    start = (
        ["--lora-base", base]
        if "--lora-rank" in given
        else ["--load", base, "--finetune"]
    )
    if (run / TRACKER).exists():
        start = [*(start if "--lora-rank" in given else []), "--load", run]
    words = [
        f"@{base / 'model_flags.txt'}",
        *flags,
        "--sft-data",
        "--data-path",
        prefix,
        *start,
        "--save",
        run,
    ]
    if status := train.main(_shown("train", "gpt", *words)[1:], "megatron-2bw train"):
        return status
    tuned = output / ("adapters" if "--lora-rank" in given else "model")
    set_aside(tuned)
    _step("convert", "export", run, "--out", tuned, "--like", model)
    return 0


def _shown(*words: object) -> list[str]:
    print(f"> megatron-2bw {shlex.join(map(str, words))}", flush=True)
    return [*map(str, words)]


def _step(*words: object) -> None:
    """Run a command of this project in a process of its own."""
    if status := subprocess.call(
        [sys.executable, "-m", "megatron_2bw.cli", *_shown(*words)]
    ):
        sys.exit(status)  # it has said why
