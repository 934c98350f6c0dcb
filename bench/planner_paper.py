"""Checks of the planner's choices against those of the 2BW paper (arXiv 2006.09503): Table 1, and the text's depths.

scripts/paper.py judges the paper's other claims.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from bench.planner_checks import PAPER, Check, best, described, paper_cost, throughput
from megatron_2bw.planner.cost.closed_form import ClosedForm
from megatron_2bw.planner.cost.simulated import Cost
from megatron_2bw.planner.find.space import Space
from scripts.paper_data import Run, grid, panels


def table1() -> list[Check]:
    """Table 1 of the paper. It does not give the number of microbatches, so each row has the least, m = d."""
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in grid(panels("table1")):
        groups[run.panel.figure].append(run)
    checks, free = [], []
    for runs in groups.values():
        cost, name, servers = runs[0].cost, runs[0].panel.model, runs[0].panel.servers
        gpu = cost.cluster.device.name
        form = ClosedForm(cost.model, cost.cluster, cost.precision, flash=False)
        out = [
            {
                "(w, d)": f"({run.plan.width}, {run.plan.depth})",
                "b": run.microbatch,
                "recompute": run.recompute,
                "measured": float(run.panel.paper),
                "predicted samples/s": round(throughput(cost, run.plan), 1),
                "corrected form": round(throughput(form, run.plan), 1),
                "fits": cost.fits(run.plan),
                "chosen": run.panel.ticked,
            }
            for run in runs
        ]
        ticked, row = next((run, row) for run, row in zip(runs, out) if run.panel.ticked)
        own = best(cost, PAPER)
        free.append(
            {
                "model": name,
                "cluster": f"{servers} servers of {gpu}",
                "ticked": f"{row['(w, d)']} b{row['b']}, recompute {row['recompute']}",
                "chosen freely": described(own),
                "ticked sizes / chosen": f"{_share(cost, PAPER, ticked.plan.depth):.2f} x",
                "same (w, d)": (ticked.plan.width, ticked.plan.depth) == (own.width, own.depth),
                "same recompute": ticked.recompute == own.recompute,
            }
        )
        by_time = sorted(out, key=lambda row: -row["predicted samples/s"])
        ordered = [row["measured"] for row in by_time] == sorted((row["measured"] for row in out), reverse=True)
        checks.append(
            Check(
                f"Table 1: {name} on {servers} servers of {gpu}",
                "arXiv 2006.09503, Table 1",
                "the winner, and the order",
                ordered and by_time[0]["chosen"] and all(row["fits"] for row in out),
                "the same order" if ordered else "another order",
                out,
                "m = d, the least (not given); the winner of the printed rows, not of all plans",
            )
        )
    sizes, ways = (sum(row[name] for row in free) for name in ("same (w, d)", "same recompute"))
    free_choice = Check(
        "Table 1: the ticked configurations are the best of all",
        "arXiv 2006.09503, Table 1",
        "the ticked (w, d) and recompute in all four",
        sizes == ways == len(free),
        f"the ticked (w, d) in {sizes} of {len(free)}, the ticked recompute in {ways}",
        free,
        "a batch of 512 (not given); the paper's space, both rank orders, any microbatch",
    )
    return [*checks, free_choice]


def depths() -> list[Check]:
    """The text names one batch size, 2048; the smaller ones may be what it means by "low"."""
    rows, hidden_too = [], True
    for name, depth in (("gpt-2.2b", 8), ("gpt-3.8b", 16)):
        cost = paper_cost(name, 8)
        twice = cost.on(replace(cost.cluster, between=replace(cost.cluster.between, gb_s=5)))
        for batch in (512, 1024, 2048):
            space = replace(PAPER, batch=batch)
            hidden = replace(space, extra_warmup=True)
            plan = best(cost, space)
            neighbours = replace(space, pipeline_inside=(False,))
            ratios = {
                "paper's depth / best": _share(cost, space, depth),
                "replicas neighbours": _share(cost, neighbours, depth),
                "messages hidden": _share(cost, hidden, depth),
                "50 Gbit/s": _share(twice, space, depth),
            }
            hidden_too &= ratios["messages hidden"] >= 1
            row = {"model": name, "batch": batch, "paper's depth": depth, "predicted": described(plan)}
            row |= {case: f"{ratio:.2f} x" for case, ratio in ratios.items()}
            rows.append(row | {"same": plan.depth == depth})
    wrong = [f"{row['model']} at {row['batch']}" for row in rows if not row["same"]]
    also = "the paper's depth everywhere" if hidden_too else "another depth too"
    return [
        Check(
            "8 deep for GPT 2.2B and 16 deep for 3.8B on 64 V100",
            "section 5.2",
            "at batch 512, 1024 and 2048",
            not wrong,
            f"{f'another depth for {", ".join(wrong)}' if wrong else 'the same'}; with messages hidden {also}",
            rows,
            "both rank orders; 8 replicas of a server share 25 Gbit/s, and no computation hides a message (1F1B)",
        )
    ]


def _share(cost: Cost, space: Space, depth: int) -> float:
    """Throughput of the fastest plan of the depth over that of the fastest plan."""
    own, first = best(cost, replace(space, depth=(depth,))), best(cost, space)
    return throughput(cost, own) / throughput(cost, first)
