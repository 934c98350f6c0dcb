"""Two stages that really compute, one thread each, beside the machine's own limit in the same run.

    python bench/real_compute.py --json out/bench/real_compute.json

A GPT is trained through pretrain_gpt_2bw.py's own path under each schedule. The row "limit" is the same compute of
both stages at the same time with no communication at all: two busy cores share caches and memory, so that is what
this machine can do, not half of one process. of_limit is limit / iteration. A picture is written beside the JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.emulated import Observed, iteration_seconds, train
from megatron_2bw.local_ranks import run_world

SCHEDULES = ("2bw", "pipedream-flush", "gpipe", "no-pipelining", "megatron")


@dataclass
class Row:
    schedule: str
    iteration_ms: float
    tokens_per_second: float
    of_limit: float


def train_alone(rank: int, argv: list[str]) -> Observed:
    """A stage whose inputs and output gradients are made on the spot, and whose messages go nowhere."""
    import torch

    from megatron_2bw.core.p2p import Receiver, Sender

    def take(self):
        self._expected -= 1
        return torch.randn_like(self._new_buffer()) * 0.01

    Receiver._post_early = lambda self: None
    Receiver.receive, Sender.send = take, lambda self, tensor: None
    return train(rank, argv, 0.0, 0.0)


def command(schedule: str, chosen: argparse.Namespace) -> list[str]:
    words = [
        "--pipeline-schedule",
        schedule,
        "--pipeline-model-parallel-size",
        2,
        "--num-layers",
        chosen.layers,
        "--hidden-size",
        chosen.hidden,
        "--num-attention-heads",
        4,
        "--seq-length",
        chosen.sequence,
        "--max-position-embeddings",
        chosen.sequence,
        "--micro-batch-size",
        1,
        "--global-batch-size",
        chosen.microbatches,
        "--train-iters",
        chosen.iterations,
        "--lr",
        1e-4,
        "--lr-decay-style",
        "constant",
        "--clip-grad",
        1.0,
        "--mock-data",
        "--tokenizer-type",
        "NullTokenizer",
        "--vocab-size",
        255,
        "--make-vocab-size-divisible-by",
        128,
        "--attention-dropout",
        0,
        "--hidden-dropout",
        0,
        "--num-workers",
        0,
        "--eval-iters",
        0,
        "--eval-interval",
        1000,
        "--log-interval",
        100,
        "--split",
        "98,1,1",
        "--device",
        "cpu",
    ]
    return [str(word) for word in words]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=14)
    parser.add_argument("--schedules", type=lambda text: text.split(","), default=list(SCHEDULES), metavar="NAME,...")
    parser.add_argument(
        "--flags",
        type=lambda text: [part.strip() for part in text.split(";")],
        default=[],
        metavar="FLAGS;...",
        help="more rows: 2bw with these flags of Megatron and of this project",
    )
    parser.add_argument("--json", type=Path, default=Path("out/bench/real_compute.json"))
    chosen = parser.parse_args()
    rows: list[Row] = []
    unknown = set(chosen.schedules) - set(SCHEDULES)
    if unknown:
        parser.error(f"--schedules: {', '.join(sorted(unknown))} is not one of {', '.join(SCHEDULES)}")
    for name in ("limit", *chosen.schedules, *(f"2bw {flags}" for flags in chosen.flags)):
        schedule, _, flags = name.partition(" ")
        if name == "limit":
            runs = run_world(2, train_alone, command("2bw", chosen), timeout=600)
        else:
            runs = run_world(2, train, [*command(schedule, chosen), *flags.split()], 0.0, 0.0, timeout=600)
        milliseconds = 1e3 * iteration_seconds(runs)
        limit = rows[0].iteration_ms if rows else milliseconds
        tokens = chosen.microbatches * chosen.sequence / milliseconds * 1e3
        rows.append(Row(name, round(milliseconds, 1), round(tokens), round(limit / milliseconds, 4)))
        print(
            f"{name:16s} iteration {milliseconds:8.1f} ms   {tokens:7.0f} tokens/s   "
            f"{rows[-1].of_limit:.3f} of the limit",
            flush=True,
        )
    chosen.json.parent.mkdir(parents=True, exist_ok=True)
    model = {key: getattr(chosen, key) for key in ("layers", "hidden", "sequence", "microbatches", "iterations")}
    result = {"cores": os.cpu_count(), "model": model, "rows": [asdict(row) for row in rows]}
    chosen.json.write_text(json.dumps(result, indent=1) + "\n")
    draw(rows, chosen.json.with_suffix(".png"))
    print(f"wrote {chosen.json} and {chosen.json.with_suffix('.png')}")


def draw(rows: list[Row], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 2.6), layout="constrained")
    axis = figure.subplots()
    names = [row.schedule for row in rows][::-1]
    axis.barh(names, [row.tokens_per_second for row in rows][::-1], color="#4292c6")
    axis.axvline(rows[0].tokens_per_second, color="black", linewidth=0.8, linestyle=":")
    axis.set_xlabel("tokens per second, two stages on two cores (dotted: both cores busy, no communication)")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
