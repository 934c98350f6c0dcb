"""The command line of scripts/convergence.py, and the commands of the runs that it asks for.

Invariant: a wrong option raises UserError, one line that names the flag; nothing runs here, and only the built-in
corpus is written. The commands of two variants with the same seed and learning rate differ only in the variant's flags
and the folder of checkpoints.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_2bw.data.corpus import DEFAULT_MAX_BYTES, DEFAULT_VOCAB_SIZE, Corpus, build_corpus, read_library
from megatron_2bw.errors import Parser, UserError, file_errors, names_of, words
from megatron_2bw.files import write_whole
from megatron_2bw.flags.own import whole
from megatron_2bw.start.torchrun import PLAIN_TORCH, log_interval, torchrun
from megatron_2bw.words import flag_of, split_flags

DESCRIPTION = "Trains one configuration with and without 2BW's late gradients."
ITERATIONS, SEQUENCE, WARM_UP = 1500, 128, 100
BATCH = {"gpt": 4, "bert": 16}  # sequences; a BERT learns from 15 % of their tokens

MODEL = "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --attention-dropout 0 --hidden-dropout 0".split()
GPT = "--position-embedding-type rope --untie-embeddings-and-output-weights".split()
OPTIMIZER = "--lr-decay-style cosine --adam-beta2 0.95 --clip-grad 1.0 --weight-decay 0.1".split()
EVALUATION = "--eval-iters 25".split()
SPLIT = "--split 90,10,0".split()

# Flags that this script sets for every run.
OWN = "--lr --seed --device --pipeline-model-parallel-size --pipeline-schedule --save --load --train-samples".split()
# Flags that bring data or a tokenizer.
SPLIT_DATA = ("--train-data-path", "--valid-data-path", "--test-data-path", "--per-split-data-args-path")
OWN_DATA = ("--data-path", "--data-args-path", "--mock-data", "--tokenizer-type", *SPLIT_DATA)
COMMON = ("--train-iters", "--seed", "--device", "--pipeline-model-parallel-size", "--save", "--load")
VARIANTS = {
    "vanilla": "--pipeline-schedule pipedream-flush",
    "2bw": "--pipeline-schedule 2bw",
    "2bw+auto": "--pipeline-schedule 2bw --two-bw-correction auto",
}


@dataclass(frozen=True)
class Run:
    variant: str
    lr: str  # as typed
    seed: int
    folder: Path
    command: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"{self.variant} lr {self.lr} seed {self.seed}"

    @property
    def log(self) -> Path:
        return self.folder / "train.log"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


# --- the command line -----------------------------------------------------------------------------------------------


def value(words: Sequence[str], flag: str) -> str | None:
    """The value of a flag in `words`: the last word after it, or after its =."""
    found = None
    for place, word in enumerate(words):
        if word == flag and place + 1 < len(words):
            found = words[place + 1]
        elif word.startswith(flag + "="):
            found = word.partition("=")[2]
    return found


def given(words: Sequence[str], *flags: str) -> str | None:
    """The first of the flags that is among the words."""
    return next((flag for flag in flags if flag in map(flag_of, words)), None)


def parse(argv: Sequence[str], prog: str = "convergence.py") -> argparse.Namespace:
    """The options, checked; `.flags` are Megatron's and `.variants` maps labels to the flags of each."""
    own, flags = split_flags(argv)
    parser = Parser(
        prog=prog,
        description=DESCRIPTION,
        allow_abbrev=False,
        epilog="Words after -- are Megatron's flags for every run. A run that fails does not stop the others; "
        "if the very first does not train, no other is started.",
    )
    option = parser.add_argument
    option("name", metavar="NAME", help="of the experiment: the folder in out/convergence")
    option("--task", choices=("gpt", "bert"), default="gpt", help="default: %(default)s")
    names = f"of {', '.join(VARIANTS)}"
    option("--variants", type=names_of([*VARIANTS]), default=("vanilla", "2bw"), metavar="NAME,...", help=names)
    labelled = '2bw with more flags, or "LABEL=--pipeline-schedule NAME ..."; repeatable'
    option("--variant", action="append", default=[], metavar="LABEL=FLAGS", help=labelled)
    option("--seeds", type=_numbers(int), default=("1234",), metavar="N,...", help="default: 1234")
    option("--lr", type=_numbers(float), default=("3e-4",), metavar="RATE,...", help="learning rates (default: 3e-4)")
    option("--stages", type=whole(1), default=1, metavar="D", help="default: 1; the losses do not depend on it")
    option("--width", type=whole(1), default=1, metavar="W", help="data-parallel size of every run (default: 1)")
    option("--jobs", type=whole(1), default=1, metavar="J", help="concurrent runs (default: 1)")
    option("--device", choices=("auto", "cpu", "cuda"), default="auto", help="as the entry script's")
    gaps = "exit with 1 if a gap is larger; one, or one for each --lr"
    option("--max-gap", type=_numbers(float), metavar="PERCENT", help=gaps)
    option("--out", type=Path, metavar="DIR", help="default: out/convergence/NAME")
    option("--no-defaults", action="store_true", help="only Megatron's flags after --, none of this script's own")
    options = parser.parse_args(own)
    options.flags, options.again = flags, shlex.join(["megatron-2bw", "convergence", *argv])
    options.out = (options.out or Path("out") / "convergence" / options.name).absolute()
    try:
        if flag := given(flags, *OWN):
            raise UserError(f"{flag}: it is set before the --, or by --variant; leave it out after the --")
        options.iterations = _number(flags, "--train-iters", None if options.no_defaults else ITERATIONS)
        processes(options, flags)  # are they numbers?
        options.variants = variants(options)
        options.max_gap = options.max_gap and _limits(options)
    except UserError as error:
        parser.error(str(error))
    return options


