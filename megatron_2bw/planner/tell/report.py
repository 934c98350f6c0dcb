"""Pictures of plans (--report) and a trace of a plan's simulated timeline (--trace).

Invariant: every bar, point and duration is a number of an Estimate or of the simulator. This module computes only sums
and the Pareto front. It imports matplotlib when it draws.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron_2bw.errors import UserError, file_errors
from megatron_2bw.files import new_figure, write_figure, write_json
from megatron_2bw.models.plan import RECOMPUTE, Plan
from megatron_2bw.planner.cost.memory import GIB
from megatron_2bw.planner.cost.simulated import Cost, Estimate
from megatron_2bw.planner.tell import report_page
from megatron_2bw.schedules import REDUCE, Shape
from megatron_2bw.timelines.picture import draw_events
from megatron_2bw.timelines.simulator import Event, Times, makespan, simulate
from megatron_2bw.timelines.trace import of_events

# Colours that colour-blind readers can distinguish (Okabe and Ito).
KINDS = {
    "weights": "#0072b2",
    "gradients": "#56b4e9",
    "optimizer": "#009e73",
    "activations": "#e69f00",
    "logits": "#cc79a7",
    "buffers": "#999999",
}
CAUSES = {
    "compute": ("#0072b2", "computing"),
    "tensor": ("#56b4e9", "tensor parallelism's collectives"),
    "pipeline": ("#e69f00", "messages between stages"),
    "data": ("#009e73", "gradients over replicas"),
    "update": ("#cc79a7", "optimizer's step"),
    "bubble": ("#d0d0d0", "bubble"),
}
SCHEDULE_COLOURS = {
    "2bw": "#d55e00",
    "pipedream-flush": "#0072b2",
    "gpipe": "#009e73",
    "no-pipelining": "#999999",
    "megatron": "#cc79a7",
    "pipedream": "#f0c400",
}
MARKERS = dict(zip(RECOMPUTE, "o^s"))
PICTURES = {
    "front.png": "Throughput against memory of the heaviest stage; the line is the Pareto front.",
    "splits.png": "The time of the ranked plans by cause.",
    "timeline.png": "The best plan's timeline.",
    "memory.png": "The best plan's memory, stage by stage.",
}
NAMES = "(+: more forwards ahead; t: tensor ranks, d: stages, w: replicas, b: microbatch)"  # parts of a plan's name
RANKED = 16  # plans in `splits`
FORWARDS = 250_000  # of a timeline; a simulation and its file take seconds


def timeline(cost: Cost, estimate: Estimate, path: Path) -> None:
    """Draw the plan's first two batches, in seconds; of long batches only a window around the end of the first."""
    plan = estimate.plan
    events, begin, until, end = first_batches(cost, plan)
    title = f"{plan.title}, {plan.microbatches} microbatches a batch: the first two batches, simulated"
    if (begin, until) != (0.0, end):
        title += f"\nONLY A WINDOW of {until - begin:.3g} s of their {end:.3g} s, around the end of the first batch"
    title += f"\nin the steady state {estimate.seconds:.4g} s an iteration, {estimate.throughput:.4g} samples/s"
    steps = not plan.pipeline.late_step
    draw_events(events, plan.depth, plan.microbatches, path, title, span=(begin, until), steps=steps)


def first_batches(cost: Cost, plan: Plan) -> tuple[list[Event], float, float, float]:
    """Events of the first two batches and of a third that keeps the pipeline full, the shown window, and their end."""
    times = cost.times(plan)
    events = simulated(plan, times, 2 if plan.pipeline.flushes else 3)
    end = makespan(events) if plan.pipeline.flushes else reduced(events, 1)
    return events, *window(events, plan, times, end), end


def _window(cost: Cost, plan: Plan) -> report_page.Window | None:
    """What the page shows of a ranked plan; None if its timeline is too long."""
    try:
        return first_batches(cost, plan)[:3]
    except UserError:
        return None


def reduced(events: list[Event], batch: int) -> float:
    """The time at which all stages have started the reduction of `batch`."""
    return max(event.end for event in events if event.action.kind == REDUCE and event.action.batch == batch)


