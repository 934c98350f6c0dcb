"""Trains the plans of a plan's JSON on this machine, and gives the logs to `megatron-2bw plan calibrate`.

    megatron-2bw plan --model gpt-355m --cluster mine.yaml --max-global-batch-size 64 --json plan.json
    python bench/train_plans.py plan.json --cluster mine.yaml --top 3

Further flags are those of the entry script. Each plan has a log in --out, and its prediction is printed next to the
median of its iterations. A plan that fails does not stop the others. cluster.yaml is the calibrated cluster.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_2bw import run_log
from megatron_2bw.errors import UserError, run_program
from megatron_2bw.planner import tools
from megatron_2bw.planner.measure.runs import read_log
from megatron_2bw.processes import exit_on_signals, stop_tree
from megatron_2bw.start.torchrun import PLAIN_TORCH, start, torchrun


def flags(found: dict[str, Any], plan: dict[str, Any], iterations: int, device: str) -> list[str]:
    """Of the entry script: the model, the plan, mock data, and a line in the log for each iteration."""
    words = [*found["run"]["model"], *plan["flags"], *found["run"]["data"], "--device", device, "--verbose"]
    words += f"--train-iters {iterations} --log-interval 1 --eval-iters 0 --eval-interval {iterations + 1}".split()
    words += "--lr 0.0001 --lr-decay-style constant --clip-grad 1.0".split()
    if device != "cpu" and importlib.util.find_spec("transformer_engine") is None:
        words += PLAIN_TORCH
    if found["precision"] == "fp16":  # with Megatron's initial scale of 2^32 the first steps would be skipped
        words += ["--initial-loss-scale", "1024"]
    return words


def train(words: list[str], ranks: int, task: str, log: Path, timeout: float) -> str | None:
    """Train until the end or the time limit. None, or why it did not end well."""
    with open(log, "wb") as file:
        process = start([*torchrun(ranks, task), *words], file)
    try:
        code = process.wait(timeout)
    except subprocess.TimeoutExpired:
        return f"more than {timeout:g} s"
    finally:
        stop_tree(process, 10.0)
    return run_log.cause(log.read_text(errors="replace")) if code else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path, metavar="PLAN.json", help="of `megatron-2bw plan --json`")
    parser.add_argument("--cluster", required=True, metavar="NAME|FILE.yaml", help="that of the plan, to be calibrated")
    parser.add_argument("--top", type=int, default=3, help="the fastest plans to train (default: 3)")
    parser.add_argument("--iterations", type=int, default=8, help="of each plan (default: 8)")
    parser.add_argument("--timeout", type=float, default=600, metavar="SECONDS", help="of each plan (default: 600)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--out", type=Path, default=Path("out/train_plans"), metavar="DIR", help="logs, cluster.yaml")
    options, more = parser.parse_known_args()
    exit_on_signals()  # so that a running plan ends too
    options.out.mkdir(parents=True, exist_ok=True)
    found, logs = json.loads(options.plan.read_text()), []
    device = "cpu" if found["cluster"]["device"]["name"] == "cpu" else options.device
    for number, plan in enumerate(found["plans"][: options.top], 1):
        log = options.out / f"plan-{number}.log"
        ranks = plan["tensor"] * plan["context"] * plan["depth"] * plan["width"]
        words = [*flags(found, plan, options.iterations, device), *more]
        fault = train(words, ranks, found["model"]["kind"], log, options.timeout)
        text = f"{number} {plan['name']}: predicted {1e3 * plan['seconds']:.1f} ms"
        if fault is None:
            measured = read_log(log).seconds
            fault = f"measured {1e3 * measured:.1f} ms, ratio {plan['seconds'] / measured:.2f}"
            logs.append(str(log))
        print(f"{text}, {fault}", flush=True)
    if not logs:
        raise UserError("no plan has run")
    words = [*logs, "--cluster", options.cluster, "--out", str(options.out / "cluster.yaml")]
    return tools.run_calibrate(words, "calibrate")


if __name__ == "__main__":
    sys.exit(run_program("train_plans.py", main))
