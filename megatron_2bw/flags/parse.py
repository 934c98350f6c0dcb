"""From argv to checked arguments: this project's flags first, then Megatron's, then every rule.

Invariant: every rule is looked at before training starts (`unsupported.py`, `checks.py`, `own.py`, `environment.py`, in
this order), and the first that is broken ends the run with its line.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NoReturn

from megatron_2bw.checkpoints import owner
from megatron_2bw.checkpoints.folder import await_restored, restore_old, same_folder
from megatron_2bw.errors import did_you_mean
from megatron_2bw.flags import environment, unsupported
from megatron_2bw.flags.checks import CHECKS, checkpoint, default_tokenizer, torch_version
from megatron_2bw.flags.correction import BETA1
from megatron_2bw.flags.own import OWN, add_flags
from megatron_2bw.flags.rule import Rule, installed
from megatron_2bw.schedules import SCHEDULES

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


def parse(early: argparse.Namespace, stop: Stop) -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    """Megatron's arguments and this project's, parsed, validated and set globally by Megatron; and their parser.

    Calls `stop` with one line that names the flag if anything is wrong.
    """
    from megatron.training.arguments import parse_and_validate_args

    from megatron_2bw import cpu, guard
    from megatron_2bw.flags.rehearsal import rehearse
    from megatron_2bw.mcore import patches

    world = processes(os.environ, stop)
    parsers: list[argparse.ArgumentParser] = []

    def extend(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parsers.append(prepare(parser, early, stop))
        parse_args = parser.parse_args

        def parse_and_check() -> argparse.Namespace:
            args = parse_args()
            args.world_size = world
            if (line := repeated(parser, sys.argv[1:])) and os.environ.get("RANK", "0") == "0":
                print(f"> {line}", flush=True)
            if not args.use_checkpoint_args:
                check(args, stop)  # before Megatron's own validation, whose messages name no flags
            else:
                guard.apply(patches.for_reading())
                fault = checkpoint(args)
                if fault:
                    stop(fault)
                if same_folder(args.load, args.save):  # Megatron reads the arguments before it loads
                    if os.environ.get("RANK", "0") == "0":
                        owner.hold(args.save)
                        restore_old(args.save)
                    else:
                        await_restored(args.save)
            return args

        parser.parse_args = parse_and_check
        return parser

    def rehearsed(validate: Callable[..., None]) -> Callable[..., None]:
        def call(args: argparse.Namespace, defaults: dict[str, Any]) -> None:
            if (line := rehearse(args, parsers[0], sys.argv[1:])) and os.environ.get("RANK", "0") == "0":
                print(line, flush=True)
            validate(args, defaults)

        return call

    undo = guard.apply(patches.for_rehearsal(rehearsed)) if cpu.installed() else lambda: None
    try:
        args = parse_and_validate_args(extend, args_defaults={"tokenizer_type": default_tokenizer(early.task)})
    except Exception as error:  # Megatron asserts, raises and indexes; the user gets one line
        stop(explain(error, parsers[0] if parsers else None))
    finally:
        undo()
    if args.use_checkpoint_args:
        check(args, stop)  # the checkpoint has brought the model's arguments, and what they ask for
    return args, parsers[0]


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


def repeated(parser: argparse.ArgumentParser, argv: Sequence[str]) -> str | None:
    """A line about the flags that `argv` has several times with different values, of which the last counts; or None."""
    typed: dict[argparse.Action, list[str]] = {}
    action = None
    for word in argv:
        name, _, value = word.partition("=")
        if name in parser._option_string_actions:
            action = parser._option_string_actions[name]
            typed.setdefault(action, []).append(value)
        elif action is not None:
            typed[action][-1] = f"{typed[action][-1]} {word}".strip()
    several = (argparse._AppendAction, argparse._CountAction)
    found = [
        f"{action.option_strings[0]} {', then '.join(values)}"
        for action, values in typed.items()
        if len(set(values)) > 1 and not isinstance(action, several)
    ]
    return f"typed several times, the last one counts: {'; '.join(found)}" if found else None


def processes(environment: Mapping[str, str], stop: Stop) -> int:
    """The number of processes of the run, from the variables that torchrun sets."""
    defaults = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    numbers = {name: environment.get(name, default) for name, default in defaults.items()}
    for name, text in numbers.items():
        if not text.isdecimal():
            stop(f"the environment variable {name} is {text!r}, not a number: start the processes with torchrun")
    return int(numbers["WORLD_SIZE"])


def rules() -> Iterator[Rule | Callable[[argparse.Namespace], str | None]]:
    """All rules, in the order in which a run looks at them."""
    yield from (torch_version, *unsupported.UNSUPPORTED, *CHECKS, *OWN, *environment.REFUSED)


def check(args: argparse.Namespace, stop: Stop) -> None:
    """Stop with one line at the first flag that cannot be honoured, and at the first mistake."""
    for rule in rules():
        message = rule.message(args) if isinstance(rule, Rule) else rule(args)
        if message:
            stop(message)
    schedule = SCHEDULES.get(args.pipeline_schedule)
    if schedule is not None and schedule.late_step and args.use_distributed_optimizer and args.overlap_grad_reduce:
        # The late step gathers while the stage computes, before a forward asks; Megatron's hooks would repeat it.
        args.overlap_param_gather = False
    environment.prepare_nccl(args)


_TOO_LARGE = (
    "the model does not fit into the memory: check --num-layers, --hidden-size, --ffn-hidden-size, "
    "--num-attention-heads, --kv-channels, --vocab-size, --make-vocab-size-divisible-by, --seq-length, "
    "--max-position-embeddings and --micro-batch-size"
)


def explain(error: BaseException, parser: argparse.ArgumentParser | None) -> str:
    """An error of Megatron's in one line. If its text names no flag, the condition that was broken may."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        action = frame.f_locals.get("action")
        if isinstance(action, argparse.Action) and "arg_string" in frame.f_locals:  # argparse converts a value
            return f"argument {action.option_strings[0]}: invalid value: {frame.f_locals['arg_string']!r}"
    text = name_flags(str(error), parser)
    if "--" in text:
        return text
    if isinstance(error, MemoryError) or "can't allocate memory" in text or "out of memory" in text:
        return f"{_TOO_LARGE} ({text or 'MemoryError'})"
    held = [getattr(error, name, None) for name in ("filename", "doc", "object")]  # of OSError, JSON and Unicode errors
    for flag, word in pairwise(sys.argv[1:]):
        if flag.startswith("--") and not word.startswith("--") and word in held:
            return f"{flag} {word}: {text}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    statement = re.match(r"assert (.*?)(, *f?['\"\\(].*)?$", last.line or "")
    condition = name_flags(statement[1].rstrip(" \\"), parser) if statement else ""
    place = f"{type(error).__name__} in {os.path.basename(last.filename)}:{last.lineno}"
    text = text or "Megatron refuses this combination of flags"
    return f"{text} ({place}: it must be that {condition})" if "--" in condition else f"{text} ({place})"


def name_flags(message: str, parser: argparse.ArgumentParser | None) -> str:
    """`message` with the names that Megatron's texts use (num_layers, num-layers) turned into flags (--num-layers)."""
    actions = parser._actions if parser else []
    flags = {action.dest: action.option_strings[0] for action in actions if action.option_strings}

    def named(match: re.Match) -> str:
        owner, name = match[1], match[2]
        sure = owner or "_" in name or "-" in name  # "save" and "optimizer" are also words
        return flags.get(name.replace("-", "_"), match[0]) if sure else match[0]

    return re.sub(r"(?<![-\w])(args\.|self\.|config\.)?([a-z][a-z0-9]*(?:[_-][a-z0-9]+)*)\b", named, message)
