"""From argv to checked arguments: this project's flags first, then Megatron's, then
every rule.

Invariant: every rule is looked at before training starts, first those that need no
torch (QUICK, as in `early.py`), and the first that is broken ends the run with its
line. Megatron's own validation follows; its error is the line then.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from megatron_2bw.base.errors import UserError, did_you_mean
from megatron_2bw.mcore.checkpoints import owner
from megatron_2bw.mcore.checkpoints.folder import (
    await_restored,
    restore_old,
    same_folder,
)
from megatron_2bw.run.flags import (
    checks,
    environment,
    hub_offline,
    project_flags,
    unsupported,
)
from megatron_2bw.run.flags.correction_flags import beta1
from megatron_2bw.run.flags.project_flags import add_flags
from megatron_2bw.run.flags.rule import installed, value

Stop = Callable[[str], NoReturn]

QUICK = (unsupported.refusal, checks.data, project_flags.mistake, environment.refusal)


def parse_early(argv: list[str], stop: Stop, task: str = "gpt") -> argparse.Namespace:
    """This project's flags, read before Megatron is imported and CUDA starts; and the
    `task`, "gpt" or "bert"."""
    parser = add_flags(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
    # Megatron's
    for flag in ("--tensor-model-parallel-size", "--context-parallel-size"):
        parser.add_argument(flag, type=int, default=1)
    parser.add_argument(
        "--use-megatron-fsdp", "--use-torch-fsdp2", action="store_true", dest="sharded"
    )
    parser.error = stop
    early, _ = parser.parse_known_args(argv)
    early.task = task
    environment.prepare_cuda(early)
    from megatron_2bw.mcore import cpu  # it imports torch

    if early.device == "cuda" and cpu.wanted("auto") and not early.dry_run:
        stop("--device cuda: no GPU is visible to torch; use --device cpu")
    return early


def parse(
    early: argparse.Namespace,
    stop: Stop,
    read: Callable[[argparse.ArgumentParser], object] = id,
) -> argparse.Namespace:
    """Megatron's arguments and this project's, parsed, validated and set globally by
    Megatron.

    Calls `stop` with one line if anything is wrong. The first rank calls `read` with
    Megatron's own parser.
    """
    from megatron.core.tokenizers.utils import build_tokenizer
    from megatron.training import arguments, checkpointing
    from megatron.training.global_vars import set_global_variables

    from megatron_2bw.mcore import cpu, patches, rebinding
    from megatron_2bw.mcore.checkpoints.unpickle import CheckpointException, causes
    from megatron_2bw.run.flags.rehearsal import rehearse

    parsers: list[argparse.ArgumentParser] = []

    def extend(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        if os.environ.get("RANK", "0") == "0":
            read(parser)
        parsers.append(prepare(parser, early, stop))
        return parser

    try:
        rebinding.apply(patches.for_reading())
        args = arguments.parse_args(extend)
        if args.use_checkpoint_args:
            _prepare_folder(args, stop)
            for source in ("pretrained_checkpoint", "load"):
                found = checkpointing.load_args_from_checkpoint(args, load_arg=source)
                project_flags.adopt(
                    args, found[-1] if isinstance(found, tuple) else found
                )
        if (line := project_flags.use_rampup(args)) and args.rank == 0:
            print(line, flush=True)
        if args.adam_beta1 is None:
            args.adam_beta1 = beta1(args)
        if args.lora_rank and args.lora_alpha is None:
            args.lora_alpha = 2 * args.lora_rank
        check(args, stop)
        if (
            cpu.installed()
            and (line := rehearse(args, parsers[0], sys.argv[1:]))
            and args.rank == 0
        ):
            print(line, flush=True)
        tokenizer = (
            "BertWordPieceLowerCase" if early.task == "bert" else "GPT2BPETokenizer"
        )
        arguments.validate_args(args, {"tokenizer_type": tokenizer})
        downloads = args.tokenizer_type in build_tokenizer.MEGATRON_TOKENIZERS
        flag = "--tokenizer-type" if downloads else "--tokenizer-model"
        with hub_offline.reached(flag, value(args, flag) or "."):
            build_tokenizer.build_tokenizer(
                args
            ) if args.dry_run else set_global_variables(args)
    except SystemExit as end:
        if end.code is None:  # Megatron's exit() after a line on the screen
            stop("Megatron ends the run in a line of its own: add --verbose to see it")
        raise  # --help, or a line of this project
    except CheckpointException as error:
        stop(f"--load {args.load}: {causes(error)}")
    except Exception as error:
        stop(explain(error))
    return args


def _prepare_folder(args: argparse.Namespace, stop: Stop) -> None:
    """For --use-checkpoint-args: Megatron reads the arguments before it loads. It
    asserts the first two itself."""
    if args.load is None and args.pretrained_checkpoint is None:
        stop("--use-checkpoint-args needs --load or --pretrained-checkpoint: add one")
    if args.non_persistent_ckpt_type == "local":
        stop(
            "--use-checkpoint-args does not work with --non-persistent-ckpt-type "
            "local: give the arguments"
        )
    if fault := checks.checkpoint(args):
        stop(fault)
    if args.dry_run or not same_folder(args.load, args.save):
        return
    if args.rank == 0:
        owner.hold(args.save)
        restore_old(args.save)
    else:
        await_restored(args.save)


def prepare(
    parser: argparse.ArgumentParser, early: argparse.Namespace, stop: Stop
) -> argparse.ArgumentParser:
    """Megatron's parser with this project's flags, the defaults that the run needs, and
    errors of one line."""

    # argparse would print a usage text of a thousand lines first
    def error(message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        stop(
            message + _hint(unknown[1], parser._option_string_actions)
            if unknown
            else message
        )

    add_flags(parser).set_defaults(**_defaults(early))
    parser._option_string_actions["--yaml-cfg"].type = _not_from_yaml
    # --help of Megatron 0.19 fails at per cent signs in its texts
    for action in parser._actions:
        action.help = action.help and re.sub(r"%%|%(?!\()", "%%", action.help)
    parser.error = error
    return parser


def _hint(word: str, flags: Iterable[str]) -> str:
    """The end of a line about an unknown flag: the nearest flag that is not its
    opposite and not always refused."""
    no = ("--no-", "--no_", "--disable", "--untie")
    alike = [
        flag
        for flag in flags
        if flag.startswith(no) == word.startswith(no) and flag not in unsupported.NEVER
    ]
    return did_you_mean(word, alike, cutoff=0.82)


def _not_from_yaml(text: str) -> NoReturn:
    raise argparse.ArgumentTypeError(
        "it would drop the flags of the command line; give Megatron's flags instead"
    )


def _defaults(early: argparse.Namespace) -> dict[str, Any]:
    """Defaults of Megatron's flags that this run needs; what the user types still wins,
    and is checked."""
    # Megatron divides by the interval, and has no default.
    defaults: dict[str, Any] = {"task": early.task, "eval_interval": 1000}
    if early.task == "bert" and not installed("apex"):
        # the norm of its head is torch's then, which cannot
        defaults["no_persist_layer_norm"] = True
    if getattr(early, "two_bw_correction", None) == "auto":
        # by the number of late microbatches, which the parsed arguments tell
        defaults["adam_beta1"] = None
    if early.pipeline_schedule != "megatron":
        # It runs an iteration again to find faulty GPUs, and reduces over the world in
        # every iteration.
        defaults["rerun_mode"] = "disabled"
    return defaults


def check(args: argparse.Namespace, stop: Stop) -> None:
    """Stop with one line at the first mistake or flag that cannot be honoured; report
    what a schedule does without."""
    for rule in (*QUICK, checks.checkpoint, checks.transformer_engine):
        if message := rule(args):
            stop(message)
    if (message := unsupported.settle(args)) and os.environ.get("RANK", "0") == "0":
        print(message, flush=True)
    environment.prepare_nccl(args)


def explain(error: BaseException) -> str:
    """An error of Megatron's in one line: its text, or the condition that it asserts,
    and its place."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = str(error) or (last.line or "").removeprefix("assert ")
    if "--" in text or isinstance(error, UserError):
        return text
    return f"{text} ({type(error).__name__} in {os.path.basename(last.filename)}:{last.lineno})"
