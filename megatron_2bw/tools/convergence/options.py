"""The command line of megatron-2bw convergence, and the commands of the runs that it
asks for.

Invariant: a wrong option raises UserError, one line that names the flag; nothing runs
here, and only the built-in corpus is written. The commands of two variants with the
same seed and learning rate differ only in the variant's flags and the folder of
checkpoints.
"""

import itertools
import json
import math
import re
import shlex
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_2bw.base.argv import flag_of, split_flags
from megatron_2bw.base.command_line import TYPES, parser_of
from megatron_2bw.base.errors import (
    Parser,
    UserError,
    comma_separated,
    file_errors,
    list_of,
    whole_number,
)
from megatron_2bw.base.files import write_whole
from megatron_2bw.run.flags.plain_torch import PLAIN_TORCH
from megatron_2bw.run.start.torchrun import log_interval, torchrun
from megatron_2bw.tools.data.corpus import (
    DEFAULT_MAX_BYTES,
    DEFAULT_VOCAB_SIZE,
    Corpus,
    build_corpus,
    read_library,
)
from megatron_2bw.tools.planner.descriptions.inputs import numbers

ITERATIONS = 1500
SEQUENCE = 128
WARM_UP = 100
BATCH = {"gpt": 4, "bert": 16}  # sequences; a BERT learns from 15 % of their tokens

MODEL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --attention-dropout 0 "
    "--hidden-dropout 0"
).split()
GPT = "--position-embedding-type rope --untie-embeddings-and-output-weights".split()
OPTIMIZER = "--lr-decay-style cosine --adam-beta2 0.95 --clip-grad 1.0 --weight-decay 0.1".split()
EVALUATION = "--eval-iters 25".split()
SPLIT = "--split 90,10,0".split()

# Flags that this script sets for every run, and flags that bring data or a tokenizer.
OWN = "--lr --seed --device --pipeline-schedule --save --load --train-samples".split()
SPLIT_DATA = (
    "--train-data-path --valid-data-path --test-data-path --per-split-data-args-path"
).split()
OWN_DATA = "--data-path --data-args-path --mock-data --tokenizer-type".split()
VARIANTS = {
    "vanilla": "--pipeline-schedule pipedream-flush",
    "2bw": "--pipeline-schedule 2bw",
    # the paper's rule
    "paper": "--pipeline-schedule 2bw --two-bw-late all --two-bw-correction none",
}
PROG = "megatron-2bw convergence"


@dataclass(frozen=True)
class Run:
    variant: str
    lr: str  # as typed
    seed: int
    folder: Path
    command: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return f"{self.variant} lr {self.lr} seed {self.seed}"

    @property
    def log(self) -> Path:
        return self.folder / "train.log"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


def first_flag(words: Sequence[str], flags: Sequence[str]) -> str | None:
    """The first of the flags that is among the words."""
    typed = set(map(flag_of, words))
    return next((flag for flag in flags if flag in typed), None)


def parse_options(argv: Sequence[str], prog: str = PROG) -> Namespace:
    """The options, checked; `.flags` are Megatron's and `.variants` maps labels to the
    flags of each."""
    own, flags = split_flags(argv)
    types = TYPES | {
        "variants": list_of([*VARIANTS]),
        "numbers": numbers,
        "rates": rates,
    }
    parser = parser_of(prog, __file__, types)
    options = parser.parse_args(own)
    megatron = Parser(prog=prog, add_help=False, allow_abbrev=False)
    megatron.add_argument(
        "--train-iters",
        type=whole_number(1),
        required=options.no_defaults,
        default=ITERATIONS,
    )
    megatron.add_argument("--seq-length", default=str(SEQUENCE))
    sizes, _ = megatron.parse_known_args(flags)
    options.iterations = sizes.train_iters
    options.sequence = sizes.seq_length
    options.flags = flags
    options.again = shlex.join(["megatron-2bw", "convergence", *argv])
    out = options.out or Path("out/convergence", options.name)
    options.out = out.absolute()
    flag = first_flag(flags, OWN)
    if flag:
        parser.error(
            f"{flag}: it is set before the --, or by --variant; leave it out after the --"
        )
    options.variants = _variants(parser, options)
    return options


def rates(text: str) -> tuple[str, ...]:
    """A comma-separated list of numbers, as they are typed, for argparse. ValueError
    for others."""
    typed = comma_separated(text)
    for rate in typed:
        float(rate)
    return typed


