"""A page and a picture of plans (--report), and a trace of a plan's simulated timeline (--trace).

Invariant: every point and duration is a number of an Estimate or of the simulator. It imports matplotlib when it draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_2bw.errors import UserError, file_errors
from megatron_2bw.files import new_figure, write_figure, write_json
from megatron_2bw.models.plan import RECOMPUTE, Plan
from megatron_2bw.planner.cost.memory import GIB
from megatron_2bw.planner.cost.simulated import Cost, Estimate
from megatron_2bw.planner.tell import report_page
from megatron_2bw.schedules import REDUCE, SCHEDULE_NAMES, Shape
from megatron_2bw.timelines.simulator import Event, Times, makespan, simulate
from megatron_2bw.timelines.trace import of_events

# Colours that colour-blind readers can distinguish (Okabe and Ito).
COLOURS = ("#0072b2", "#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#999999")
MARKERS = dict(zip(RECOMPUTE, "o^s"))
FORWARDS = 250_000  # of a timeline; a simulation and its file take seconds


def first_batches(cost: Cost, plan: Plan) -> report_page.Window | None:
    """Events of the first two batches and of a third that keeps the pipeline full, and the shown part; None if they are
    too many."""
    try:
        times = cost.times(plan)
        events = simulated(plan, times, 2 if plan.pipeline.flushes else 3)
    except UserError:
        return None
    end = makespan(events) if plan.pipeline.flushes else reduced(events, 1)
    return events, *window(events, plan, times, end)


def reduced(events: list[Event], batch: int) -> float:
    """The time at which all stages have started the reduction of `batch`."""
    return max(event.end for event in events if event.action.kind == REDUCE and event.action.batch == batch)


def simulated(plan: Plan, times: Times, iterations: int) -> list[Event]:
    """The plan's timeline. UserError if that would take minutes."""
    forwards = plan.depth * plan.microbatches * iterations
    if forwards > FORWARDS:
        raise UserError(
            f"--max-global-batch-size: {plan.title} has {forwards} forwards in {iterations} iterations, and a trace "
            f"has at most {FORWARDS}: give a smaller batch"
        )
    return simulate(plan.pipeline, Shape(plan.depth, plan.microbatches, 0, iterations), times)


def window(events: list[Event], plan: Plan, times: Times, end: float) -> tuple[float, float]:
    """The drawn part of 0 ... end: at most the time to drain and fill the pipeline, and some microbatches more."""
    slot = max(f + b for f, b in zip(times.of("forward", plan.depth), times.of("backward", plan.depth)))
    half = (plan.depth + 12) * slot
    if end <= 2.5 * half:
        return 0.0, end
    begin = min(max(reduced(events, 0) - half, 0.0), end - 2 * half)
    return begin, begin + 2 * half


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the Pareto-optimal points (memory, throughput), by memory."""
    front: list[int] = []
    for index in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1])):
        if not front or points[index][1] > points[front[-1]][1]:
            front.append(index)
    return front


def front(estimates: Sequence[Estimate], path: Path) -> None:
    """Draw throughput against the memory of the heaviest stage, a marker per plan, with the Pareto front.

    The axis ends at twice the allowed memory. Colours are schedules, markers are recomputes.
    """
    figure = new_figure(11, 5.5)
    axis = figure.subplots()
    points = [(estimate.heaviest / GIB, estimate.throughput) for estimate in estimates]
    groups: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for point, estimate in zip(points, estimates):
        groups.setdefault((estimate.plan.schedule, estimate.plan.recompute), []).append(point)
    for (schedule, recompute), own in sorted(groups.items()):
        colour = COLOURS[SCHEDULE_NAMES.index(schedule)]
        label = schedule + (f", {recompute} recompute" if recompute != "none" else "")
        axis.scatter(*zip(*own), color=colour, marker=MARKERS[recompute], s=26, alpha=0.7, linewidths=0, label=label)
    limit = estimates[0].capacity / GIB
    best = [points[index] for index in pareto(points)]
    axis.plot(*zip(*best), drawstyle="steps-post", color="black", linewidth=1, zorder=1, label="Pareto front")
    axis.axvline(limit, color="#d00000", linewidth=1.2, linestyle="--", label=f"allowed: {limit:.1f} GiB")
    axis.set_xlim(0, min(2.1 * limit, 1.05 * max(limit, *(memory for memory, _ in points))))
    figure.legend(loc="outside right upper", fontsize=8)
    axis.set_xlabel("GiB of the heaviest stage")
    axis.set_ylabel("samples/s")
    axis.set_title(f"{len(estimates)} plans", loc="left", fontsize=10)
    write_figure(path, figure)


def write_report(cost: Cost, estimates: Sequence[Estimate], cloud: Sequence[Estimate], folder: Path) -> list[Path]:
    """Write index.html and front.png to `folder`, which is created if it is missing; returns the files.

    estimates  ranked, the best first
    cloud      more plans
    Raises UserError if `folder` cannot be written.
    """
    every = list({estimate.plan: estimate for estimate in (*cloud, *estimates)}.values())
    others = sorted((each for each in every if each not in estimates), key=lambda each: -each.throughput)
    files = [folder / "index.html", folder / "front.png"]
    with file_errors(f"--report {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        windows = [first_batches(cost, estimate.plan) for estimate in estimates]
        files[0].write_text(report_page.html(cost, estimates, others, windows), encoding="utf-8")
        front(every, files[1])
    return files


def chrome_trace(cost: Cost, estimate: Estimate, path: Path, iterations: int = 2) -> None:
    """Write the plan's simulated timeline for Perfetto: a process for the pipeline, a thread per stage, microseconds.

    Events have the form of --two-bw-trace (timelines/trace.py). Waits between them are events too. The file is written
    in one step. Raises UserError if it cannot be written.
    """
    plan = estimate.plan
    events = simulated(plan, cost.times(plan), iterations)
    with file_errors(f"--trace {path}"):
        write_json(path, of_events(events, plan.depth, f"{plan.title} (simulated)"), indent=None)