def simulated(plan: Plan, times: Times, iterations: int) -> list[Event]:
    """The plan's timeline. UserError if that would take minutes."""
    forwards = plan.depth * plan.microbatches * iterations
    if forwards > FORWARDS:
        raise UserError(
            f"--max-global-batch-size: {plan.title} has {forwards} forwards in {iterations} iterations, and --trace "
            f"and --report draw at most {FORWARDS}: give a smaller batch"
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


def memory_bars(estimate: Estimate, path: Path, device: float | None = None) -> None:
    """Draw a stacked bar per stage, in GiB, with the allowed bytes and, if given, the bytes of the `device`."""
    depth = len(estimate.memory)
    figure = new_figure(min(3.5 + 0.55 * depth, 13), 4.5)
    axis = figure.subplots()
    bottoms = [0.0] * depth
    for kind, colour in KINDS.items():
        heights = [getattr(stage, kind) / GIB for stage in estimate.memory]
        axis.bar(range(depth), heights, bottom=bottoms, color=colour, label=kind, width=0.8)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights)]
    if depth <= 24:
        for stage, top in enumerate(bottoms):
            text = axis.text(stage, top, f"{top:.1f}", ha="center", va="bottom", fontsize=8)
            text.set_bbox({"facecolor": "white", "alpha": 0.7, "edgecolor": "none", "pad": 0.6})
    allowed = estimate.capacity / GIB
    axis.axhline(allowed, color="black", linestyle="--", linewidth=1.2, label=f"allowed: {allowed:.1f}")
    if device is not None:
        axis.axhline(device / GIB, color="#d00000", linewidth=1.2, label=f"device: {device / GIB:.1f}")
    axis.set_xlim(-0.6, depth - 0.4)
    axis.set_ylim(0, 1.08 * max(*bottoms, allowed, (device or 0) / GIB))
    axis.set_xticks(range(0, depth, -(-depth // 32)))
    axis.set_xlabel("stage")
    axis.set_ylabel("GiB a GPU")
    axis.set_title(f"{estimate.plan.title}:\nmemory of each stage", loc="left", fontsize=10)
    handles, names = axis.get_legend_handles_labels()
    order = [*reversed([i for i, name in enumerate(names) if name in KINDS])]  # the order in the bars
    order = [i for i in range(len(names)) if i not in order] + order
    figure.legend([handles[i] for i in order], [names[i] for i in order], loc="outside right upper", fontsize=8)
    write_figure(path, figure)


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the Pareto-optimal points (memory, throughput), by memory."""
    front: list[int] = []
    for index in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1])):
        if not front or points[index][1] > points[front[-1]][1]:
            front.append(index)
    return front


def front(estimates: Sequence[Estimate], path: Path) -> None:
    """Draw throughput against the memory of the heaviest stage, a marker per plan, with the Pareto front.

    The axis ends at twice the allowed memory; the title counts the plans beyond.
    """
    figure = new_figure(11, 5.5)
    axis = figure.subplots()
    points = [(estimate.heaviest / GIB, estimate.throughput) for estimate in estimates]
    groups: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for point, estimate in zip(points, estimates):
        groups.setdefault((estimate.plan.schedule, estimate.plan.recompute), []).append(point)
    for (schedule, recompute), own in groups.items():
        colour = SCHEDULE_COLOURS.get(schedule, "black")
        axis.scatter(*zip(*own), color=colour, marker=MARKERS[recompute], s=26, alpha=0.7, linewidths=0)
    limit = estimates[0].capacity / GIB
    shown = [point for point in points if point[0] <= 2 * limit] or points
    best = [points[index] for index in pareto(points)]
    axis.plot(*zip(*best), drawstyle="steps-post", color="black", linewidth=1, zorder=1, label="Pareto front")
    axis.axvline(limit, color="#d00000", linewidth=1.2, linestyle="--", label=f"allowed: {limit:.1f} GiB")
    low, high = min(throughput for _, throughput in shown), max(throughput for _, throughput in shown)
    room = max(high - low, 0.05 * high)
    axis.set_ylim(max(low - 0.08 * room, 0), high + 0.2 * room)
    axis.set_xlim(0, 1.05 * max(limit, *(memory for memory, _ in shown)))
    _name_winner(axis, estimates)
    figure.legend(handles=_front_legend(axis, groups), loc="outside right upper", fontsize=8)
    axis.set_xlabel("GiB of the heaviest stage")
    axis.set_ylabel("samples/s")
    beyond = f" ({len(points) - len(shown)} need more memory than is shown)" if len(shown) < len(points) else ""
    axis.set_title(f"{len(estimates)} plans{beyond}", loc="left", fontsize=10)
    write_figure(path, figure)


def _front_legend(axis, groups: Iterable[tuple[str, str]]) -> list:
    from matplotlib.lines import Line2D

    schedules, recomputes = (dict.fromkeys(names) for names in zip(*groups))
    entries = [(name, SCHEDULE_COLOURS.get(name, "black"), "o") for name in schedules]
    entries += [(f"recompute: {name}", "#444444", MARKERS[name]) for name in MARKERS if name in recomputes]
    marks = [Line2D([], [], color=colour, marker=mark, linestyle="", label=name) for name, colour, mark in entries]
    return marks + axis.get_legend_handles_labels()[0]


def _name_winner(axis, estimates: Sequence[Estimate]) -> None:
    fitting = [estimate for estimate in estimates if estimate.headroom >= 0]
    style = dict(va="top", fontsize=9, bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.9, "pad": 2})
    if not fitting:
        axis.text(0.01, 0.97, "no plan fits", transform=axis.transAxes, **style)
        return
    winner = max(fitting, key=lambda estimate: (estimate.throughput, -estimate.heaviest))  # on the front
    at = winner.heaviest / GIB, winner.throughput
    axis.scatter(*at, s=110, facecolors="none", edgecolors="black", linewidths=1.4, zorder=3)
    text = f"{winner.plan.title}: {at[1]:.4g} samples/s in {at[0]:.3g} GiB\n{NAMES}"
    arrow = {"arrowstyle": "-", "color": "black", "linewidth": 0.8, "shrinkB": 6}
    axis.annotate(text, at, xytext=(0.01, 0.97), textcoords="axes fraction", arrowprops=arrow, **style)


def splits(estimates: Sequence[Estimate], path: Path) -> None:
    """Draw the causes of the time of the first RANKED plans, in milliseconds per sample, a bar per plan."""
    shown = list(estimates[:RANKED])
    figure = new_figure(12, 1.6 + 0.34 * len(shown))
    axis = figure.subplots()
    lefts = [0.0] * len(shown)
    for cause, (colour, name) in CAUSES.items():
        widths = [1e3 * max(getattr(e.split, cause), 0.0) / e.plan.global_batch for e in shown]
        axis.barh(range(len(shown)), widths, left=lefts, color=colour, label=name, height=0.75)
        lefts = [left + width for left, width in zip(lefts, widths)]
    for row, (estimate, left) in enumerate(zip(shown, lefts)):
        axis.text(left, row, f" {estimate.throughput:.4g} samples/s", va="center", fontsize=8)
    names = [f"{estimate.plan.title}  {rank}" for rank, estimate in enumerate(shown, 1)]
    axis.set_yticks(range(len(shown)), names, fontsize=8)
    axis.set_xlim(0, 1.17 * max(lefts))
    axis.invert_yaxis()
    axis.set_xlabel("milliseconds per sample: work and waiting times of the busiest stage")
    figure.legend(loc="outside upper center", ncols=len(CAUSES), fontsize=8)
    write_figure(path, figure)


def write_report(cost: Cost, estimates: Sequence[Estimate], cloud: Sequence[Estimate], folder: Path) -> list[Path]:
    """Write the pictures, index.md and index.html to `folder`, which is created if it is missing; returns the files.

    estimates  ranked, the best first. The timeline and the memory show the best
    cloud      more plans for the front
    Raises UserError if there is no plan, or if `folder` cannot be written.
    """
    if not estimates:
        raise UserError(f"--report {folder}: there is no plan to report")
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise UserError(f"--report {folder}: it exists and is not a folder")
    best, every = estimates[0], list({estimate.plan: estimate for estimate in (*cloud, *estimates)}.values())
    index, page = folder / "index.md", folder / "index.html"
    with file_errors(f"--report {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        front(every, folder / "front.png")
        splits(estimates, folder / "splits.png")
        timeline(cost, best, folder / "timeline.png")
        memory_bars(best, folder / "memory.png", cost.cluster.device.memory_gib * GIB)
        index.write_text(_index(cost, best), encoding="utf-8")
        others = sorted((each for each in every if each not in estimates), key=lambda each: -each.throughput)
        windows = [_window(cost, estimate.plan) for estimate in estimates]
        page.write_text(report_page.html(cost, estimates, others, windows), encoding="utf-8")
    return [index, page, *(folder / name for name in PICTURES)]


def _index(cost: Cost, best: Estimate) -> str:
    memory = f"{best.heaviest / GIB:.1f} GiB of {best.capacity / GIB:.1f} allowed"
    parts = [
        f"# {report_page.title(cost)}",
        f"Best: {best.plan.title}, {best.throughput:.4g} samples/s, {memory}.",
        "    " + " ".join(best.plan.flags(cost.precision)),
        "[index.html](index.html) has all plans in a table, and the timeline to zoom.",
    ]
    parts += [f"{line}\n\n![{line}]({name})" for name, line in PICTURES.items()]
    return "\n\n".join(parts) + "\n"


def chrome_trace(cost: Cost, estimate: Estimate, path: Path, iterations: int = 2) -> None:
    """Write the plan's simulated timeline for Perfetto: a process for the pipeline, a thread per stage, microseconds.

    Events have the form of --two-bw-trace (timelines/trace.py). Waits between them are events too. The file is written
    in one step. Raises UserError if it cannot be written.
    """
    plan = estimate.plan
    events = simulated(plan, cost.times(plan), iterations)
    with file_errors(f"--trace {path}"):
        write_json(path, of_events(events, plan.depth, f"{plan.title} (simulated)"), indent=None)
