"""megatron-2bw: one command for all that this project does.

Invariant: a command is imported when it is called, so that `--help` and a misspelt name
are answered at once.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from megatron_2bw import __version__
from megatron_2bw.base.command_line import table_of
from megatron_2bw.base.errors import did_you_mean, run_program, usage_error
from megatron_2bw.base.processes import exit_on_signals

COMMANDS = table_of(__file__)  # by name: module:function, and what it does
EXAMPLES = """
  megatron-2bw plan --model config.json --cluster p3.16xlarge --max-global-batch-size 512 --json plan.json
  megatron-2bw preprocess --task gpt --input text.txt --output-prefix text --train-tokenizer bpe --vocab-size 8000
  megatron-2bw train gpt plan.json --data-path text --save checkpoints
  megatron-2bw evaluate gpt checkpoints --data-path text --split 90,5,5
  megatron-2bw sample checkpoints --prompt 'The pipeline'
"""


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    name = words.pop(0) if words else "--help"
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    if name in ("--version", "version"):
        print(f"megatron-2bw {__version__}")
        return 0
    if name not in COMMANDS:
        line = f"{name} is not a command{did_you_mean(name, COMMANDS)}: see megatron-2bw --help"
        usage_error("megatron-2bw", line)
    exit_on_signals()
    prog = f"megatron-2bw {name}"
    module, _, function = COMMANDS[name][0].partition(":")
    return run_program(
        prog, lambda: getattr(importlib.import_module(module), function)(words, prog)
    )


def usage() -> str:
    """The help: examples first."""
    lines = [f"usage: megatron-2bw COMMAND ...\n\nexamples:{EXAMPLES}"]
    lines.append("commands (each has --help):")
    for name, (_, meaning) in COMMANDS.items():
        lines.append(f"  {name:<13}{meaning}")
    lines.append("  version      the release")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
