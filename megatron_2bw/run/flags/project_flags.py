"""The flags of this project: their names and their values (project_flags.yaml).

Invariant: without torch and Megatron, so that they can be read before either is
imported.
"""

import argparse
import math
import os
from pathlib import Path
from typing import Any

from megatron_2bw.base.errors import UserError, whole_number
from megatron_2bw.base.files import read_yaml
from megatron_2bw.run.flags.resolve import START
from megatron_2bw.run.flags.rule import Args
from megatron_2bw.schedules import SCHEDULE_NAMES, SCHEDULES


def schedule_name(text: str) -> str:
    """A schedule's name as typed: 2BW is 2bw, 1f1b is pipedream-flush."""
    return {"1f1b": "pipedream-flush"}.get(text.lower(), text.lower())


def extra_warmup(text: str) -> tuple[int, ...]:
    """The value of --two-bw-extra-warmup: whole numbers with commas between."""
    return tuple(map(whole_number(0), text.split(",")))


def whole_or_share(text: str) -> int | str:
    """The value of --two-bw-sync-iterations: a whole number, or a share of the run's
    iterations such as `20%`."""
    if text.endswith("%"):
        return f"{whole_number(0, 100)(text[:-1])}%"
    return whole_number(0)(text)


def slots(text: str) -> int | str:
    """The value of --two-bw-gradient-slots."""
    return text if text == "shard" else whole_number(1)(text)


def use_rampup(args: Args) -> str | None:
    """Replace --rampup-batch-size, which Megatron 0.19 ignores, by the
    --step-batch-size-schedule of its sizes.

    Returns the line of the log, or None without the flag. Raises UserError for values
    that give no sizes.
    """
    if args.rampup_batch_size is None:
        return None
    if not (args.train_samples and args.global_batch_size and args.seq_length):
        raise UserError(
            "--rampup-batch-size needs --global-batch-size, --seq-length, and "
            "--train-samples: add them"
        )
    start, increment, samples = args.rampup_batch_size
    flag = f"--rampup-batch-size {start} {increment} {samples}"
    count = (args.global_batch_size - start) // max(increment, 1)
    if start < 1 or count < 1 or start + count * increment != args.global_batch_size:
        raise UserError(
            f"{flag}: no number of increments leads to --global-batch-size "
            f"{args.global_batch_size}: give other numbers"
        )
    steps = []
    for number in range(count + 1):
        first = math.ceil(number * samples / count)
        # Megatron divides by the length again
        steps.append(f"{first * args.seq_length}:{start + number * increment}")
    schedule = " ".join(steps)
    args.step_batch_size_schedule = schedule
    args.eval_global_batch_size = args.eval_global_batch_size or args.global_batch_size
    args.global_batch_size = None
    args.rampup_batch_size = None
    # as Megatron has noted it before
    args._is_global_batch_size_explicitly_specified = False
    return f'> {flag}: --step-batch-size-schedule "{schedule}"'


ADAPTER = "_adapter"  # the end of an adapter's name, after that of its layer

_TYPES = {
    "number": whole_number(0),
    "number above 0": whole_number(1),
    "numbers": extra_warmup,
    "number or share": whole_or_share,
    "port": whole_number(1, 65535),
    "float": float,
    "slots": slots,
    "path": Path,
    "absolute path": os.path.abspath,
}
_TABLES = read_yaml(Path(__file__).with_suffix(".yaml"))


def add_flags(
    parser: argparse.ArgumentParser, device: bool = True
) -> argparse.ArgumentParser:
    """Add this project's flags to a parser, with or without the choice of the
    device."""
    group = parser.add_argument_group("pipeline schedule (megatron_2bw; docs/flags.md)")
    meanings = ["megatron: Megatron's own", "1f1b: pipedream-flush"]
    for schedule in SCHEDULES.values():
        meanings.append(f"{schedule.name}: {schedule.summary}")
    group.add_argument(
        "--pipeline-schedule",
        type=schedule_name,
        choices=SCHEDULE_NAMES,
        default="megatron",
        help="; ".join(meanings),
    )
    if device:
        add_table(group, _TABLES["device"])
    add_table(group, _TABLES["all"])
    parser.set_defaults(two_bw_extra_warmup=())
    return parser


def add_table(group: Any, table: dict[str, dict[str, Any]]) -> None:
    """Add the flags of a table, with their options, to a group of a parser."""
    for flag, options in table.items():
        options = {**options, "help": options["help"].format(START=START)}
        if "type" in options:
            options["type"] = _TYPES[options["type"]]
        group.add_argument(flag, **options)


def adopt(args: Args, saved: Args) -> None:
    """Take the adapters' sizes of a checkpoint's arguments (--use-checkpoint-args)."""
    if args.lora_rank or not getattr(saved, "lora_rank", None):
        return
    for name, setting in vars(saved).items():
        if name.startswith("lora_"):
            setattr(args, name, setting)
