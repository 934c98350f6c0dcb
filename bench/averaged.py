"""Validation losses of averages of the last weights, of the runs of docs/convergence/plain2k.json.

    python bench/averaged.py vanilla all 2bw

Runs each variant's command again with a checkpoint every 10 iterations, and evaluates the mean of the last 1, 5, 10 and
20 checkpoints. Prints, and writes to --json, the losses by variant and number.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.tables import new_parser, write_result

ROOT = Path(__file__).resolve().parent.parent
MODEL = "mp_rank_00/model_optim_rng.pt"


def run(command: list[str], *more: str) -> str:
    words = [sys.executable, *(word.replace("~", str(Path.home())) for word in command[1:]), *more]
    words += ["--ckpt-format", "torch"]
    done = subprocess.run(words, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, check=True)
    return done.stdout.decode()


def main() -> int:
    parser = new_parser(__doc__, "averaged")
    parser.add_argument("variants", nargs="+")
    options = parser.parse_args()
    runs = json.loads((ROOT / "docs/convergence/plain2k.json").read_text())["runs"]
    commands = {each["variant"]: each["command"] for each in runs}
    losses: dict[str, dict[int, float]] = {}
    for variant in options.variants:
        with tempfile.TemporaryDirectory() as name:
            run(commands[variant], "--save", f"{name}/all", "--save-interval", "10")
            saved = [torch.load(at / MODEL, weights_only=False) for at in sorted(Path(name, "all").glob("iter_*"))]
            for count in (1, 5, 10, 20):
                last = saved[-1] | {"model": dict(saved[-1]["model"])}
                last.pop("optimizer")
                for key, value in last["model"].items():
                    if isinstance(value, torch.Tensor):
                        last["model"][key] = torch.stack([each["model"][key] for each in saved[-count:]]).mean(0)
                path = Path(name, str(count), "iter_0000300", MODEL)
                path.parent.mkdir(parents=True)
                torch.save(last, path)
                (path.parents[2] / "latest_checkpointed_iteration.txt").write_text("300")
                load = ["--load", f"{name}/{count}", "--skip-train", "--no-load-optim", "--no-load-rng"]
                text = run(commands["vanilla"], *load)
                found = float(re.findall(r"validation loss.*lm loss value: (\S+)", text)[-1])
                losses.setdefault(variant, {})[count] = found
                print(variant, count, found, flush=True)
    write_result(options.json, losses)
    return 0


if __name__ == "__main__":
    sys.exit(main())
