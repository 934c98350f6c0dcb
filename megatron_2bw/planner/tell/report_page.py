"""index.html of --report: all plans in a table that can be sorted; timeline, memory, time and flags of a chosen one.

Invariant: each number is of an Estimate or of the simulator; the browser draws them with timelines/page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_2bw.models.plan import Plan
from megatron_2bw.planner.cost.memory import GIB
from megatron_2bw.planner.cost.simulated import Cost, Estimate
from megatron_2bw.timelines.page import whole
from megatron_2bw.timelines.simulator import Event
from megatron_2bw.timelines.waits import cut, drawn

PAGE = Path(__file__).parent / "page" / "report.html"


Window = tuple[list[Event], float, float]  # the events of a timeline, and the part of it that is shown, in seconds


def title(cost: Cost) -> str:
    cluster = cost.cluster
    return f"{cost.model.name} on {cluster.servers} × {cluster.gpus_per_server} {cluster.device.name}"


def html(cost: Cost, ranked: Sequence[Estimate], others: Sequence[Estimate], windows: Sequence[Window | None]) -> str:
    """The page of the `ranked` plans, the best first, with their `windows`, None where too long; and of `others`."""
    content = {
        "title": title(cost),
        "ranked": len(ranked),
        "allowed": _short(ranked[0].capacity / GIB),
        "plans": [_plan(cost, estimate) for estimate in (*ranked, *others)],
        "timelines": [window and _timeline(cost, one.plan, window) for one, window in zip(ranked, windows)],
    }
    return whole(PAGE, {"report": content})


def _timeline(cost: Cost, plan: Plan, window: Window) -> dict[str, Any]:
    shown = drawn(plan.pipeline, cut(*window), plan.depth, cost.times(plan))
    return {"begin": _short(window[1]), "shown": shown}


def _plan(cost: Cost, estimate: Estimate) -> dict[str, Any]:
    plan = estimate.plan
    return {
        "name": plan.title,
        "schedule": plan.schedule,
        "shown": plan.schedule_name,
        **{size: getattr(plan, size) for size in ("tensor", "depth", "width", "microbatch", "microbatches")},
        "recompute": plan.recompute_name,
        "rate": _short(estimate.throughput),
        "memory": [{kind: _short(size / GIB) for kind, size in asdict(stage).items()} for stage in estimate.memory],
        "split": {cause: _short(1e3 * time / plan.global_batch) for cause, time in asdict(estimate.split).items()},
        "flags": " ".join(plan.flags(cost.precision)),
    }


def _short(number: float) -> float:
    return float(f"{number:.4g}")
