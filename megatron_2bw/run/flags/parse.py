"""From argv to checked arguments: this project's flags first, then Megatron's, then
every rule.

A command line is parsed three times, since each parse comes before an import or a
decision that the next one needs:

1. by `quick_check.mistake`, before torch is imported: a mistake is answered in half a
   second;
2. by `parse_early`, this project's flags alone: torch is there, and the device is
   chosen before CUDA starts and Megatron is imported;
3. by Megatron's own `parse_args`, in `parse`. Megatron reads `sys.argv` itself.

Invariant: every rule is looked at before training starts, first those that need no
torch (QUICK, as in quick_check.py), and the first that is broken ends the run with its
line. Megatron's own validation follows; its error is the line then.
"""

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
    combinations,
    environment,
    hub_offline,
    project_flags,
    unsupported,
)
from megatron_2bw.run.flags.project_flags import add_flags
from megatron_2bw.run.flags.rule import installed, value

Stop = Callable[[str], NoReturn]

QUICK = (unsupported.refusal, checks.data, combinations.mistake, environment.refusal)


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
    read: Callable[[argparse.ArgumentParser], object] | None = None,
) -> argparse.Namespace:
    """Megatron's arguments and this project's, parsed, validated and set globally by
    Megatron.

    Calls `stop` with one line if anything is wrong. The first rank calls `read` with
    Megatron's own parser.
    """
    from megatron.training import arguments

    from megatron_2bw.mcore import cpu, patches, rebinding
    from megatron_2bw.mcore.checkpoints.unpickle import CheckpointException, causes
    from megatron_2bw.run.flags.rehearsal import rehearse

    parsers = []

    def extend(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        if read is not None and _is_first_rank():
            read(parser)
        parsers.append(prepare(parser, early, stop))
        return parser

    try:
        rebinding.apply(patches.for_reading())
        args = arguments.parse_args(extend)
        if args.use_checkpoint_args:
            _use_checkpoint_args(args, stop)
        for line in project_flags.translate(args):
            _print_first(line)
        if args.lora_rank and args.lora_alpha is None:
            args.lora_alpha = 2 * args.lora_rank
        check(args, stop)
        if cpu.installed():
            _print_first(rehearse(args, parsers[0], sys.argv[1:]))
        tokenizer = "GPT2BPETokenizer"
        if early.task == "bert":
            tokenizer = "BertWordPieceLowerCase"
        arguments.validate_args(args, {"tokenizer_type": tokenizer})
        _set_globals(args)
    except SystemExit as end:
        if end.code is None:  # Megatron's exit() after a line on the screen
            stop("Megatron ends the run in a line of its own: add --verbose to see it")
        raise  # --help, or a line of this project
    except CheckpointException as error:
        stop(f"--load {args.load}: {causes(error)}")
    except Exception as error:
        stop(explain(error))
    return args


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _print_first(line: str | None) -> None:
    """Print a line, if there is one, on the first rank."""
    if line and _is_first_rank():
        print(line, flush=True)


def _use_checkpoint_args(args: argparse.Namespace, stop: Stop) -> None:
    """Take the arguments of a checkpoint (--use-checkpoint-args). Megatron reads them
    before it loads; it asserts the first two conditions itself."""
    from megatron.training import checkpointing

    if args.load is None and args.pretrained_checkpoint is None:
        stop("--use-checkpoint-args needs --load or --pretrained-checkpoint: add one")
    if args.non_persistent_ckpt_type == "local":
        stop(
            "--use-checkpoint-args does not work with --non-persistent-ckpt-type "
            "local: give the arguments"
        )
    if fault := checks.checkpoint(args):
        stop(fault)
    if not args.dry_run and same_folder(args.load, args.save):
        if args.rank == 0:
            owner.hold(args.save)
            restore_old(args.save)
        else:
            await_restored(args.save)
    for source in ("pretrained_checkpoint", "load"):
        saved = checkpointing.load_args_from_checkpoint(args, load_arg=source)
        if isinstance(saved, tuple):
            saved = saved[-1]
        project_flags.adopt(args, saved)


def _set_globals(args: argparse.Namespace) -> None:
    """Megatron's global objects. A dry run makes only the tokenizer, which may be
    missing."""
    from megatron.core.tokenizers.utils import build_tokenizer
    from megatron.training.global_vars import set_global_variables

    downloads = args.tokenizer_type in build_tokenizer.MEGATRON_TOKENIZERS
    flag = "--tokenizer-type" if downloads else "--tokenizer-model"
    with hub_offline.reached(flag, value(args, flag) or "."):
        if args.dry_run:
            build_tokenizer.build_tokenizer(args)
        else:
            set_global_variables(args)


def prepare(
    parser: argparse.ArgumentParser, early: argparse.Namespace, stop: Stop
) -> argparse.ArgumentParser:
    """Megatron's parser with this project's flags, the defaults that the run needs, and
    errors of one line."""

    # argparse would print a usage text of a thousand lines first
    def error(message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        if unknown:
            message += _hint(unknown[1], parser._option_string_actions)
        stop(message)

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
    alike = []
    for flag in flags:
        if flag.startswith(no) == word.startswith(no) and flag not in unsupported.NEVER:
            alike.append(flag)
    return did_you_mean(word, alike, cutoff=0.82)


def _not_from_yaml(text: str) -> NoReturn:
    raise argparse.ArgumentTypeError(
        "it would drop the flags of the command line; give Megatron's flags instead"
    )


def _defaults(early: argparse.Namespace) -> dict[str, Any]:
    """Defaults of Megatron's flags that this run needs; what the user types still wins,
    and is checked."""
    # Megatron divides by the interval, and has no default.
    defaults = {"task": early.task, "eval_interval": 1000}
    if early.task == "bert" and not installed("apex"):
        # the norm of its head is torch's then, which cannot
        defaults["no_persist_layer_norm"] = True
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
    _print_first(unsupported.leave_out(args))
    environment.prepare_nccl(args)


def explain(error: BaseException) -> str:
    """An error of Megatron's in one line: its text, or the condition that it asserts,
    and its place."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = str(error) or (last.line or "").removeprefix("assert ")
    if "--" in text or isinstance(error, UserError):
        return text
    file = os.path.basename(last.filename)
    return f"{text} ({type(error).__name__} in {file}:{last.lineno})"
