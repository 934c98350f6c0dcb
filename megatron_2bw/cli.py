"""megatron-2bw: the command line of this project's own tools; `megatron-2bw-plan` is the planner's."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from megatron_2bw.errors import run_program, usage_error

# Each as "module:function", imported when it is called.
COMMANDS = {"convert": "megatron_2bw.convert.cli:main", "gpu-check": "megatron_2bw.gpu_check.runner:main"}


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    name = words.pop(0) if words else "--help"
    if name in ("-h", "--help"):
        print(f"usage: megatron-2bw COMMAND ...\n\ncommands: {', '.join(COMMANDS)} (megatron-2bw COMMAND --help)")
        return 0
    if name not in COMMANDS:
        usage_error("megatron-2bw", f"{name} is not a command; use one of {', '.join(COMMANDS)}")
    prog = f"megatron-2bw {name}"
    module, _, function = COMMANDS[name].partition(":")
    return run_program(prog, lambda: getattr(importlib.import_module(module), function)(words, prog))


if __name__ == "__main__":
    sys.exit(main())
