"""A long run of a tiny model, with all that a long run does: what grows?

    python bench/soak.py --iterations 20000

Two stages of 2BW train with evaluations, saves, a trace, W&B offline and TensorBoard. Each rank notes every few
iterations its memory, threads, open files, and the time and the processor's time of an iteration. The JSON has these by
iteration, and the medians of the second and of the last quarter, which should be the same.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil

from bench.tables import new_parser, write_result
from megatron_2bw.gpu_check.entry import gpt_flags, train
from megatron_2bw.local_ranks import run_world

COLUMNS = ("iteration", "memory (MiB)", "threads", "open files", "iteration (ms)", "processor (ms)")


def watch(_rank: int, argv: list[str], every: int) -> list[tuple[float, ...]]:
    """Train with `argv`; a row of COLUMNS every few iterations. The time is a median."""
    os.environ["WANDB_MODE"] = "offline"
    me, rows, ends, used = psutil.Process(), [], [time.perf_counter()], [0.0]  # used: the processor's, at each row

    def note(_losses: Any) -> None:
        ends.append(time.perf_counter())
        if len(ends) > every:
            done = every * (len(rows) + 1)
            taken = 1e3 * statistics.median(end - begin for begin, end in zip(ends, ends[1:]))
            memory = me.memory_info().rss / 2**20
            used.append(sum(me.cpu_times()[:2]))
            mine = 1e3 * (used[-1] - used[-2]) / every
            rows.append((done, round(memory, 2), me.num_threads(), me.num_fds(), round(taken, 2), round(mine, 2)))
            del ends[:-1]

    train(argv, after_step=note)
    return rows


def command(iterations: int, folder: Path) -> list[str]:
    often = max(1, iterations // 40)
    writes = ("--save", folder / "saved", "--two-bw-trace", folder / "trace", "--tensorboard-dir", folder / "board")
    wandb = ("--wandb-project", "soak", "--wandb-exp-name", "soak", "--wandb-save-dir", folder)
    text = f"""--bf16 --pipeline-schedule 2bw --pipeline-model-parallel-size 2 --micro-batch-size 2
        --global-batch-size 4 --train-iters {iterations} --save-interval {often} --eval-interval {often} --eval-iters 2
        --log-interval 10 --lr 1e-3 --vocab-size 127 --split 90,10,0 --save-retain-interval {iterations}"""
    return gpt_flags(2, 32, 4, 16, text, *writes, *wandb)


def quarters(rows: list[tuple[float, ...]]) -> dict[str, tuple[float, float]]:
    """By column the medians of the second and of the last quarter."""
    size = len(rows) // 4
    columns = {name: [row[place] for row in rows] for place, name in enumerate(COLUMNS) if place}
    return {name: (statistics.median(c[size : 2 * size]), statistics.median(c[-size:])) for name, c in columns.items()}


def main() -> None:
    parser = new_parser(__doc__, "soak")
    parser.add_argument("--iterations", type=int, default=20_000)
    options = parser.parse_args()
    every = max(1, options.iterations // 200)
    with tempfile.TemporaryDirectory(prefix="soak_") as folder:
        begin = time.monotonic()
        ranks = run_world(2, watch, command(options.iterations, Path(folder)), every, timeout=86_400)
        seconds = round(time.monotonic() - begin, 1)
    found = {f"stage {rank}": quarters(rows) for rank, rows in enumerate(ranks)}
    result = {"iterations": options.iterations, "seconds": seconds, "second and last quarter": found}
    write_result(options.json, result | {"columns": COLUMNS, "ranks": ranks})
    print(f"{options.iterations} iterations in {seconds:.0f} s; second and last quarter:")
    for stage, columns in found.items():
        print(f"{stage}: " + ", ".join(f"{name} {one:g} {other:g}" for name, (one, other) in columns.items()))


if __name__ == "__main__":
    main()
