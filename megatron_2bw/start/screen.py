"""What a run prints: not the lines of Megatron and torch that are known to say nothing about this run.

Invariant: a line that no row of KNOWN matches is printed. --verbose prints all, and Megatron's list of arguments.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from megatron_2bw.errors import guard_streams
from megatron_2bw.files import write_whole


class Known(NamedTuple):
    """Text that is not printed.

    source   PRINT, WARNING (of the module warnings), or the name of a logger
    pattern  of the text's begin; a print's text is a line
    times    the first ones of a rank that are printed
    """

    source: str
    pattern: str
    reason: str
    times: int = 0


PRINT, WARNING = "print", "warnings"
_RERUN, _SAVES = "megatron.core.rerun_state_machine", "megatron.core.dist_checkpointing.strategies.torch"
_ALWAYS, _ONCE = "says the same in every run", "printed twice"
_FORMAT = "details of the checkpoint's format"
_FILE, _SIZES = "in arguments.txt", "in the first line, which lists the parallel sizes"
_PROGRESS, _MEMORY = "start-up in detail", "in the lines of iterations; after the second iteration it is printed again"
KNOWN = (
    Known(WARNING, r"(Transformer Engine and )?Apex (is|are) not installed\. Falling back", "one for each module"),
    Known(WARNING, r"Only transformer-engine>=[\d.]+ supports MoE experts", "experts are not supported here"),
    Known(WARNING, r"Overriding default arguments for tokenizer_type:", "the command line has the tokenizer"),
    Known(WARNING, r"MimoModelConfig is experimental", "no run here uses it"),
    Known(WARNING, r"'pin_memory' argument is set as true but no accelerator", "Megatron sets it on the CPU too"),
    Known(WARNING, r"torch\.distributed is disabled, unavailable or uninitialized", "metadata are read by one process"),
    Known(WARNING, r"The argument order of load has been changed", "Megatron calls it"),
    Known(WARNING, r"Please use DTensor instead and we are deprecating ShardedTensor", "Megatron uses it"),
    Known(WARNING, r"\s*It is recommended to use a ModelConfig", "Megatron has none for BERT"),
    Known("torch.utils.cpp_extension", r"No CUDA runtime is found", "the device is the CPU"),
    Known(_RERUN, r"(RerunStateMachine initialized in|Setting RerunStateMachine) mode|Result validation", _FILE),
    Known("megatron.core.models.gpt.gpt_model", r"GPTModel IS DEPRECATED", _ALWAYS),
    Known("megatron.core.datasets.gpt_dataset", r"Unable to save MockGPTDataset indexes", "mock data have no files"),
    Known(_SAVES, r"MCore's async save is deprecated", "printed at saves that are not asynchronous, too"),
    Known(PRINT, r"$|-+$", "separates lines"),
    Known(
        PRINT, r"WARNING: one_logger package is required .*confluence|failed to find checkpoint .* in wandb", _ALWAYS
    ),
    Known(PRINT, r"WARNING: Setting args\.overlap_p2p_comm and args\.align_param_gather to False", _ALWAYS),
    Known(PRINT, r"Number of virtual stages per pipeline stage: None$", _SIZES),
    Known(PRINT, r"> initialized (tensor model|gtp weight|pipeline model|context|expert)", _SIZES),
    Known(PRINT, r"> setting random seeds to ", _FILE),
    Known(
        PRINT, r"> (initializing torch distributed|setting tensorboard|building train, validation, and test)", _PROGRESS
    ),
    Known(PRINT, r"> compiling dataset index builder|>>> done with dataset index builder", _PROGRESS),
    Known(PRINT, r"time to initialize megatron|\[(after|before) (?!the start of training)[^]]*\] datetime", _PROGRESS),
    Known(PRINT, r"done with setup \.\.\.|training \.\.\.|Overwriting rerun_state_machine", _PROGRESS),
    Known(PRINT, r"Number of (active )?parameters in |Total number of active parameters", "of one stage's part, in GB"),
    Known(PRINT, r"Total number of parameters in billions", _ONCE, times=1),
    Known(PRINT, r"Theoretical memory footprints", _ONCE, times=1),
    Known(PRINT, r"compute_activation_memory|Activation memory footprint|Number of in-flight microbatches", _ONCE),
    Known(PRINT, r"\[Rank \d+\] \((after 1 iterations|(before|after) save_checkpoint .*)\) memory", _MEMORY),
    Known(PRINT, r"Evaluating (on \d+ samples|iter \d+/\d+)$", "the result has a line"),
    Known(
        PRINT, r" *(checkpoint version \d|sharded_state_dict metadata loaded|Storing distributed optimizer)", _FORMAT
    ),
)

_matched: Counter[Known] = Counter()
_LOSS = re.compile(r"(?<=lm loss: )\S+|(?<=lm loss value: )\S+")


def hides(source: str, text: str) -> bool:
    """Whether a row of KNOWN matches the text; counts it."""
    for row in KNOWN:
        if row.source == source and re.match(row.pattern, text):
            _matched[row] += 1
            return _matched[row] > row.times
    return False


def show(line: str, colour: bool = False) -> str:
    """What is printed for a line of stdout, maybe nothing; with colour the loss is in bold."""
    if hides(PRINT, line.rstrip("\n")):
        return ""
    return _LOSS.sub("\033[1m\\g<0>\033[0m", line) if colour else line


def quiet() -> None:
    """From now on KNOWN is not printed, by no way on which Python prints. Call it before Megatron is imported."""
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    guard_streams(lambda line: show(line, colour))
    logging.basicConfig()  # from warnings on; --logging-level 20 prints more. Without a handler Megatron would set 20
    for name in {row.source for row in KNOWN} - {PRINT, WARNING}:
        logging.getLogger(name).addFilter(lambda record: not hides(record.name, record.getMessage()))
    original = warnings.showwarning

    def showwarning(message: Warning | str, *place: Any, **options: Any) -> None:
        if not hides(WARNING, str(message)):
            original(message, *place, **options)

    warnings.showwarning = showwarning


def hidden_lines() -> str:
    """A line about what this rank has not printed."""
    count = sum(max(0, found - row.times) for row, found in _matched.items())
    return f"> known lines of Megatron and torch that this rank did not print: {count} (--verbose prints all)"


def write_arguments(args: argparse.Namespace) -> str:
    """Write Megatron's list of arguments to a folder of the run; returns a line that names the file."""
    folder = args.save or args.tensorboard_dir or args.two_bw_trace
    if folder is None:
        return "> arguments: --verbose prints them, with --save DIR they are written to DIR/arguments.txt"
    path = Path(folder, "arguments.txt")
    lines = (f"  {name} {'.' * (48 - len(name))} {value}\n" for name, value in vars(args).items())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, "".join(sorted(lines, key=str.lower)))
    except OSError as error:
        return f"> arguments: not written: {path}: {error.strerror} (--verbose prints them)"
    return f"> arguments: {path} (--verbose prints them, and what is known of Megatron's and torch's lines)"
