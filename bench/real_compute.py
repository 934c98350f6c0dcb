"""Two stages that really compute, one thread each, compared with the machine's limit in the same run.

    python bench/real_compute.py --json out/bench/real_compute.json

A GPT trains through the code path of pretrain_gpt_2bw.py under each schedule. The row "limit" is the compute of both
stages at the same time without communication: two busy cores share caches and memory, so this is the machine's limit,
not half the time of one process. of_limit is limit / iteration. Writes the JSON and a picture of the same name.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import bar_chart, flag_sets, new_parser, write_result
from bench.emulated import Observed, iteration_seconds, train
from megatron_2bw.errors import names_of
from megatron_2bw.gpu_check.entry import gpt_flags
from megatron_2bw.local_ranks import run_world

SCHEDULES = ("2bw", "pipedream-flush", "gpipe", "no-pipelining", "megatron")


def train_alone(rank: int, argv: list[str]) -> Observed:
    """A stage that makes its inputs and output gradients itself, and sends no messages."""
    from types import SimpleNamespace

    from megatron_2bw.core.p2p import Channel

    complete = SimpleNamespace(wait=lambda: None, is_completed=lambda: True)

    def receive(self, tensor):
        tensor.normal_(std=0.01)
        return complete

    Channel.receive, Channel.send = receive, lambda self, tensor: complete
    return train(rank, argv, 0.0, 0.0)


def command(schedule: str, chosen: argparse.Namespace, *flags: str) -> list[str]:
    text = f"""--pipeline-schedule {schedule} --pipeline-model-parallel-size 2 --train-iters {chosen.iterations}
        --global-batch-size {chosen.microbatches} --vocab-size 255 --make-vocab-size-divisible-by 128
        --log-interval 100"""
    return gpt_flags(chosen.layers, chosen.hidden, 4, chosen.sequence, text, *flags)


def main() -> None:
    parser = new_parser(__doc__, "real_compute")
    model = {"layers": 8, "hidden": 256, "sequence": 256, "microbatches": 4, "iterations": 14}
    for name, size in model.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--schedules", type=names_of(SCHEDULES), default=list(SCHEDULES), metavar="NAME,...")
    meaning = "more rows: 2bw with these flags"
    parser.add_argument("--flags", type=flag_sets, default=[], metavar="FLAGS;...", help=meaning)
    chosen = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in ("limit", *chosen.schedules, *(f"2bw {flags}" for flags in chosen.flags)):
        schedule, *flags = name.split()
        if name == "limit":
            runs = run_world(2, train_alone, command("2bw", chosen), timeout=600)
        else:
            runs = run_world(2, train, command(schedule, chosen, *flags), 0.0, 0.0, timeout=600)
        milliseconds = 1e3 * iteration_seconds(runs)
        limit = rows[0]["iteration_ms"] if rows else milliseconds
        tokens = chosen.microbatches * chosen.sequence / milliseconds * 1e3
        row = {"schedule": name, "iteration_ms": round(milliseconds, 1), "tokens_per_second": round(tokens)}
        rows.append(row | {"of_limit": round(limit / milliseconds, 4)})
        speed = f"iteration {milliseconds:8.1f} ms   {tokens:7.0f} tokens/s"
        print(f"{name:16s} {speed}   {rows[-1]['of_limit']:.3f} of the limit", flush=True)
    model = {name: getattr(chosen, name) for name in model}
    result = {"cores": os.cpu_count(), "model": model, "rows": rows}
    write_result(chosen.json, result, draw(rows))


def draw(rows: list[dict[str, Any]]) -> Any:
    names = [row["schedule"].replace("limit", "limit (both cores busy, no communication)") for row in rows]
    tokens = {"": [row["tokens_per_second"] for row in rows]}
    return bar_chart(names, tokens, "tokens per second, two stages on two cores", ",.0f")


if __name__ == "__main__":
    main()
