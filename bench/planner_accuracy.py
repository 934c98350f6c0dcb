"""The planner's predictions compared with published measurements.

    python bench/planner_accuracy.py --json docs/bench/planner_accuracy.json

takes about a minute; nothing is run.

Each check has rows of predicted and measured values, a bar, and whether it holds; a
check that fails stays in the table. The measured tables are in bench/measured/, their
sources in docs/planner.md. The status is 1 if a check fails.
"""

import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import planner_published as published
from bench.planner_checks import Check, check, table
from bench.tables import new_parser, write_result
from megatron_2bw.tools.planner.cost.simulated import Cost
from megatron_2bw.tools.planner.descriptions import cluster, model
from megatron_2bw.tools.planner.find import advice
from megatron_2bw.tools.planner.find.search import Search
from megatron_2bw.tools.planner.find.space import Space
from megatron_2bw.tools.planner.tell import explain

LARGE = replace(
    model.preset("llama-70b"),
    name="405b",
    layers=126,
    hidden=16384,
    heads=128,
    ffn=53248,
    head_size=0,
)


def search_time() -> list[Check]:
    rows = []
    most: dict[int, float] = {}
    holds = True
    for query in table("searches.csv"):
        shape = LARGE if query.name == LARGE.name else model.preset(query.name)
        servers = cluster.preset(query.cluster, query.servers)
        row = search_row(shape, servers, query.batch)
        rows.append(row | {"limit": query.limit})
        seconds = row[query.limited]
        most[query.limit] = max(most.get(query.limit, 0.0), seconds)
        holds &= seconds < query.limit
    result = "at most " + ", ".join(f"{seconds} s" for seconds in most.values())
    return [check("search_time", holds, result, rows)]


def search_row(shape: model.Model, servers: cluster.Cluster, batch: int) -> dict:
    begun = time.process_time()
    space = Space(batch, max_gap=0.1)
    precision = "bf16" if servers.device.bf16 else "fp16"
    search = Search(Cost(shape, servers, precision), space)
    plans, ties = advice.ranked(search, 8)
    seconds = time.process_time() - begun
    estimates = list(map(search.cost.estimate, plans))
    explain.text(explain.Result(search, estimates, ties))
    return {
        "model": shape.name,
        "GPUs": servers.gpus,
        "batch": batch,
        "best": plans[0].title,
        "seconds": round(seconds, 2),
        "with the words": round(time.process_time() - begun, 2),
    }


SECTIONS = (
    published.vtrain,
    published.zero_bubble_table,
    published.megatron_2021,
    published.korthikanti_2022,
    published.kernels,
    published.links,
    published.golden,
    published.sets,
    published.others,
    search_time,
)


def main() -> int:
    options = new_parser(__doc__, "planner_accuracy").parse_args()
    checks = []
    failed = 0
    for section in SECTIONS:
        for entry in section():
            checks.append(asdict(entry))
            failed += not entry.holds
            verdict = "holds" if entry.holds else "FAILS"
            line = f"{verdict}  {entry.name}: {entry.result} (bar: {entry.bar})"
            print(line, flush=True)
    cores = {"cores": os.cpu_count()}
    write_result(options.json, {"machine": cores, "checks": checks})
    print(f"{len(checks) - failed} of {len(checks)} hold")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
