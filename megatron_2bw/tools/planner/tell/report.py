"""index.html of --report: all plans in a table, throughput by memory; timeline, memory,
time and flags of a chosen one.

Invariant: each number is of an Estimate or of the simulator; the browser draws them
with timelines/page.
"""

import operator
import shlex
from collections.abc import Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

from megatron_2bw.base.errors import file_errors
from megatron_2bw.base.files import write_whole
from megatron_2bw.schedules import REDUCE, Shape
from megatron_2bw.tools.planner.cost.memory import GIB
from megatron_2bw.tools.planner.cost.simulated import Cost, Estimate
from megatron_2bw.tools.planner.descriptions.plan import Plan
from megatron_2bw.tools.planner.tell.explain import KINDS, three
from megatron_2bw.tools.timelines.page import bundle
from megatron_2bw.tools.timelines.simulator import Event, makespan, simulate
from megatron_2bw.tools.timelines.waits import cut, drawn

PAGE = Path(__file__).parent / "page" / "report.html"
FORWARDS = 250_000  # of a timeline; a simulation and its file take seconds


def write_report(
    cost: Cost,
    ranked: Sequence[Estimate],
    folder: Path,
) -> Path:
    """Write index.html to `folder`, which is created if it is missing: the `ranked`
    plans, the best first, with their timelines. Raises UserError if it cannot be
    written."""
    cluster = cost.cluster
    content = {
        "title": (
            f"{cost.model.name} on {cluster.servers} × {cluster.gpus_per_server} "
            f"{cluster.device.name}"
        ),
        "plans": [_plan(cost, estimate) for estimate in ranked],
        "timelines": [_timeline(cost, estimate.plan) for estimate in ranked],
    }
    with file_errors(f"--report {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "index.html", bundle(PAGE, {"report": content}))
    return folder / "index.html"


def _plan(cost: Cost, estimate: Estimate) -> dict[str, Any]:
    plan = estimate.plan
    return {
        "name": plan.title,
        "schedule": plan.schedule,
        "shown": plan.schedule_name,
        "tensor": plan.tensor,
        "depth": plan.depth,
        "width": plan.width,
        "microbatch": plan.microbatch,
        "microbatches": plan.microbatches,
        "recompute": plan.recompute_name,
        "rate": float(three(estimate.throughput)),
        "fullest": _gib([estimate.heaviest, estimate.capacity]),
        "allowed": _gib([estimate.capacity] * plan.depth),
        "memory": [dict(zip(KINDS, _gib(astuple(stage)))) for stage in estimate.memory],
        "split": {
            cause: _short(1e3 * time / plan.global_batch)
            for cause, time in asdict(estimate.split).items()
        },
        "flags": shlex.join(plan.flags(cost.precision)),
    }


def _gib(sizes: Sequence[float]) -> list[float]:
    return [_short(size / GIB) for size in sizes]


def _timeline(cost: Cost, plan: Plan) -> dict[str, Any] | None:
    """What the page shows of a ranked plan; None if its timeline is too long."""
    batches = 3 - plan.pipeline.flushes
    if batches * plan.depth * plan.microbatches > FORWARDS:
        return None
    events, begin, until = first_batches(cost, plan)
    events = cut(events, begin, until)
    shown = drawn(plan.pipeline, events, plan.depth, cost.times(plan))
    return {"begin": _short(begin), "shown": shown}


def _short(number: float) -> float:
    return float(f"{number:.4g}")


def first_batches(cost: Cost, plan: Plan) -> tuple[list[Event], float, float]:
    """Events of the first two batches and of a third that keeps the pipeline full, and
    the part that is shown, at most the time to drain and fill the pipeline, and some
    microbatches more, around the end of the first batch."""
    times = cost.times(plan)
    batches = 3 - plan.pipeline.flushes
    shape = Shape(plan.depth, plan.microbatches, 0, batches)
    events = simulate(plan.pipeline, shape, times)
    end = makespan(events) if plan.pipeline.flushes else _reduced(events, 1)
    forward = times.of("forward", plan.depth)
    backward = times.of("backward", plan.depth)
    longest = max(map(operator.add, forward, backward))
    half = (plan.depth + 12) * longest
    if end <= 2.5 * half:
        return events, 0.0, end
    begin = max(_reduced(events, 0) - half, 0.0)
    begin = min(begin, end - 2 * half)
    return events, begin, begin + 2 * half


def _reduced(events: list[Event], batch: int) -> float:
    """The time at which all stages have started the reduction of `batch`."""
    ends = []
    for event in events:
        if event.action.kind == REDUCE and event.action.batch == batch:
            ends.append(event.end)
    return max(ends)
