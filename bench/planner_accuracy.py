"""The planner's predictions compared with measurements: published tables, the paper's choices, and pipelines run here.

    python bench/planner_accuracy.py --json docs/bench/planner_accuracy.json            about a minute, nothing is run
    python bench/planner_accuracy.py --emulated 2,4,8 --json ...                        and runs the emulated pipelines

Each check has rows of predicted and measured values, a bar, and whether it holds; a check that fails stays in the
table. The measured tables are in bench/measured/, their sources in docs/planner.md. Writes the JSON and a picture of
the same name. The status is 1 if a check fails.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import new_parser, write_result
from bench.planner_checks import Check, described
from bench.planner_gpus import b200, golden, kernels, links, multi_node
from bench.planner_paper import depths, table1
from bench.planner_published import korthikanti_2022, megatron_2021, vtrain, zero_bubble_table
from megatron_2bw.errors import names_of
from megatron_2bw.files import new_figure
from megatron_2bw.models import cluster, model
from megatron_2bw.models.inputs import numbers
from megatron_2bw.planner.cost.simulated import Cost
from megatron_2bw.planner.find import advice
from megatron_2bw.planner.find.search import Search
from megatron_2bw.planner.find.space import Space
from megatron_2bw.planner.tell import explain

LARGE = model.Model("405b", 126, 16384, 128, 128256, 8192, groups=8, ffn=53248, tied=False, **model.LLAMA_LAYER)


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
        device, of = cluster.preset(preset, servers), LARGE if name == "405b" else model.preset(name)
        begun = time.process_time()
        space = Space(batch, extrapolate=True)
        search = Search(Cost(of, device, "bf16" if device.device.bf16 else "fp16"), space)
        plans, ties = advice.ranked(search, 8)
        seconds = time.process_time() - begun
        found = explain.Result(search.cost, space, list(map(search.cost.estimate, plans)), search, 0.0, ties)
        explain.table(found), explain.reason(found), explain.on_fewer_gpus(found)
        row = {"model": name, "GPUs": device.gpus, "batch": batch, "best": described(plans[0])}
        row |= {"simulated plans": search.examined, "seconds": round(seconds, 2)}
        rows.append(row | {"with the words": round(time.process_time() - begun, 2), "limit": limit})
    bar = "64 GPUs under 2 s, 4,096 under 5 s; 405B on 1,024 under 10 s with the words about the plans"
    holds = all(row[times[row["limit"]]] < row["limit"] for row in rows)
    most = ", ".join(f"{max(row[name] for row in rows if row['limit'] == n)} s" for n, name in times.items())
    assumes = "processor time of this machine"
    return [Check("the search itself, one core", "this run", bar, holds, f"at most {most}", rows, assumes)]


FOUND = (table1, depths, vtrain, zero_bubble_table, megatron_2021, korthikanti_2022, kernels, links, golden, b200)
SECTIONS = {section.__name__.replace("_", "-"): section for section in (*FOUND, multi_node, search_time)}


def draw(checks: list[Check]) -> Any:
    """Predicted over measured, one point per row of the tables that have both; None without such rows."""
    pairs = {"predicted": "measured samples/GPU/s", "predicted s": "measured s", "predicted ms": "measured ms"}
    figure, place = new_figure(8, 4.5), 0
    axis = figure.subplots()
    for check in checks:
        values = []
        for row in check.rows:
            name = next((name for name in pairs if name in row), None)
            measured = row.get(pairs.get(name or "", ""), row.get("measured TFLOP/s"))
            if name and measured:
                values.append(row[name] / measured)
        if values:
            axis.plot(range(place, place + len(values)), values, "o", markersize=4, label=check.name)
            place += len(values) + 2
    axis.axhspan(0.9, 1.1, color="0.93", zorder=0)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_ylabel("predicted / measured")
    axis.set_xticks([])
    axis.set_ylim(0.7, 1.3)
    if not place:
        return None
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.02), fontsize=8, ncols=1, frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> int:
    parser = new_parser(__doc__, "planner_accuracy")
    parser.add_argument("--sections", type=names_of(SECTIONS), default=list(SECTIONS), metavar="NAME,...")
    also = "also run emulated pipelines of these depths"
    parser.add_argument("--emulated", type=numbers, default=[], metavar="D,...", help=also)
    options = parser.parse_args()
    sections = {name: SECTIONS[name] for name in options.sections}
    if not options.emulated:
        print("the emulated pipelines are not run (--emulated 2,4,8)")
    else:
        from bench.planner_emulated import emulated

        sections["emulated"] = lambda: emulated(options.emulated)
    checks: list[Check] = []
    for name, section in sections.items():
        for check in section():
            checks.append(check)
            print(f"{'holds' if check.holds else 'FAILS'}  {check.name}: {check.result} (bar: {check.bar})", flush=True)
    found = {"machine": {"cores": os.cpu_count()}, "sections": list(sections), "checks": [asdict(c) for c in checks]}
    write_result(options.json, found, draw(checks))
    failed = sum(not check.holds for check in checks)
    print(f"{len(checks) - failed} of {len(checks)} hold")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
