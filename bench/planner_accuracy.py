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
import math
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import planner_published as published
from bench.planner_checks import Check, compared, described, within
from bench.schedule_efficiency import OURS, measure
from bench.tables import new_parser, write_result
from megatron_2bw.base.errors import names_of
from megatron_2bw.schedules import SCHEDULES, TwoBW
from megatron_2bw.schedules.interleaved import Interleaved
from megatron_2bw.tools.planner.cost.simulated import Cost
from megatron_2bw.tools.planner.descriptions import cluster, model
from megatron_2bw.tools.planner.descriptions.inputs import numbers
from megatron_2bw.tools.planner.find import advice
from megatron_2bw.tools.planner.find.search import Search, on_fewer
from megatron_2bw.tools.planner.find.space import Space
from megatron_2bw.tools.planner.tell import explain
from megatron_2bw.tools.timelines.simulator import Times, iteration_time

LARGE = model.Model(
    "405b",
    126,
    16384,
    128,
    128256,
    8192,
    groups=8,
    ffn=53248,
    tied=False,
    **model.LLAMA_LAYER,
)
FORWARD, BACKWARD = 100.0, 200.0  # milliseconds
PIPELINES = SCHEDULES | {
    "megatron-interleaved": Interleaved(2),
    "2bw, one slot": TwoBW(1),
}


def search_time() -> list[Check]:
    rows, times = [], {2: "seconds", 5: "seconds", 10: "with the words"}
    for name, preset, servers, batch, limit in (
        ("gpt-1.3b", "p3.16xlarge", 8, 512, 2),
        ("gpt-2.2b", "p3.16xlarge", 8, 512, 2),
        ("gpt-3.8b", "p3.16xlarge", 8, 2048, 2),
        ("llama-8b", "dgx-h100", 8, 512, 2),
        ("gpt-175b", "dgx-a100-80", 512, 1536, 5),
        ("llama-70b", "dgx-h100", 512, 2048, 5),
        ("405b", "dgx-h100", 128, 512, 10),
    ):
        device, of = (
            cluster.preset(preset, servers),
            LARGE if name == "405b" else model.preset(name),
        )
        begun = time.process_time()
        space = Space(batch, extrapolate=True)
        search = Search(
            Cost(of, device, "bf16" if device.device.bf16 else "fp16"), space
        )
        plans, ties = advice.ranked(search, 8)
        seconds = time.process_time() - begun
        found = explain.Result(
            search.cost,
            space,
            list(map(search.cost.estimate, plans)),
            search,
            0.0,
            ties,
        )
        explain.table(found), explain.reason(found), found.fewer
        row = {
            "model": name,
            "GPUs": device.gpus,
            "batch": batch,
            "best": described(plans[0]),
        }
        row |= {"simulated plans": search.examined, "seconds": round(seconds, 2)}
        rows.append(
            row
            | {"with the words": round(time.process_time() - begun, 2), "limit": limit}
        )
    bar = (
        "64 GPUs under 2 s, 4,096 under 5 s; 405B on 1,024 under 10 s with the words "
        "about the plans"
    )
    holds = all(row[times[row["limit"]]] < row["limit"] for row in rows)
    most = ", ".join(
        f"{max(row[name] for row in rows if row['limit'] == n)} s"
        for n, name in times.items()
    )
    assumes = "processor time of this machine"
    return [
        Check(
            "the search itself, one core",
            "this run",
            bar,
            holds,
            f"at most {most}",
            rows,
            assumes,
        )
    ]


def emulated(depths: list[int]) -> list[Check]:
    """Every schedule at each depth, with as many microbatches as stages.

    A stage's computation in addition to its sleep is measured once, on one stage alone.
    The simulator gets this time and no measurement of the pipelines that it predicts.
    """
    chosen = argparse.Namespace(
        forward_ms=FORWARD, backward_ms=BACKWARD, iterations=9, width=1, real=False
    )
    alone = measure("2bw", 1, 8, chosen, "")["iteration_ms"] / 8 - FORWARD - BACKWARD
    rows = []
    for depth in depths:
        for name in (*OURS, "megatron-interleaved", "pipedream", "2bw, one slot"):
            flags = "--two-bw-gradient-slots 1" if name == "2bw, one slot" else ""
            measured = measure(name.split(",")[0], depth, depth, chosen, flags)[
                "iteration_ms"
            ]
            # each of its two chunks computes
            computed = alone if name == "megatron-interleaved" else alone / 2
            times = Times(
                FORWARD + computed, BACKWARD + computed, joint_step=name == "pipedream"
            )
            pipeline = PIPELINES.get(name, SCHEDULES["pipedream-flush"])
            predicted = iteration_time(pipeline, depth, depth, times)
            rows.append(
                {"schedule": name, "d": depth, "m": depth}
                | compared(measured, predicted, "ms", 1)
            )
            print(
                (
                    f"  {name:22s} d {depth}  measured {measured:8.1f} ms  predicted "
                    f"{predicted:8.1f} ms"
                ),
                flush=True,
            )
    name = f"emulated pipelines run here, d = {', '.join(map(str, depths))}"
    return [
        within(
            5,
            name,
            "bench/schedule_efficiency.py",
            rows,
            assumes="computing of one stage alone",
        )
    ]


