"""Checks that look at files and packages: this project's data and checkpoints, and
Transformer Engine.

Invariant: a check changes nothing, and answers None or one line that names the flag and
says what to do.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from megatron_2bw.base.errors import UserError, file_errors
from megatron_2bw.mcore.checkpoints.folder import TRACKER, problem, same_folder, source
from megatron_2bw.run.flags import indexed_dataset
from megatron_2bw.run.flags.plain_torch import PLAIN_TORCH
from megatron_2bw.run.flags.rule import Args, installed, task, value


def transformer_engine(args: Args) -> str | None:
    """On a GPU Megatron's default layers need Transformer Engine, and its messages
    NCCL."""
    from megatron_2bw.mcore import cpu  # it imports torch

    if cpu.installed():
        return None
    if args.distributed_backend == "gloo" and args.pipeline_model_parallel_size > 1:
        return (
            "--distributed-backend gloo sends no GPU tensors between stages: use "
            "nccl, with --pipeline-exchange gloo"
        )
    if args.context_parallel_size > 1 and args.transformer_impl == "local":
        return (
            f"--context-parallel-size {args.context_parallel_size} needs Transformer "
            "Engine's attention: install the package, and leave --transformer-impl "
            "local out"
        )
    asked = task(args) is not None and args.transformer_impl == "transformer_engine"
    if not asked or installed("transformer_engine"):
        return None
    return (
        "--transformer-impl transformer_engine (the default) needs a package that is "
        f"not installed: use {' '.join(PLAIN_TORCH)}"
    )


# --- data
# --------------------------------------------------------------------------------------

_SPLITS = ("--train-data-path", "--valid-data-path", "--test-data-path")
_PER_SPLIT = (*_SPLITS, "--per-split-data-args-path")
_NUMBER = re.compile(r"[\d.eE+-]+")
_SHARES = "969,30,1"  # of --split by default


def data(args: Args) -> str | None:
    """--data-path or --mock-data must be given, or Megatron would train on mock data;
    with --sft-data the files hold conversations, whose tokens carry marks, and without
    not. A share of --split above 0 must hold a document (a sequence of a GPT): Megatron
    looks for ever for one of an empty share."""
    # an entry script of the user's own may have datasets without flags
    if task(args) is None:
        return None
    flags = [flag for flag in ("--data-path", "--data-args-path") if value(args, flag)]
    per_split = [flag for flag in _PER_SPLIT if value(args, flag)]
    flags += per_split[:1]
    if not flags and not args.mock_data:
        return "--data-path is missing (or --mock-data)"
    if len(flags) > 1:
        return f"{flags[1]} does not work with {flags[0]}: leave one out"
    if per_split and args.split:
        return f"--split does not work with {per_split[0]}: leave it out"
    try:
        for flag, words in _blends(args):
            if fault := _blend_fault(args, flag, words):
                return fault
    except UserError as error:
        return str(error)
    return None


def _blends(args: Args) -> Iterator[tuple[str, list[str]]]:
    """The flag and the words of each blend: prefixes of datasets, or weights and
    prefixes in turn."""
    for flag in ("--data-path", *_SPLITS):
        yield flag, value(args, flag) or []
    if args.data_args_path:
        with file_errors(f"--data-args-path {args.data_args_path}"):
            words = Path(args.data_args_path).read_text().split()
        yield "--data-args-path", words
    if args.per_split_data_args_path:
        flag = "--per-split-data-args-path"
        where = f"{flag} {args.per_split_data_args_path}"
        with file_errors(where):
            blends = json.loads(Path(args.per_split_data_args_path).read_text())
        for split in ("train", "valid", "test"):
            if split not in blends:
                raise UserError(f"{where}: it has no key {split}")
            words = blends[split] or []
            yield flag, words.split() if isinstance(words, str) else [*map(str, words)]


def _blend_fault(args: Args, flag: str, words: list[str]) -> str | None:
    """A line about the first dataset of a blend that the run cannot use, or None."""
    weights = [_NUMBER.fullmatch(word) is not None for word in words]
    if any(weights) and weights != [True, False] * (len(words) // 2):
        return f"{flag} {' '.join(words)}: give only prefixes, or a weight before each prefix"
    for word, is_weight in zip(words, weights):
        if is_weight or "://" in word:
            continue
        try:
            fault = _dataset_fault(args, flag, word)
        except OSError as error:
            fault = f"{flag} {word}: {error.filename}: {error.strerror}"
        if fault:
            return fault
    return None


def _dataset_fault(args: Args, flag: str, prefix: str) -> str | None:
    has_prompts = indexed_dataset.has_prompts(prefix)
    if has_prompts and not args.sft_data:
        return f"{flag} {prefix}: it holds conversations: train a GPT with --sft-data"
    if args.sft_data and not has_prompts:
        return f"{flag} {prefix}: it holds text: leave --sft-data out"
    if args.sft_data and args.seq_length:
        if not indexed_dataset.has_target(prefix, args.seq_length + 1):
            return (
                f"--seq-length {args.seq_length}: all targets of {flag} {prefix} are "
                "behind it: give a longer one"
            )
    number = indexed_dataset.divided(prefix, args.task == "bert")
    split = args.split or _SHARES
    if flag == "--data-path" and _leaves_a_share_empty(split, number):
        return (
            f"--split {split}: a share has none of the {number} documents of "
            "--data-path: give it 0 or more"
        )
    return None


def _leaves_a_share_empty(split: str, number: int) -> bool:
    """Whether a share above 0 gets none of `number` documents, as Megatron rounds."""
    shares = [float(share) for share in re.split("[,/]", split)]
    total = sum(shares)
    start = 0
    for place, share in enumerate(shares, 1):
        end = round(sum(shares[:place]) / total * number)
        if share and start == end:
            return True
        start = end
    return False


# --- checkpoints
# --------------------------------------------------------------------------------------


def checkpoint(args: Args) -> str | None:
    """The checkpoints of --load and --lora-base must be whole.

    The first rank looks at its files; for all to do so could take long.
    """
    if os.environ.get("RANK", "0") != "0":
        return None
    flag, path = source(args)
    fault = _checkpoint_fault(args, flag, path, args.ckpt_step)
    return fault or _checkpoint_fault(args, "--lora-base", args.lora_base, None)


def _checkpoint_fault(
    args: Args, flag: str, path: str | None, step: int | None
) -> str | None:
    if not path:
        return None
    fault = None
    if "://" not in path and (step or Path(path, TRACKER).is_file()):
        fault = problem(path, step, same_folder(path, args.save), args.ckpt_format)
    elif flag == "--lora-base":
        fault = f"it is no folder of Megatron's checkpoints (there is no {TRACKER})"
    return f"{flag} {path}: {fault}" if fault else None
