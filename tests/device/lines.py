"""How many lines of a training and of gpu-check that name CUDA or NCCL ran in `make
test-device`, and which did not."""

from __future__ import annotations

import re
import sys
import tokenize
from bisect import bisect
from pathlib import Path

import coverage

import megatron_2bw

PACKAGE = Path(megatron_2bw.__file__).parent
ROOMS = "engine", "mcore", "run", "tools/gpu_check"
DEVICE = re.compile(
    r"\w*(cuda|nccl|occupies_device)\w*|[\"'](cuda|nccl)[\"']", re.IGNORECASE
)
NOT_RUN = {  # the file, a word of the line: why it does not run there
    ("engine/pipeline.py", "warmed_up"): "it is of loops other than Megatron's",
    (
        "tools/gpu_check/rows.py",
        "overhead",
    ): "times mean nothing there, and the row takes minutes",
    (
        "tools/gpu_check/runner.py",
        "SKIPPED",
    ): "no row that needs a package is asked for",
    ("run/start/doctor.py", "NOTE"): "it is of hosts without a GPU",
}


def main() -> int:
    data = coverage.Coverage()
    data.load()
    run, missing = 0, set()
    for room in ROOMS:
        for path in sorted((PACKAGE / room).rglob("*.py")):
            name = str(path.relative_to(PACKAGE))
            _, statements, _, not_run, _ = data.analysis2(str(path))
            lines = path.read_text().splitlines()
            tokens = tokenize.generate_tokens(
                iter([f"{line}\n" for line in lines]).__next__
            )
            named = {
                token.start[0] for token in tokens if DEVICE.fullmatch(token.string)
            }
            for first in {statements[bisect(statements, line) - 1] for line in named}:
                run += first not in not_run
                missing |= (
                    {(name, lines[first - 1].strip())} if first in not_run else set()
                )
    print(
        f"Of {run + len(missing)} statements that name CUDA or NCCL {run} ran on the stand-in. Not:"
    )
    unknown = 0
    for place, line in sorted(missing):
        why = next(
            (
                why
                for (file, word), why in NOT_RUN.items()
                if file == place and word in line
            ),
            None,
        )
        unknown += why is None
        print(f"  {place}: {line}  # {why or 'NO REASON IS KNOWN'}")
    return unknown


if __name__ == "__main__":
    sys.exit(main())