def _numbers(kind: type) -> Callable[[str], tuple[str, ...]]:
    """A type of argparse: several numbers of `kind`, as they are typed."""

    def parsed(text: str) -> tuple[str, ...]:
        try:
            return tuple(word for word in words(text) if kind(word) or True)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text}: give numbers with commas between them") from None

    return parsed


def _number(flags: Sequence[str], flag: str, default: int | None) -> int:
    word = value(flags, flag)
    if word is None and default is None:
        raise UserError(f"{flag} is missing after the --")
    try:
        return default if word is None else int(word)
    except ValueError:
        raise UserError(f"{flag} {word}: not a whole number") from None


def _limits(options: argparse.Namespace) -> dict[str, float]:
    """The largest gap at each learning rate. Raises UserError."""
    limits = [float(limit) for limit in options.max_gap]
    if len(limits) not in (1, len(options.lr)):
        raise UserError(f"--max-gap {','.join(options.max_gap)}: give one number, or one for each --lr")
    return dict(zip(options.lr, limits * len(options.lr) if len(limits) == 1 else limits))


def variants(options: argparse.Namespace) -> dict[str, list[str]]:
    """Label to flags of all variants, vanilla first. Raises UserError."""
    found = {label: VARIANTS[label].split() for label in ("vanilla", *options.variants)}
    for text in options.variant:
        label, _, flags = text.partition("=")
        own = shlex.split(flags)
        if not re.fullmatch(r"\w[\w.+-]*", label) or not own or label in found:
            raise UserError(f'--variant "{text}": give LABEL=FLAGS, with a label that no other variant has')
        if flag := given(own, *COMMON):
            raise UserError(f'--variant "{text}": {flag} must be the same for all')
        found[label] = own if given(own, "--pipeline-schedule") else [*VARIANTS["2bw"].split(), *own]
    return found


# --- commands -------------------------------------------------------------------------------------------------------


def eval_interval(iterations: int) -> int:
    """About ten validations. Not a divisor: Megatron also validates after the last iteration, and would do so twice."""
    interval = max(2, math.ceil(iterations / 10))
    while iterations % interval == 0:
        interval += 1
    return interval


def processes(options: argparse.Namespace, flags: Sequence[str]) -> int:
    """Of a run: stages x width x the parallel sizes among Megatron's flags."""
    inner = [_number(flags, flag, 1) for flag in ("--tensor-model-parallel-size", "--context-parallel-size")]
    return options.stages * options.width * math.prod(max(1, size) for size in inner)


