"""Checks that look at files and packages: this project's data and checkpoints, and Transformer Engine.

Invariant: a check changes nothing, and answers None or one line that names the flag and says what to do.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from megatron_2bw.checkpoints.folder import TRACKER, problem, same_folder, source
from megatron_2bw.data import indexed
from megatron_2bw.flags.rule import Args, installed, task, value
from megatron_2bw.start.torchrun import PLAIN_TORCH


def transformer_engine(args: Args) -> str | None:
    """On a GPU Megatron's default layers need Transformer Engine, and its messages NCCL."""
    from megatron_2bw import cpu  # it imports torch

    if args.distributed_backend == "gloo" and args.pipeline_model_parallel_size > 1 and not cpu.installed():
        return "--distributed-backend gloo sends no GPU tensors between stages: use nccl, with --two-bw-exchange gloo"
    asked = task(args) is not None and args.transformer_impl == "transformer_engine"
    if not asked or cpu.installed() or installed("transformer_engine"):
        return None
    remedy = " ".join(PLAIN_TORCH)
    return f"--transformer-impl transformer_engine (the default) needs a package that is not installed: use {remedy}"


_DATA = ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path")
_OTHERS = ("--mock-data", "--data-args-path", "--per-split-data-args-path")


def _datasets(args: Args) -> Iterator[tuple[str, str]]:
    """The flag and the prefix of each dataset in this file system: the words of the blends that are no weights."""
    named = {flag: value(args, flag) or [] for flag in _DATA}
    if args.data_args_path:
        named["--data-args-path"] = Path(args.data_args_path).read_text().split()
    for flag, blend in named.items():
        yield from ((flag, word) for word in blend if "://" not in word and not re.fullmatch(r"[\d.eE+-]+", word))


def data(args: Args) -> str | None:
    """--data-path or --mock-data must be given, or Megatron would train on mock data; with --sft-data the files hold
    conversations, whose tokens carry marks, and without not. A share of --split above 0 must hold a document (a
    sequence of a GPT): Megatron looks for ever for one of an empty share."""
    if task(args) is None:  # an entry script of the user's own may have datasets without flags
        return None
    if not any(value(args, flag) for flag in _DATA + _OTHERS):
        return "--data-path is missing (or --mock-data)"
    split = args.split or "969,30,1"
    shares = [float(share) for share in re.split("[,/]", split)]
    for flag, prefix in _datasets(args):
        try:
            conversations, number = indexed.has_prompts(prefix), indexed.divided(prefix, args.task == "bert")
        except OSError as error:
            return f"{flag} {prefix}: {error.filename}: {error.strerror}"
        if conversations != args.sft_data:
            remedy = "conversations: train a GPT with --sft-data" if conversations else "text: leave --sft-data out"
            return f"{flag} {prefix}: it holds {remedy}"
        if args.sft_data and args.seq_length and not indexed.has_target(prefix, args.seq_length + 1):
            return f"--seq-length {args.seq_length}: all targets of {flag} {prefix} are behind it: give a longer one"
        edges = [round(sum(shares[:k]) / sum(shares) * number) for k in range(len(shares) + 1)]
        if flag == "--data-path" and any(share and a == b for share, a, b in zip(shares, edges, edges[1:])):
            return f"--split {split}: a share has none of the {number} documents of --data-path: give it 0 or more"
    return None


def checkpoint(args: Args) -> str | None:
    """The checkpoints of --load and --lora-base must be whole.

    The first rank looks at its files; for all to do so could take long.
    """
    for flag, path, step in ((*source(args), args.ckpt_step), ("--lora-base", args.lora_base, None)):
        there = path and "://" not in path and (step or os.path.isfile(Path(path, TRACKER)))
        if os.environ.get("RANK", "0") != "0":
            continue
        fault = problem(path, step, same_folder(path, args.save), args.ckpt_format) if there else None
        if path and not there and flag == "--lora-base":
            fault = f"it is no folder of Megatron's checkpoints (there is no {TRACKER})"
        if fault:
            return f"{flag} {path}: {fault}"
    return None
