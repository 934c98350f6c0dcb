"""From argv to checked arguments: this project's flags first, then Megatron's, then every rule.

Invariant: every rule is looked at before training starts (`unsupported.py`, `checks.py`, `own.py`, `environment.py`, in
this order), and the first that is broken ends the run with its line. Megatron's own validation follows; its error is
the line then.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from megatron_2bw.checkpoints import owner
from megatron_2bw.checkpoints.folder import await_restored, restore_old, same_folder
from megatron_2bw.errors import did_you_mean
from megatron_2bw.flags import environment, unsupported
from megatron_2bw.flags.checks import CHECKS, checkpoint, default_tokenizer, torch_version
from megatron_2bw.flags.correction import BETA1
from megatron_2bw.flags.own import OWN, add_flags
from megatron_2bw.flags.rule import Rule, installed

Stop = Callable[[str], NoReturn]


def parse_early(argv: list[str], stop: Stop, task: str = "gpt") -> argparse.Namespace:
    """This project's flags, read before Megatron is imported and CUDA starts; and the `task`, "gpt" or "bert"."""
    parser = add_flags(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
    for flag in ("--tensor-model-parallel-size", "--context-parallel-size"):  # Megatron's
        parser.add_argument(flag, type=int, default=1)
    parser.error = stop
    early, _ = parser.parse_known_args(argv)
    early.task = task
    environment.prepare_cuda(early)
    from megatron_2bw import cpu  # it imports torch

    if message := torch_version():  # before Megatron is imported, which may fail with it
        stop(message)
    if early.device == "cuda" and cpu.wanted("auto"):
        stop("--device cuda: no GPU is visible to torch; use --device cpu")
    return early


def parse(
    early: argparse.Namespace, stop: Stop, read: Callable[[argparse.ArgumentParser], object] = id
) -> argparse.Namespace:
    """Megatron's arguments and this project's, parsed, validated and set globally by Megatron.

    Calls `stop` with one line if anything is wrong. The first rank calls `read` with Megatron's own parser.
    """
    from megatron.training.arguments import parse_and_validate_args

    from megatron_2bw import cpu, guard
    from megatron_2bw.flags.rehearsal import rehearse
    from megatron_2bw.mcore import patches

    first = os.environ.get("RANK", "0") == "0"
    parsers: list[argparse.ArgumentParser] = []

    def extend(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        if first:
            read(parser)
        parsers.append(prepare(parser, early, stop))
        parse_args = parser.parse_args

        def parse_and_check() -> argparse.Namespace:
            args = parse_args()
            args.world_size = int(os.environ.get("WORLD_SIZE", "1"))
            if not args.use_checkpoint_args:
                check(args, stop)
                return args
            guard.apply(patches.for_reading())
            if fault := checkpoint(args):
                stop(fault)
            if same_folder(args.load, args.save):  # Megatron reads the arguments before it loads
                if first:
                    owner.hold(args.save)
                    restore_old(args.save)
                else:
                    await_restored(args.save)
            return args

        parser.parse_args = parse_and_check
        return parser

    def rehearsed(validate: Callable[..., None]) -> Callable[..., None]:
        def call(args: argparse.Namespace, defaults: dict[str, Any]) -> None:
            if (line := rehearse(args, parsers[0], sys.argv[1:])) and first:
                print(line, flush=True)
            validate(args, defaults)

        return call

    undo = guard.apply(patches.for_rehearsal(rehearsed)) if cpu.installed() else lambda: None
    try:
        args = parse_and_validate_args(extend, args_defaults={"tokenizer_type": default_tokenizer(early.task)})
    except SystemExit as end:
        if end.code is None:  # Megatron's exit() after a line on the screen
            stop("Megatron ends the run in a line of its own: add --verbose to see it")
        raise  # --help, or a line of this project
    except Exception as error:
        stop(explain(error))
    finally:
        undo()
    if args.use_checkpoint_args:
        check(args, stop)  # the checkpoint has brought the model's arguments, and what they ask for
    return args


def prepare(parser: argparse.ArgumentParser, early: argparse.Namespace, stop: Stop) -> argparse.ArgumentParser:
    """Megatron's parser with this project's flags, the defaults that the run needs, and errors of one line."""

    def error(message: str) -> NoReturn:  # argparse would print a usage text of a thousand lines first
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        stop(message + did_you_mean(unknown[1], parser._option_string_actions) if unknown else message)

    add_flags(parser).set_defaults(**_defaults(early))
    for action in parser._actions:  # --help of Megatron 0.19 fails at per cent signs in its texts
        action.help = action.help and re.sub(r"%%|%(?!\()", "%%", action.help)
    parser.error = error
    return parser


def _defaults(early: argparse.Namespace) -> dict[str, Any]:
    """Defaults of Megatron's flags that this run needs; what the user types still wins, and is checked."""
    # Megatron divides by the interval, and has no default.
    defaults: dict[str, Any] = {"task": early.task, "eval_interval": 1000}
    if early.task == "bert" and not installed("apex"):
        defaults["no_persist_layer_norm"] = True  # the norm of its head is torch's then, which cannot
    if getattr(early, "two_bw_correction", None) == "auto":
        defaults["adam_beta1"] = BETA1
    if early.pipeline_schedule != "megatron":
        # It runs an iteration again to find faulty GPUs, and reduces over the world in every iteration.
        defaults["rerun_mode"] = "disabled"
    return defaults


def rules() -> Iterator[Rule | Callable[[argparse.Namespace], str | None]]:
    """All rules, in the order in which a run looks at them."""
    yield from (torch_version, *unsupported.UNSUPPORTED, *CHECKS, *OWN, *environment.REFUSED)


def check(args: argparse.Namespace, stop: Stop) -> None:
    """Stop with one line at the first flag that cannot be honoured, and at the first mistake; report what a schedule
    does without."""
    for rule in rules():
        message = rule.message(args) if isinstance(rule, Rule) else rule(args)
        if message:
            stop(message)
    if (message := unsupported.settle(args)) and os.environ.get("RANK", "0") == "0":
        print(message, flush=True)
    environment.prepare_nccl(args)


def explain(error: BaseException) -> str:
    """An error of Megatron's in one line: its text, or the condition that it asserts, and its place."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = str(error) or (last.line or "").removeprefix("assert ")
    if "--" in text:
        return text
    return f"{text} ({type(error).__name__} in {os.path.basename(last.filename)}:{last.lineno})"
