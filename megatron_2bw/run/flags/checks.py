"""Checks that look at files and packages: this project's data and checkpoints, and
Transformer Engine.

Invariant: a check changes nothing, and answers None or one line that names the flag and
says what to do.
"""

from __future__ import annotations

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

    if (
        args.distributed_backend == "gloo"
        and args.pipeline_model_parallel_size > 1
        and not cpu.installed()
    ):
        return (
            "--distributed-backend gloo sends no GPU tensors between stages: use "
            "nccl, with --two-bw-exchange gloo"
        )
    if (
        args.context_parallel_size > 1
        and args.transformer_impl == "local"
        and not cpu.installed()
    ):
        need = (
            f"--context-parallel-size {args.context_parallel_size} needs Transformer "
            "Engine's attention"
        )
        return f"{need}: install the package, and leave --transformer-impl local out"
    asked = task(args) is not None and args.transformer_impl == "transformer_engine"
    if not asked or cpu.installed() or installed("transformer_engine"):
        return None
    remedy = " ".join(PLAIN_TORCH)
    return (
        "--transformer-impl transformer_engine (the default) needs a package that is "
        f"not installed: use {remedy}"
    )


_SPLITS = ("--train-data-path", "--valid-data-path", "--test-data-path")
_NUMBER = re.compile(r"[\d.eE+-]+")


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
        with file_errors(f"{flag} {args.per_split_data_args_path}"):
            blends = json.loads(Path(args.per_split_data_args_path).read_text())
        for split in ("train", "valid", "test"):
            if split not in blends:
                raise UserError(
                    f"{flag} {args.per_split_data_args_path}: it has no key {split}"
                )
            words = blends[split] or []
            yield flag, words.split() if isinstance(words, str) else [*map(str, words)]


def data(args: Args) -> str | None:
    """--data-path or --mock-data must be given, or Megatron would train on mock data;
    with --sft-data the files hold conversations, whose tokens carry marks, and without
    not. A share of --split above 0 must hold a document (a sequence of a GPT): Megatron
    looks for ever for one of an empty share."""
    # an entry script of the user's own may have datasets without flags
    if task(args) is None:
        return None
    per_split = [
        flag for flag in (*_SPLITS, "--per-split-data-args-path") if value(args, flag)
    ]
    given = [
        flag for flag in ("--data-path", "--data-args-path") if value(args, flag)
    ] + per_split[:1]
    if not given and not args.mock_data:
        return "--data-path is missing (or --mock-data)"
    if len(given) > 1:
        return f"{given[1]} does not work with {given[0]}: leave one out"
    if per_split and args.split:
        return f"--split does not work with {per_split[0]}: leave it out"
    try:
        return next(
            filter(None, (_blend(args, flag, words) for flag, words in _blends(args))),
            None,
        )
    except UserError as error:
        return str(error)


def _blend(args: Args, flag: str, words: list[str]) -> str | None:
    """A line about the first dataset of a blend that the run cannot use, or None."""
    weights = [_NUMBER.fullmatch(word) is not None for word in words]
    if any(weights) and weights != [True, False] * (len(words) // 2):
        return f"{flag} {' '.join(words)}: give only prefixes, or a weight before each prefix"
    split = args.split or "969,30,1"
    shares = [float(share) for share in re.split("[,/]", split)]
    for prefix in (
        word for word, weight in zip(words, weights) if not weight and "://" not in word
    ):
        try:
            conversations = indexed_dataset.has_prompts(prefix)
            number = indexed_dataset.divided(prefix, args.task == "bert")
        except OSError as error:
            return f"{flag} {prefix}: {error.filename}: {error.strerror}"
        if conversations != args.sft_data:
            remedy = (
                "conversations: train a GPT with --sft-data"
                if conversations
                else "text: leave --sft-data out"
            )
            return f"{flag} {prefix}: it holds {remedy}"
        if (
            args.sft_data
            and args.seq_length
            and not indexed_dataset.has_target(prefix, args.seq_length + 1)
        ):
            return (
                f"--seq-length {args.seq_length}: all targets of {flag} {prefix} are "
                "behind it: give a longer one"
            )
        edges = [
            round(sum(shares[:k]) / sum(shares) * number)
            for k in range(len(shares) + 1)
        ]
        if flag == "--data-path" and any(
            share and a == b for share, a, b in zip(shares, edges, edges[1:])
        ):
            return (
                f"--split {split}: a share has none of the {number} documents of "
                "--data-path: give it 0 or more"
            )
    return None


def checkpoint(args: Args) -> str | None:
    """The checkpoints of --load and --lora-base must be whole.

    The first rank looks at its files; for all to do so could take long.
    """
    for flag, path, step in (
        (*source(args), args.ckpt_step),
        ("--lora-base", args.lora_base, None),
    ):
        there = (
            path and "://" not in path and (step or os.path.isfile(Path(path, TRACKER)))
        )
        if os.environ.get("RANK", "0") != "0":
            continue
        fault = (
            problem(path, step, same_folder(path, args.save), args.ckpt_format)
            if there
            else None
        )
        if path and not there and flag == "--lora-base":
            fault = f"it is no folder of Megatron's checkpoints (there is no {TRACKER})"
        if fault:
            return f"{flag} {path}: {fault}"
    return None