def _variants(parser: Parser, options: Namespace) -> dict[str, list[str]]:
    """The flags of each variant by its label, vanilla first."""
    variants = {}
    for label in ("vanilla", *options.variants):
        variants[label] = VARIANTS[label].split()
    for text in options.variant:
        label, _, words = text.partition("=")
        if not re.fullmatch(r"\w[\w.+-]*", label) or not words or label in variants:
            parser.error(
                f'--variant "{text}": give LABEL=FLAGS, with a label that no other variant has'
            )
        flags = shlex.split(words)
        if not first_flag(flags, ["--pipeline-schedule"]):
            flags = VARIANTS["2bw"].split() + flags
        variants[label] = flags
    return variants


# --- commands
# --------------------------------------------------------------------------------------


def eval_interval(iterations: int) -> int:
    """About ten validations. Not a divisor: Megatron also validates after the last
    iteration, and would do so twice."""
    interval = max(2, math.ceil(iterations / 10))
    while iterations % interval == 0:
        interval += 1
    return interval


def defaults(options: Namespace, flags: Sequence[str]) -> list[str]:
    """Default flags; the user's `flags` come later and override them."""
    if options.no_defaults:
        return []
    micro = max(1, BATCH[options.task] // options.ranks)
    # enough for data-parallel ranks, and for the microbatches that 2BW's stages need
    step = micro * options.ranks
    words = f"""
        --micro-batch-size {micro}
        --global-batch-size {step * math.ceil(BATCH[options.task] / step)}
        --seq-length {options.sequence} --max-position-embeddings {options.sequence}
        --train-iters {options.iterations}
        --log-interval {log_interval(options.iterations)}
        --eval-interval {eval_interval(options.iterations)}
    """.split()
    if not first_flag(flags, ["--lr-warmup-fraction", "--lr-warmup-samples"]):
        words += ["--lr-warmup-iters", str(min(WARM_UP, options.iterations // 2))]
    words += MODEL
    if options.task == "gpt":
        words += GPT
    words += [*PLAIN_TORCH, *OPTIMIZER]
    if not first_flag(flags, SPLIT_DATA):  # Megatron takes one of them
        words += SPLIT
    return words + EVALUATION


def command(options: Namespace, data: Sequence[str], run: Run) -> tuple[str, ...]:
    """The command of a run: torchrun, the entry script, the defaults, the user's flags,
    the variant's."""
    flags = [*options.flags, *options.variants[run.variant]]
    own = ["--device", options.device, "--seed", str(run.seed), "--lr", run.lr]
    if not options.no_defaults:
        own += ["--min-lr", f"{float(run.lr) / 10:g}"]
    if first_flag(options.flags, ["--save-interval"]):
        checkpoints = str(run.checkpoints)
        own += ["--save", checkpoints, "--load", checkpoints]
    return (
        *torchrun(options.ranks, options.task),
        *defaults(options, flags),
        *data,
        *own,
        *flags,
    )


def built_in(options: Namespace) -> list[str]:
    """The flags of the built-in corpus, built at the first call; none if the user has
    data or a tokenizer.

    For BERT the same text as sentences with a WordPiece vocabulary, built next to it.
    The data preparation writes the .idx last, so all is there if it is; a call that was
    ended can be repeated.
    """
    if options.no_defaults or first_flag(options.flags, OWN_DATA + SPLIT_DATA):
        return []
    corpus = build_corpus()
    if options.task == "gpt":
        return corpus.flags()
    folder = corpus.prefix.parent
    folder = folder.with_name(f"{folder.name}-sentences")
    sentences = Corpus(folder / "corpus", folder / "corpus-tokenizer")
    if not sentences.prefix.with_suffix(".idx").exists():
        _prepare_sentences(folder / "text.jsonl", sentences.prefix)
    return sentences.flags()


def _prepare_sentences(text: Path, prefix: Path) -> None:
    with file_errors(f"--task bert: {text.parent}"):
        text.parent.mkdir(exist_ok=True)
        if not text.exists():
            documents = read_library(DEFAULT_MAX_BYTES)
            lines = [json.dumps({"text": document}) + "\n" for document in documents]
            write_whole(text, "".join(lines))
    command = [sys.executable, "-m", "megatron_2bw.cli", "preprocess"]
    command += ["--input", str(text), "--output-prefix", str(prefix)]
    command += f"""
        --task bert --train-tokenizer wordpiece --vocab-size {DEFAULT_VOCAB_SIZE}
    """.split()
    if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode:
        raise UserError(f"--task bert: no data in {text.parent}, see above")


def grid(options: Namespace, data: Sequence[str]) -> list[Run]:
    """All runs, ordered for early comparisons: seed by seed, vanilla first."""
    runs = []
    cases = itertools.product(options.seeds, options.lr, options.variants)
    for seed, lr, variant in cases:
        folder = options.out / "runs" / f"{variant}-lr{lr}-seed{seed}"
        run = Run(variant, lr, seed, folder)
        runs.append(replace(run, command=command(options, data, run)))
    return runs