def defaults(options: argparse.Namespace, flags: Sequence[str]) -> list[str]:
    """Default flags; the user's `flags` come later and override them."""
    if options.no_defaults:
        return []
    batch = BATCH[options.task]
    micro = max(1, batch // (options.stages * options.width))
    step = micro * options.width  # samples of a microbatch of all pipelines; 2BW needs one for every stage
    length = value(flags, "--seq-length") or SEQUENCE
    sizes = {
        "--micro-batch-size": micro,
        "--global-batch-size": step * max(options.stages, math.ceil(batch / step)),
        "--seq-length": length,
        "--max-position-embeddings": length,
        "--train-iters": options.iterations,
        "--log-interval": log_interval(options.iterations),
        "--eval-interval": eval_interval(options.iterations),
    }
    if not given(flags, "--lr-warmup-fraction", "--lr-warmup-samples"):
        sizes["--lr-warmup-iters"] = min(WARM_UP, options.iterations // 2)
    words = [str(word) for pair in sizes.items() for word in pair]
    model = [*MODEL, *(GPT if options.task == "gpt" else [])]
    split = [] if given(flags, *SPLIT_DATA) else SPLIT  # Megatron takes one of them
    return [*words, *model, *PLAIN_TORCH, *OPTIMIZER, *split, *EVALUATION]


def command(options: argparse.Namespace, data: Sequence[str], variant: str, lr: str, seed: str, folder: Path) -> tuple:
    """The command of a run: torchrun, the entry script, the defaults, the user's flags, the variant's."""
    flags = [*options.flags, *options.variants[variant]]
    launcher = torchrun(processes(options, flags), options.task)
    own = ["--pipeline-model-parallel-size", str(options.stages), "--device", options.device]
    own += ["--seed", seed, "--lr", lr]
    if not options.no_defaults:
        own += ["--min-lr", f"{float(lr) / 10:g}"]
    if given(options.flags, "--save-interval"):
        own += ["--save", str(folder / "checkpoints"), "--load", str(folder / "checkpoints")]
    return (*launcher, *defaults(options, flags), *data, *own, *flags)


def takes_corpus(options: argparse.Namespace) -> bool:
    """Whether the user has left data and tokenizer to this script."""
    return not options.no_defaults and not given(options.flags, *OWN_DATA)


def built_in(options: argparse.Namespace) -> list[str]:
    """The flags of the built-in corpus, built at the first call; none if the user has data or a tokenizer."""
    if not takes_corpus(options):
        return []
    corpus = build_corpus()
    return corpus.flags() if options.task == "gpt" else sentences(corpus)


def sentences(corpus: Corpus) -> list[str]:
    """The flags of the same text as sentences with a WordPiece vocabulary, built next to the corpus at the first call.

    The data preparation writes the .idx last, so all is there if it is; a call that was ended can be repeated.
    """
    folder = corpus.prefix.parent
    prefix = folder.with_name(f"{folder.name}-sentences") / "corpus"
    tokenizer = prefix.with_name("corpus-tokenizer")
    if not prefix.with_suffix(".idx").exists():
        with file_errors(f"--task bert: {prefix.parent}"):
            prefix.parent.mkdir(exist_ok=True)
            text = prefix.with_name("text.jsonl")
            if not text.exists():
                lines = [json.dumps({"text": document}) + "\n" for document in read_library(DEFAULT_MAX_BYTES)]
                write_whole(text, "".join(lines))
        command = [sys.executable, "-m", "megatron_2bw.cli", "preprocess", "--task", "bert"]
        command += ["--input", str(text), "--output-prefix", str(prefix)]
        command += ["--train-tokenizer", "wordpiece", "--vocab-size", str(DEFAULT_VOCAB_SIZE)]
        if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode:
            raise UserError(f"--task bert: no data in {prefix.parent}, see above")
    return ["--data-path", str(prefix), "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer)]


def grid(options: argparse.Namespace, data: Sequence[str]) -> list[Run]:
    """All runs, ordered for early comparisons: seed by seed, vanilla first."""
    runs = []
    for seed, lr, variant in itertools.product(options.seeds, options.lr, options.variants):
        folder = options.out / "runs" / f"{variant}-lr{lr}-seed{seed}"
        runs.append(Run(variant, lr, int(seed), folder, command(options, data, variant, lr, seed, folder)))
    return runs