MORE: dict[str, Callable[[cluster.Cluster], cluster.Cluster]] = {
    "1.5 x memory": lambda on: replace(
        on, device=replace(on.device, memory_gib=1.5 * on.device.memory_gib)
    ),
    "2 x network": lambda on: replace(
        on, between=replace(on.between, gb_s=2 * on.between.gb_s)
    ),
    "2 x servers": lambda on: replace(on, servers=2 * on.servers),
    "1.5 x FLOP/s": lambda on: replace(
        on, device=replace(on.device, tflops=1.5 * on.device.tflops)
    ),
}


def monotonic(queries: int) -> list[Check]:
    """Random models and clusters, each with more of one thing: the best plan may not be
    slower."""
    draw, rows = random.Random(1), []

    def best(of: model.Model, on: cluster.Cluster, batch: int) -> float:
        """Samples a second, on all GPUs or on a part of them."""
        cost = Cost(of, on, "bf16" if on.device.bf16 else "fp16", spare=advice.SPARE)
        space = Space(batch, extrapolate=True)
        seconds = next(iter(Search(cost, space)), (math.inf,))[0]
        part = on_fewer(cost, space, seconds)
        return 1 / min(seconds, part[1] if part else math.inf)

    for _ in range(queries):
        shape = draw.choice((4, 6, 8, 12)), draw.choice((512, 1024, 2048, 4096)), 16
        of = model.Model("drawn", *shape, sequence=draw.choice((512, 1024, 2048)))
        name = draw.choice(
            ("p3.16xlarge", "dgx-a100-40", "dgx-h100", "8xl40s", "8xt4", "8x4090")
        )
        on = replace(
            cluster.preset(name, draw.choice((1, 2, 3))),
            gpus_per_server=draw.choice((1, 2, 4)),
        )
        on = replace(
            on, between=cluster.Link(draw.choice((1, 3, 12, 50)), draw.choice((5, 50)))
        )
        batch, more = draw.choice((8, 16, 32, 48, 64)), draw.choice(list(MORE))
        before, after = best(of, on, batch), best(of, MORE[more](on), batch)
        sizes = {
            "more": more,
            "model": shape,
            "cluster": (name, on.servers, on.gpus_per_server),
            "batch": batch,
        }
        rows.append(sizes | {"before": before, "after": after})
    worse = [row for row in rows if row["after"] < row["before"] * (1 - 1e-9)]
    most = max((1 - row["after"] / row["before"] for row in worse), default=0.0)
    result = f"{len(worse)} slower, at most by {most:.1%}"
    name, bar = (
        f"{queries} random queries with more memory, network, servers or FLOP/s",
        "none has a slower best plan",
    )
    return [Check(name, "this run", bar, not worse, result, worse)]


PUBLISHED = (
    "vtrain zero_bubble_table megatron_2021 korthikanti_2022 kernels links golden "
    "b200 multi_node others"
)
FOUND = (*(getattr(published, name) for name in PUBLISHED.split()), search_time)
SECTIONS = {section.__name__.replace("_", "-"): section for section in FOUND}


def main() -> int:
    parser = new_parser(__doc__, "planner_accuracy")
    parser.add_argument(
        "--sections",
        type=names_of(SECTIONS),
        default=list(SECTIONS),
        metavar="NAME,...",
    )
    also = "also run emulated pipelines of these depths"
    parser.add_argument(
        "--emulated", type=numbers, default=[], metavar="D,...", help=also
    )
    parser.add_argument(
        "--monotonic",
        type=int,
        default=0,
        metavar="N",
        help="also N random queries, a second each",
    )
    options = parser.parse_args()
    sections = {name: SECTIONS[name] for name in options.sections}
    if options.emulated:
        sections["emulated"] = lambda: emulated(options.emulated)
    if options.monotonic:
        sections["monotonic"] = lambda: monotonic(options.monotonic)
    checks: list[Check] = []
    for name, section in sections.items():
        for check in section():
            checks.append(check)
            print(
                (
                    f"{'holds' if check.holds else 'FAILS'}  {check.name}: "
                    f"{check.result} (bar: {check.bar})"
                ),
                flush=True,
            )
    found = {
        "machine": {"cores": os.cpu_count()},
        "sections": list(sections),
        "checks": [asdict(c) for c in checks],
    }
    write_result(options.json, found)
    failed = sum(not check.holds for check in checks)
    print(f"{len(checks) - failed} of {len(checks)} hold")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
