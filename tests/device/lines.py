"""How many lines of a training and of gpu-check that name CUDA or NCCL ran in `make
test-device`, and which did not."""

import re
import sys
import tokenize
from bisect import bisect
from collections.abc import Iterator
from pathlib import Path

import coverage

import megatron_2bw

PACKAGE = Path(megatron_2bw.__file__).parent
ROOMS = ("engine", "mcore", "run", "tools/gpu_check")
DEVICE = re.compile(
    r"\w*(cuda|nccl|occupies_device)\w*|[\"'](cuda|nccl)[\"']", re.IGNORECASE
)
NOT_RUN = {  # the file and a word of the line: why it does not run there
    "engine/pipeline.py: if not self.neighbours.occupies_device": "it is of loops other than Megatron's",
    "tools/gpu_check/rows.py: .*overhead": "times mean nothing there; it takes minutes",
    "tools/gpu_check/runner.py: .*SKIPPED": "no row that needs a package is asked for",
    "run/start/doctor.py: meaning": "it is of hosts without a GPU",
    "mcore/cpu.py": "it is of hosts without a GPU",
}


def statements_of(path: Path, data: coverage.Coverage) -> Iterator[tuple[str, bool]]:
    """The statements that name CUDA or NCCL, and whether they ran."""
    _, statements, _, not_run, _ = data.analysis2(str(path))
    lines = path.read_text().splitlines()
    firsts = set()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if DEVICE.fullmatch(token.string):
                firsts.add(statements[bisect(statements, token.start[0]) - 1])
    for first in sorted(firsts):
        yield lines[first - 1].strip(), first not in not_run


def reason(line: str) -> str | None:
    for pattern, why in NOT_RUN.items():
        if re.match(pattern, line):
            return why
    return None


def main() -> int:
    data = coverage.Coverage()
    data.load()
    number = 0
    missing = []
    for room in ROOMS:
        for path in sorted((PACKAGE / room).rglob("*.py")):
            for line, has_run in statements_of(path, data):
                number += 1
                if not has_run:
                    missing.append(f"{path.relative_to(PACKAGE)}: {line}")
    run = number - len(missing)
    what = "statements that name CUDA or NCCL"
    print(f"Of {number} {what} {run} ran on the stand-in. Not:")
    unknown = 0
    for line in missing:
        why = reason(line)
        unknown += why is None
        print(f"  {line}  # {why or 'NO REASON IS KNOWN'}")
    return unknown


if __name__ == "__main__":
    sys.exit(main())
