"""The planner's predictions compared with measurements: published tables, and pipelines
run here.

    python bench/planner_accuracy.py --json docs/bench/planner_accuracy.json
    about a minute, nothing is run
    python bench/planner_accuracy.py --emulated 2,4,8 --monotonic 500 --json ...
    and pipelines, random queries

Each check has rows of predicted and measured values, a bar, and whether it holds; a
check that fails stays in the table. The measured tables are in bench/measured/, their
sources in docs/planner_accuracy.md. The status is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import random
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import planner_published as published
from bench.planner_checks import Check, check, compared, table, within
from bench.schedule_efficiency import OURS, measure
from bench.tables import new_parser, write_result
from megatron_2bw.base.errors import names_of
from megatron_2bw.schedules import SCHEDULES, TwoBW
from megatron_2bw.schedules.interleaved import Interleaved
from megatron_2bw.tools.planner.cost.simulated import Cost
from megatron_2bw.tools.planner.descriptions import cluster, model
from megatron_2bw.tools.planner.descriptions.inputs import numbers
from megatron_2bw.tools.planner.descriptions.plan import Plan
from megatron_2bw.tools.planner.find import advice
from megatron_2bw.tools.planner.find.search import Search, on_fewer
from megatron_2bw.tools.planner.find.space import Space
from megatron_2bw.tools.planner.tell import explain
from megatron_2bw.tools.timelines.simulator import Times, iteration_time

LARGE = replace(
    model.preset("llama-70b"),
    name="405b",
    layers=126,
    hidden=16384,
    heads=128,
    ffn=53248,
    head_size=0,
)
FORWARD, BACKWARD = 100.0, 200.0  # milliseconds
PIPELINES = {
    "megatron-interleaved": Interleaved(2),
    "pipedream": SCHEDULES["pipedream"],
    "2bw, one slot": TwoBW(1),
}


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
    space = Space(batch, extrapolate=True)
    search = Search(Cost(shape, servers, precision_of(servers)), space)
    plans, ties = advice.ranked(search, 8)
    seconds = time.process_time() - begun
    estimates = list(map(search.cost.estimate, plans))
    result = explain.Result(search.cost, space, estimates, search, 0.0, ties)
    explain.table(result)
    explain.reason(result)
    _ = result.fewer  # searches too
    return {
        "model": shape.name,
        "GPUs": servers.gpus,
        "batch": batch,
        "best": described(plans[0]),
        "simulated plans": search.examined,
        "seconds": round(seconds, 2),
        "with the words": round(time.process_time() - begun, 2),
    }


def described(plan: Plan) -> str:
    recompute = "" if plan.recompute == "none" else f", {plan.recompute} recompute"
    order = ", pipelines inside servers" if plan.pipeline_inside else ""
    sizes = f"t{plan.tensor} d{plan.depth} w{plan.width} b{plan.microbatch} m{plan.microbatches}"
    return f"{plan.schedule_name} {sizes}{recompute}{order}"


def precision_of(servers: cluster.Cluster) -> str:
    return "bf16" if servers.device.bf16 else "fp16"


def emulated(depths: list[int]) -> list[Check]:
    """Every schedule at each depth, with as many microbatches as stages.

    A stage's computation in addition to its sleep is measured once, on one stage alone.
    The simulator gets this time and no measurement of the pipelines that it predicts.
    """
    alone = emulated_ms("2bw", 1, 8) / 8 - FORWARD - BACKWARD
    rows = []
    for depth in depths:
        for name in (*OURS, *PIPELINES):
            measured = emulated_ms(name, depth, depth)
            predicted = simulated_ms(name, depth, alone)
            shape = {"schedule": name, "d": depth, "m": depth}
            rows.append(shape | compared(measured, predicted, "ms", 1))
            times = f"measured {measured:8.1f} ms  predicted {predicted:8.1f} ms"
            print(f"  {name:22s} d {depth}  {times}", flush=True)
    return [within("emulated", rows, ", ".join(map(str, depths)))]


def emulated_ms(name: str, depth: int, microbatches: int) -> float:
    chosen = argparse.Namespace(
        forward_ms=FORWARD, backward_ms=BACKWARD, iterations=9, width=1, real=False
    )
    flags = "--two-bw-gradient-slots 1" if name == "2bw, one slot" else ""
    schedule = name.removesuffix(", one slot")
    return measure(schedule, depth, microbatches, chosen, flags)["iteration_ms"]


def simulated_ms(name: str, depth: int, alone: float) -> float:
    """alone: milliseconds that a microbatch computes on one stage"""
    # each of two chunks computes
    computed = alone if name == "megatron-interleaved" else alone / 2
    times = Times(
        FORWARD + computed, BACKWARD + computed, joint_step=name == "pipedream"
    )
    pipelines = {"megatron": SCHEDULES["pipedream-flush"]} | SCHEDULES | PIPELINES
    return iteration_time(pipelines[name], depth, depth, times)


def with_more(servers: cluster.Cluster, resource: str) -> cluster.Cluster:
    device, between = servers.device, servers.between
    if resource == "1.5 x memory":
        device = replace(device, memory_gib=1.5 * device.memory_gib)
    elif resource == "2 x network":
        between = replace(between, gb_s=2 * between.gb_s)
    elif resource == "2 x servers":
        servers = replace(servers, servers=2 * servers.servers)
    else:
        device = replace(device, tflops=1.5 * device.tflops)
    return replace(servers, device=device, between=between)


RESOURCES = ["1.5 x memory", "2 x network", "2 x servers", "1.5 x FLOP/s"]


def monotonic(queries: int) -> list[Check]:
    """Random models and clusters, each with more of one thing: the best plan may not be
    slower."""
    draw = random.Random(1)
    worse = []
    most = 0.0
    for _ in range(queries):
        row = monotonic_row(draw)
        slower = 1 - row["after"] / row["before"]
        if slower > 1e-9:
            worse.append(row)
            most = max(most, slower)
    result = f"{len(worse)} slower, at most by {most:.1%}"
    return [check("monotonic", not worse, result, worse, queries)]


def monotonic_row(draw: random.Random) -> dict:
    layers = draw.choice((4, 6, 8, 12))
    hidden = draw.choice((512, 1024, 2048, 4096))
    sequence = draw.choice((512, 1024, 2048))
    shape = model.Model("drawn", layers, hidden, 16, sequence=sequence)
    name = draw.choice(
        ("p3.16xlarge", "dgx-a100-40", "dgx-h100", "8xl40s", "8xt4", "8x4090")
    )
    servers = cluster.preset(name, draw.choice((1, 2, 3)))
    each = draw.choice((1, 2, 4))
    link = cluster.Link(draw.choice((1, 3, 12, 50)), draw.choice((5, 50)))
    servers = replace(servers, gpus_per_server=each, between=link)
    batch = draw.choice((8, 16, 32, 48, 64))
    resource = draw.choice(RESOURCES)
    return {
        "more": resource,
        "model": (layers, hidden, 16),
        "cluster": (name, servers.servers, each),
        "batch": batch,
        "before": best_rate(shape, servers, batch),
        "after": best_rate(shape, with_more(servers, resource), batch),
    }


def best_rate(shape: model.Model, servers: cluster.Cluster, batch: int) -> float:
    """Samples a second, on all GPUs or on a part of them."""
    cost = Cost(shape, servers, precision_of(servers), spare=advice.SPARE)
    space = Space(batch, extrapolate=True)
    seconds, _ = next(iter(Search(cost, space)), (math.inf, None))
    part = on_fewer(cost, space, seconds)
    if part:
        seconds = min(seconds, part[1])
    return 1 / seconds


SECTIONS = {
    "vtrain": published.vtrain,
    "zero-bubble-table": published.zero_bubble_table,
    "megatron-2021": published.megatron_2021,
    "korthikanti-2022": published.korthikanti_2022,
    "kernels": published.kernels,
    "links": published.links,
    "golden": published.golden,
    "b200": published.b200,
    "multi-node": published.multi_node,
    "others": published.others,
    "search-time": search_time,
}


def main() -> int:
    parser = new_parser(__doc__, "planner_accuracy")
    option = parser.add_argument
    every = list(SECTIONS)
    option("--sections", type=names_of(every), default=every, metavar="NAME,...")
    option(
        "--emulated",
        type=numbers,
        default=[],
        metavar="D,...",
        help="also run emulated pipelines of these depths",
    )
    option(
        "--monotonic",
        type=int,
        default=0,
        metavar="N",
        help="also N random queries, a second each",
    )
    options = parser.parse_args()
    sections = {name: SECTIONS[name] for name in options.sections}
    if options.emulated:
        sections["emulated"] = functools.partial(emulated, options.emulated)
    if options.monotonic:
        sections["monotonic"] = functools.partial(monotonic, options.monotonic)
    checks = []
    failed = 0
    for section in sections.values():
        for entry in section():
            checks.append(asdict(entry))
            failed += not entry.holds
            verdict = "holds" if entry.holds else "FAILS"
            line = f"{verdict}  {entry.name}: {entry.result} (bar: {entry.bar})"
            print(line, flush=True)
    machine = {"cores": os.cpu_count()}
    content = {"machine": machine, "sections": list(sections), "checks": checks}
    write_result(options.json, content)
    print(f"{len(checks) - failed} of {len(checks)} hold")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
