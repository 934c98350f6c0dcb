"""How long a wrong flag takes to be answered, and how many lines a short run prints.

    python bench/front_door.py

Each wrong command line is started three times through `megatron-2bw train`, the entry script and torchrun; the table
has the median seconds to the first line of the error. The run has two CPU ranks and twelve iterations.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import new_parser, write_result
from megatron_2bw.start.torchrun import ROOT, start, torchrun
from tests.distributed.training import command

WRONG = {
    "a typo": ["--hiden-size", "64"],
    "no number": ["--lr", "fast"],
    "an unknown schedule": ["--pipeline-schedule", "3bw"],
    "a missing file": ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "./nowhere"],
    "no data": ["--data-path", "nowhere"],
    "a batch that does not divide": ["--global-batch-size", "7"],
    "layers that do not divide": ["--num-layers", "5"],
    "a checkpoint that is not there": ["--load", "nowhere", "--exit-on-missing-checkpoint"],
    "not supported": ["--num-experts", "4"],
    "without effect": ["--initial-loss-scale", "64"],
}


def seconds(words: list[str]) -> tuple[float, str]:
    """Until the first line of the error; and that line."""
    begun = time.monotonic()
    process = start(words, cwd=ROOT)
    for line in process.stdout:
        if "error: " in line:
            took = time.monotonic() - begun
            process.communicate()
            return took, line.strip()
    raise SystemExit(f"no error: {' '.join(words)}")


def main() -> int:
    options = new_parser(__doc__, "front_door").parse_args()
    right = command(2, 4, "2bw", train_iters=12)
    starts = {
        "megatron-2bw train": [sys.executable, "-m", "megatron_2bw.cli", "train", "gpt"],
        "entry script": [sys.executable, "pretrain_gpt_2bw.py"],
        "torchrun": torchrun(2),
    }
    rows = {}
    for name, words in WRONG.items():
        mock = [word for word in right if word != "--mock-data" or name != "no data"]
        rows[name] = {
            how: round(statistics.median(seconds([*start, *mock, *words])[0] for _ in range(3)), 2)
            for how, start in starts.items()
        }
        line = seconds([*starts["megatron-2bw train"], *mock, *words])[1]
        print(f"{name:<32}" + "".join(f"{took:>8.2f} s" for took in rows[name].values()) + f"  {line}", flush=True)
    ran = start([*starts["megatron-2bw train"], *right], cwd=ROOT)
    lines = len(ran.communicate()[0].splitlines())
    print(f"a run of 12 iterations: status {ran.returncode}, {lines} lines")
    write_result(options.json, {"seconds": rows, "lines": lines})
    return ran.returncode


if __name__ == "__main__":
    sys.exit(main())
