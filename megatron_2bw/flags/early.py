"""The command line, checked before torch and Megatron are imported: in half a second, where they take several.

`megatron_flags.json` lists the flags of one release of Megatron. With another release only the whole check runs, which
follows in any case (`parse.py`).

Invariant: a command line that the whole check accepts is not refused here.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import itertools
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_2bw.errors import did_you_mean
from megatron_2bw.flags.checks import checkpoint, torch_version, transformer_engine
from megatron_2bw.flags.parse import prepare, rules
from megatron_2bw.flags.rule import Rule

TABLE = Path(__file__).with_name("megatron_flags.json")
LATER = (torch_version, transformer_engine, checkpoint)  # they import torch, or read a whole checkpoint
DRIVERS = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # of NVIDIA, of WSL, of AMD
KINDS = {"int": int, "float": float, "str": str, "other": str}


def mistakes(argv: Sequence[str], task: str, world: int) -> list[str]:
    """A line for each mistake of the command line of `task` ("gpt", "bert") for `world` processes.

    Unknown flags and wrong values come first. Only without these are the rules looked at, and of several lines about
    one flag the first counts: the others may follow from it.
    """
    if table()["megatron-core"] != importlib.metadata.version("megatron-core") or {"-h", "--help"} & {*argv}:
        return []
    found = [_mistakes(list(argv), task, world, cpu) for cpu in assumptions(argv)]
    return [line for line in found[0] if all(line in lines for lines in found)] if found else []


@functools.cache
def table() -> dict[str, Any]:
    return json.loads(TABLE.read_text())


def assumptions(argv: Sequence[str]) -> tuple[bool, ...]:
    """Whether the run computes on the CPU, or both if only torch knows; () for --device cuda without a known driver."""
    device = "auto"
    for word, value in zip(argv, [*argv[1:], ""]):
        name, _, given = word.partition("=")
        device = (given or value) if name == "--device" else device
    driver = any(map(os.path.exists, DRIVERS))
    if device == "cuda":
        return (False,) if driver else ()
    return (True, False) if driver and device == "auto" else (True,)


@functools.cache
def parser_of(task: str, schedule: str, cpu: bool) -> argparse.ArgumentParser:
    """Megatron's parser as the table describes it, with this project's flags."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for flag in table()["flags"]:
        options = dict(flag)
        if "type" in options:
            options["type"] = KINDS[options["type"]]
        if options.get("action") == "optional":
            options["action"] = argparse.BooleanOptionalAction
        parser.add_argument(*options.pop("names"), **options)
    early = argparse.Namespace(task=task, pipeline_schedule=schedule, assumed_cpu=cpu)
    return prepare(parser, early, sys.exit)  # never called: mistakes raise ArgumentError


def _mistakes(argv: list[str], task: str, world: int, cpu: bool) -> list[str]:
    parser = parser_of(task, "2bw", cpu)  # all schedules but Megatron's own have the same defaults
    words, lines = argv, []
    while True:
        try:
            args, unknown = parser.parse_known_args(words)
            break
        except argparse.ArgumentError as error:
            names = (error.argument_name or "").split("/")
            left = _without(words, names)
            lines.append(str(error))
            if left == words:
                return lines
            words = left
    known = parser._option_string_actions
    for word in unknown:
        if word.startswith("-"):
            similar = did_you_mean(word.partition("=")[0], known)
            values = itertools.takewhile(lambda value: value[:1] not in ("-", ""), unknown[unknown.index(word) + 1 :])
            lines.append(f"unrecognized arguments: {' '.join([word, *values])}{similar}")
    if unknown and not unknown[0].startswith("-"):
        lines.append(f"unrecognized arguments: {' '.join(unknown)}")
    others = {name for flag in table()["flags"] if flag.get("type") == "other" for name in flag["names"]}
    unknown_value = any(word.partition("=")[0] in others for word in argv)  # Megatron's parser may refuse it
    if lines or unknown_value or args.use_checkpoint_args or args.yaml_cfg:  # these two bring other arguments
        return lines
    if args.pipeline_schedule == "megatron":
        args = parser_of(task, "megatron", cpu).parse_args(words)
    args.world_size, args.assumed_cpu = world, cpu
    return _broken(args)


def _without(words: list[str], names: Sequence[str]) -> list[str]:
    """The words without the flags `names` and their values."""
    kept, dropping = [], False
    for word in words:
        if word.startswith("--"):
            dropping = word.partition("=")[0] in names
        kept += [] if dropping else [word]
    return kept


def _broken(args: argparse.Namespace) -> list[str]:
    lines: list[str] = []
    named: set[str] = set()
    for rule in rules():
        if rule in LATER:
            continue
        try:
            line = rule.message(args) if isinstance(rule, Rule) else rule(args)
        except Exception:  # a rule may rely on what an earlier one has found to be right; the whole check follows
            continue
        flags = set(re.findall(r"--[\w-]+", line or ""))
        if line and not flags & named:
            lines.append(line)
        named |= flags
    return lines
