"""The planner's free choices against those of the 2BW paper (arXiv 2006.09503): Table 1's ticks, and the text's depths.

scripts/paper.py judges the paper's other claims, the order of Table 1's rows among them.
"""

from __future__ import annotations

from dataclasses import replace

from bench.planner_checks import PAPER, Check, best, described, paper_cost, throughput
from megatron_2bw.planner.cost.simulated import Cost
from megatron_2bw.planner.find.space import Space
from scripts.paper_data import grid, panels


def table1() -> list[Check]:
    rows = []
    for run in grid(panels("table1")):
        if run.panel.ticked:
            own, ticked = best(run.cost, PAPER), run.plan
            row = {
                "model": run.panel.model,
                "cluster": f"{run.panel.servers} servers of {run.cost.cluster.device.name}",
            }
            row["ticked"] = f"({ticked.width}, {ticked.depth}) b{run.microbatch}, recompute {run.recompute}"
            row |= {"chosen freely": described(own)}
            row["ticked sizes / chosen"] = f"{_share(run.cost, PAPER, ticked.depth):.2f} x"
            row["same (w, d)"] = (ticked.width, ticked.depth) == (own.width, own.depth)
            rows.append(row | {"same recompute": run.recompute == own.recompute})
    sizes, ways = (sum(row[name] for row in rows) for name in ("same (w, d)", "same recompute"))
    name, bar = "Table 1: the ticked configurations are the best of all", "the ticked (w, d) and recompute in all four"
    result = f"the ticked (w, d) in {sizes} of {len(rows)}, the ticked recompute in {ways}"
    assumes = "a batch of 512 (not given); the paper's space, both rank orders, any microbatch"
    return [Check(name, "arXiv 2006.09503, Table 1", bar, sizes == ways == len(rows), result, rows, assumes)]


def depths() -> list[Check]:
    """The text names one batch size, 2048; the smaller ones may be what it means by "low"."""
    rows, hidden_too = [], True
    for name, depth in (("gpt-2.2b", 8), ("gpt-3.8b", 16)):
        cost = paper_cost(name, 8)
        twice = cost.on(replace(cost.cluster, between=replace(cost.cluster.between, gb_s=5)))
        for batch in (512, 1024, 2048):
            space = replace(PAPER, batch=batch)
            plan = best(cost, space)
            ratios = {
                "paper's depth / best": _share(cost, space, depth),
                "replicas neighbours": _share(cost, replace(space, pipeline_inside=(False,)), depth),
                "messages hidden": _share(cost, replace(space, extra_warmup=True), depth),
                "50 Gbit/s": _share(twice, space, depth),
            }
            hidden_too &= ratios["messages hidden"] >= 1
            row = {"model": name, "batch": batch, "paper's depth": depth, "predicted": described(plan)}
            row |= {case: f"{ratio:.2f} x" for case, ratio in ratios.items()}
            rows.append(row | {"same": plan.depth == depth})
    wrong = ", ".join(f"{row['model']} at {row['batch']}" for row in rows if not row["same"])
    also = "the paper's depth everywhere" if hidden_too else "another depth too"
    result = f"{f'another depth for {wrong}' if wrong else 'the same'}; with messages hidden {also}"
    name, bar = "8 deep for GPT 2.2B and 16 deep for 3.8B on 64 V100", "at batch 512, 1024 and 2048"
    assumes = "both rank orders; 8 replicas of a server share 25 Gbit/s, and no computation hides a message (1F1B)"
    return [Check(name, "section 5.2", bar, not wrong, result, rows, assumes)]


def _share(cost: Cost, space: Space, depth: int) -> float:
    """Throughput of the fastest plan of the depth over that of the fastest plan."""
    own, first = best(cost, replace(space, depth=(depth,))), best(cost, space)
    return throughput(cost, own) / throughput(cost, first)
