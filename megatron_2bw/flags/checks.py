"""Rules that need code or a look at files: this project's data and checkpoints, the versions of torch and its kernels.

Invariant: a check reads the arguments and looks at files, changes nothing, and answers one line that names the flag and
says what to do, or None.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from megatron_2bw import sizes
from megatron_2bw.checkpoints.folder import TRACKER, problem, same_folder, source
from megatron_2bw.data import indexed
from megatron_2bw.flags.rule import Args, Rule, installed, line, task, value
from megatron_2bw.start.torchrun import PLAIN_TORCH

OLDEST_TORCH = "2.8"  # pyproject.toml says why


def torch_version(args: Args | None = None) -> str | None:
    """torch must be as new as the oldest that was tested. pip checks that too, but not with --no-deps."""
    import torch

    found, oldest = (tuple(map(int, version.split(".")[:2])) for version in (torch.__version__, OLDEST_TORCH))
    if found < oldest:
        return f"torch {torch.__version__} is too old: install torch {OLDEST_TORCH} or newer"
    return None


def transformer_engine(args: Args) -> str | None:
    """--transformer-impl transformer_engine, Megatron's default, needs Transformer Engine on a GPU."""
    from megatron_2bw import cpu  # it imports torch

    if task(args) is None or args.transformer_impl != "transformer_engine" or cpu.installed():
        return None
    remedy = " ".join(PLAIN_TORCH)
    line = f"(Megatron's default) needs Transformer Engine, which is not installed: use {remedy}"
    return None if installed("transformer_engine") else f"--transformer-impl transformer_engine {line}"


def default_tokenizer(task: str | None) -> str:
    """Megatron's --tokenizer-type for a task, if none is given."""
    return "BertWordPieceLowerCase" if task == "bert" else "GPT2BPETokenizer"


_DATA = ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path")
_OTHERS = ("--mock-data", "--data-args-path", "--per-split-data-args-path")


def datasets(args: Args) -> Iterator[tuple[str, str]]:
    """The flag and the prefix of each dataset in this file system: the words of the blends that are no weights."""
    blends = [(flag, value(args, flag) or []) for flag in _DATA]
    if args.data_args_path:
        blends.append((f"--data-args-path {args.data_args_path}:", Path(args.data_args_path).read_text().split()))
    for flag, blend in blends:
        yield from ((flag, word) for word in blend if "://" not in word and not re.fullmatch(r"[\d.eE+-]+", word))


def data(args: Args) -> str | None:
    """--data-path or --mock-data must be given, with files that are there; with --sft-data they hold conversations,
    whose tokens carry marks, and without not."""
    if task(args) is None:  # an entry script of the user's own may have datasets without flags
        return None
    if not any(value(args, flag) for flag in _DATA + _OTHERS):
        return "--data-path is missing (or --mock-data)"
    for flag, prefix in datasets(args):
        for name in (f"{prefix}.idx", f"{prefix}.bin"):
            if not os.path.isfile(name):
                return f"{flag} {prefix}: there is no file {name}"
        if indexed.has_prompts(prefix) != args.sft_data:
            wrong = "no conversations" if args.sft_data else "conversations"
            remedy = "prepare it with scripts/preprocess_data.py --task sft, or leave --sft-data out"
            return f"{flag} {prefix}: it holds {wrong}: {remedy if args.sft_data else 'train a GPT with --sft-data'}"
    return None


def empty_share(args: Args) -> str | None:
    """Each share of --split above 0 must hold a document of --data-path.

    Megatron deals whole sequences (BERT: documents) to the shares, and looks for ever for one of an empty share.
    """
    split = args.split or "969,30,1"
    shares = [float(share) for share in split.replace("/", ",").split(",")]
    count = indexed.documents if task(args) == "bert" else indexed.sequences
    for number, prefix in ((count(prefix), prefix) for flag, prefix in datasets(args) if flag == "--data-path"):
        edges = [round(sum(shares[:k]) / sum(shares) * number) for k in range(len(shares) + 1)]
        for name, share, start, end in zip(("training", "validation", "test"), shares, edges, edges[1:]):
            if share and start == end:
                rest = f"leaves no document of --data-path {prefix} for {name}, it has {number}"
                return f"--split {split} {rest}: give that share 0 or more"
    return None


def checkpoint(args: Args) -> str | None:
    """The checkpoint of --load must be whole.

    The first rank looks at its files; for all to do so could take long.
    """
    flag, path = source(args)
    there = path and "://" not in path and (args.ckpt_step or os.path.isfile(Path(path, TRACKER)))
    if there and os.environ.get("RANK", "0") == "0":
        fault = problem(path, args.ckpt_step, same_folder(path, args.save), args.ckpt_format)
        return fault and f"{flag} {path}: {fault}"
    return None


CHECKS: tuple[Rule | sizes.Check, ...] = (
    line("--lr is missing", lambda a: a.lr is None and not a.skip_train),
    sizes.microbatches,
    checkpoint,
    data,
    empty_share,
    transformer_engine,
)
