"""The flags of this project: their names and their values (project_flags.yaml).

Invariant: without torch and Megatron, so that they can be read before either is
imported.
"""

import argparse
import math
import os

from megatron_2bw.base.command_line import TYPES, add_options, table_of
from megatron_2bw.base.errors import UserError, whole_number
from megatron_2bw.run.flags.resolve import correction_of
from megatron_2bw.run.flags.rule import Args, value
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


def late(text: str) -> int | str:
    """The value of --two-bw-late."""
    return "all" if text in ("all", "100%") else whole_or_share(text)


def correction(text: str) -> str:
    """The value of --two-bw-correction: auto, none, predict[,AHEAD], or
    FACTOR[,GRADIENT]. UserError for others."""
    if text not in ("auto", "none", "extrapolate"):  # the last one is translated
        try:
            correction_of(text)
        except ValueError:
            raise UserError(
                f"--two-bw-correction {text}: give auto, none, or a factor from 0 to 2 "
                "and a gradient from 0 to 10, such as 1.25,1.25; or predict, and how far "
                "ahead from 0 to 2, such as predict,0.5"
            ) from None
    return text


def translate(args: Args) -> list[str]:
    """Replace flags that have other names by now, or that are other flags. Returns the
    lines of the log. UserError for values that mean nothing."""
    lines = []
    for old, (flag, settings) in _TABLES["renamed"].items():
        typed = value(args, old)
        setting = settings.get(typed, typed)
        if setting is not None:
            setattr(args, flag.removeprefix("--").replace("-", "_"), setting)
            lines.append(f"> {old} has another name now: {flag} {setting}")
    if args.two_bw_correction == "extrapolate":
        text = f"{args.two_bw_correction_factor},{args.two_bw_correction_gradient}"
        args.two_bw_correction = correction(text)
        lines.append(
            "> --two-bw-correction extrapolate has another name now: "
            f"--two-bw-correction {text}"
        )
    if rampup := use_rampup(args):
        lines.append(rampup)
    return lines


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

_TYPES = TYPES | {
    "numbers": extra_warmup,
    "number or share": whole_or_share,
    "late": late,
    "correction": correction,
    "absolute path": os.path.abspath,
}
_TABLES = table_of(__file__)


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
        add_options(group, _TABLES["device"], _TYPES)
    add_options(group, _TABLES["all"], _TYPES)
    add_options(group, _TABLES["last release"], _TYPES)
    parser.set_defaults(two_bw_extra_warmup=())
    return parser


def adopt(args: Args, saved: Args) -> None:
    """Take the adapters' sizes of a checkpoint's arguments (--use-checkpoint-args)."""
    if args.lora_rank or not getattr(saved, "lora_rank", None):
        return
    for name, setting in vars(saved).items():
        if name.startswith("lora_"):
            setattr(args, name, setting)
