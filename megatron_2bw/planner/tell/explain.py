"""The result of a search in words and tables. Pure Python.

Invariant: every number is from an Estimate, and every term is marked MEASURED or ESTIMATED.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from dataclasses import astuple, dataclass, fields, replace
from functools import cached_property
from operator import attrgetter

from megatron_2bw.models.cluster import Cluster
from megatron_2bw.planner.cost.memory import GIB, StageMemory
from megatron_2bw.planner.cost.simulated import Cost, Estimate, Split
from megatron_2bw.planner.find.advice import tie
from megatron_2bw.planner.find.search import Search, on_fewer
from megatron_2bw.planner.find.space import Space

MEASURED, ESTIMATED = "MEASURED", "ESTIMATED"
TERMS = [field.name for field in fields(Split)]
KINDS = [field.name for field in fields(StageMemory)]
MIN_FEWER_GAIN = 0.01  # of the time per sample: what a plan on fewer GPUs must save to be reported

LEGEND = (
    "t, d, w: tensor-parallel size, stages, pipelines. b, m: samples a microbatch, microbatches a batch and pipeline.",
    "g: m / d, the gradient accumulation of the paper's Algorithm 1.",
    "ranks: neighbours are the replicas of a stage (dp-pp), or a pipeline's stages (pp-dp, --use-tp-pp-dp-mapping).",
    "2bw +k: k extra warm-up forwards on the first stage hide messages (--two-bw-extra-warmup).",
    "gpipe round N: N microbatches at a time, as many as fit, with a bubble after each round (--gpipe-round).",
    "layers: per stage, or first/middle/last. optim. sharded: --use-distributed-optimizer. TF: 10^12 operations.",
)
TIES = "Exact schedules and simpler plans are first."
PARTS = "c: context-parallel size, the ranks that share a sequence (--context-parallel-size)."
ONE_STAGE = "2bw with d 1: no pipeline. Step and reductions overlap the next batch; gradients are late all the same."
CAVEAT = """\
The plans assume that the given global batch is the largest that is safe for convergence: throughput grows with the
batch, so a larger, unsafe batch would look better here. The gradients of 2bw are late by one update (delay 1): check
convergence at this batch and learning rate before a long run."""


@dataclass(frozen=True)
class Result:
    """The estimates of the fastest plans in the order of advice (the first `ties` of them tie); the search, with what
    it rejected, and its `seconds`."""

    cost: Cost
    space: Space
    estimates: list[Estimate]
    search: Search
    seconds: float
    ties: int = 1

    @cached_property
    def rivals(self) -> list[Estimate]:
        """The fastest plan of another shape, and of each other schedule: from the table or by a further search."""
        winner, *others = self.estimates
        shape = _shape(winner.plan)
        found = [estimate for estimate in others if _shape(estimate.plan) != shape][:1]
        for schedule in self.space.schedules:
            if schedule == winner.plan.schedule:
                continue
            best = next((estimate for estimate in others if estimate.plan.schedule == schedule), None)
            if best is None:
                search = Search(self.cost, replace(self.space, schedules=(schedule,)))
                best = next((self.cost.estimate(plan) for _, plan in search), None)
            if best is not None and best not in found:
                found.append(best)
        return found

    @cached_property
    def fewer(self) -> tuple[Cluster, Estimate] | None:
        """A part of the cluster and its fastest plan, if that is faster than the first plan on all GPUs."""
        limits = (_per_sample(estimate) * (1 - MIN_FEWER_GAIN) for estimate in self.estimates)
        found = on_fewer(self.cost, self.space, min(limits, default=math.inf))
        return found and (found[0].cluster, found[0].estimate(found[2]))


_shape = attrgetter("tensor", "context", "depth", "width")


def _per_sample(estimate: Estimate) -> float:
    return estimate.seconds / estimate.plan.global_batch


def text(result: Result) -> str:
    """The tables of the plans and of the first plan's memory, and why it is first."""
    words = f"{reason(result)}\n{on_fewer_gpus(result)}"
    return "\n\n".join([table(result), memory_table(result.estimates[0]), words])


# --- tables ----------------------------------------------------------------------------------------------------------


def aligned(rows: list[list[str]], left: set[int]) -> list[str]:
    """Lines of a table with two blanks between columns. Columns in `left` are aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    pads = [str.ljust if column in left else str.rjust for column in range(len(widths))]
    return ["  ".join(pad(cell, width) for pad, cell, width in zip(pads, row, widths)).rstrip() for row in rows]


def _percent(share: float, digits: int = 0) -> str:
    return f"{round(100 * share, digits) + 0.0:.{digits}f} %"  # + 0.0 turns a rounded -0.0 into 0.0


PLAN_COLUMNS = "# schedule t d w b m g recompute optim. ranks layers batch samples/s tok/s/GPU TF/s/GPU".split()


def table(result: Result) -> str:
    """The ranked plans: choices and throughput; then the causes of an iteration's time, and the memory."""
    cost, estimates, plans, times = result.cost, result.estimates, [], []
    for rank, estimate in enumerate(estimates, 1):
        plan, each = estimate.plan, estimate.throughput / estimate.plan.gpus
        place = "1=" if rank <= result.ties > 1 else str(rank)
        sizes = (plan.depth, plan.width, plan.microbatch, plan.microbatches)
        words = (
            f"{plan.accumulation:.1f}",
            plan.recompute_name,
            "sharded" if plan.distributed_optimizer else "whole",
            "pp-dp" if plan.pipeline_inside else "dp-pp",
            _layers(plan.layers_of(cost.model)),
            str(plan.global_batch),
            f"{estimate.throughput:.1f}",
            f"{each * cost.model.sequence:.0f}",
            f"{each * cost.model.sample_flops() / 1e12:.1f}",
        )
        tensor = str(plan.tensor) + f" c{plan.context}" * (plan.context > 1)
        plans.append([place, plan.schedule_name, tensor, *map(str, sizes), *words])
        shares = (_percent(getattr(estimate.split, term) / estimate.seconds, 1) for term in TERMS)
        memory = (f"{size / GIB:.2f} GiB" for size in (estimate.heaviest, estimate.headroom))
        error = f"{1e3 * cost.cluster.device.error * estimate.seconds:.1f}"
        times.append([place, f"{1e3 * estimate.seconds:.1f} ms", error, *shares, *memory])
    notes = {
        PARTS: any(estimate.plan.context > 1 for estimate in estimates),
        f"1=: within {_percent(tie(cost.cluster.device.error))} of the fastest, a tie. {TIES}": result.ties > 1,
        ONE_STAGE: any(e.plan.schedule == "2bw" and e.plan.depth == 1 for e in estimates),
    }
    attention = "flash attention" if cost.memory.flash else "attention that keeps its scores"
    tags = {tag: [term for term, found in terms(cost).items() if found[0] == tag] for tag in (MEASURED, ESTIMATED)}
    tagged = "; ".join(f"{tag}: {', '.join(names)}" for tag, names in tags.items() if names)
    return "\n".join(
        [
            f"Plans for {cost.model.name} on {cost.cluster.gpus} GPUs, fastest first, ties by simplicity (ESTIMATED)",
            f"{cost.precision}, sequences of {cost.model.sequence}, {attention}, times by {cost.method}.",
            *aligned([PLAN_COLUMNS, *plans], {1, 8, 9, 10, 11}),
            *LEGEND,
            *(note for note, holds in notes.items() if holds),
            "",
            f"Where an iteration's time goes, and memory ({tagged})",
            *aligned([["#", "iteration", "+- ms", *TERMS, "heaviest", "headroom"], *times], set()),
            "+-: of measured times nine of ten are within it (calibrate measures it on your runs).",
        ]
    )


def _layers(stages: list[int]) -> str:
    """Layers of each stage; of the first, each middle and the last stage; or of all: 6,3x5,4x3 has 3 stages of 5."""
    if len({*stages[1:-1]}) > 1:
        runs = [(layers, len([*same])) for layers, same in itertools.groupby(stages)]
        return ",".join(f"{count}x{layers}" if count > 1 else str(layers) for layers, count in runs)
    ends = [stages[0], *stages[1:-1][:1], stages[-1]]
    return "/".join(map(str, ends)) if len(set(stages)) > 1 else str(stages[0])


def memory_table(estimate: Estimate) -> str:
    """GiB on the GPUs of every stage, by kind. Successive stages with equal figures share a line."""
    sizes = [
        [*astuple(stage), stage.total, room - stage.total] for stage, room in zip(estimate.memory, estimate.capacities)
    ]
    lines, first = [], 0
    for cells, same in itertools.groupby([f"{size / GIB:.2f}" for size in stage] for stage in sizes):
        last = first + len([*same]) - 1
        lines.append([str(first) if first == last else f"{first}-{last}", *cells])
        first = last + 1
    title = f"Memory of a GPU of each stage of {estimate.plan.title}, in GiB ({ESTIMATED})"
    return "\n".join([title, *aligned([["stage", *KINDS, "total", "headroom"], *lines], {0})])


# --- words -----------------------------------------------------------------------------------------------------------


def wrapped(text: str, mark: str = "- ") -> str:
    return textwrap.fill(text, 118, initial_indent=mark, subsequent_indent=" " * len(mark), break_on_hyphens=False)


def reason(result: Result) -> str:
    """Why the first plan is fastest: its time by cause, beside the best of another shape and of each other schedule."""
    winner, best = result.estimates[0], max(result.estimates, key=attrgetter("throughput"))
    first = f"{winner.plan.title} is the fastest: {winner.throughput:.1f} samples/s ({ESTIMATED})."
    if result.ties > 1 and best is not winner:
        first = (
            f"{winner.plan.title} is first: {winner.throughput:.1f} samples/s ({ESTIMATED}). The fastest, "
            f"{best.plan.title}, has {best.throughput:.1f}. The difference is within the error"
            f"{'' if best.plan.pipeline.flushes else ' and the cost of its delay in convergence'}."
        )
    rows = []
    for estimate in (winner, *result.rivals):
        causes = (f"{1e3 * getattr(estimate.split, term) / estimate.plan.global_batch:.2f}" for term in TERMS)
        rates = f"{estimate.throughput:.1f}", f"{winner.throughput / estimate.throughput:.2f}"
        rows.append([estimate.plan.title, *rates, *causes, f"{estimate.heaviest / GIB:.2f} GiB"])
    lines = [
        wrapped(first, ""),
        "Below it: the best plan of another shape, and of each other schedule. Milliseconds a sample by cause.",
        *aligned([["plan", "samples/s", "ratio", *TERMS, "heaviest"], *rows], {0}),
        "ratio: the first plan's samples/s by this one's.",
    ]
    tried = {winner.plan.schedule, *(rival.plan.schedule for rival in result.rivals)}
    missing = [schedule for schedule in result.space.schedules if schedule not in tried]
    if missing:
        lines.append(wrapped(f"No plan of {' or '.join(missing)} is legal and fits."))
    return "\n".join(lines)


def on_fewer_gpus(result: Result) -> str:
    """Whether a part of the cluster has a faster plan, and the flags that plan for that part."""
    if result.fewer is None:
        return "- No part of the cluster is faster (fewer servers, or fewer GPUs of each server)."
    cluster, best = result.fewer
    return wrapped(
        f"A plan on {cluster.gpus} of the {result.cost.cluster.gpus} GPUs is faster: {best.plan.title} "
        f"({best.throughput:.1f} samples/s). Plan for these: {part_flags(cluster)}"
    )


def part_flags(cluster: Cluster) -> str:
    return f"--servers {cluster.servers} --gpus-per-server {cluster.gpus_per_server}"


# --- sources of the numbers ------------------------------------------------------------------------------------------


def terms(cost: Cost) -> dict[str, tuple[str, str]]:
    """For each term MEASURED or ESTIMATED, and the source. A partly measured term is ESTIMATED."""
    cluster, profile, device = cost.cluster, cost.cluster.profile, cost.cluster.device
    compute = (ESTIMATED, f"{device.name}, {device.calibration}")
    update = (ESTIMATED, f"{device.name}'s memory bandwidth")
    if profile is not None:
        rest = f"{ESTIMATED} from it: the embedding, selective recompute, tensor sizes above 1"
        compute = (MEASURED, f"profile of a layer and the output layer on {profile.device}; {rest}")
        update = (MEASURED, f"profile of the optimizer on {profile.device}; {device.step_us / 1e3:g} ms {ESTIMATED}")
    links = {"inside servers": cluster.inside} | ({"between servers": cluster.between} if cluster.servers > 1 else {})
    tags = {where: MEASURED if link.measured else ESTIMATED for where, link in links.items()}
    found = "; ".join(f"{where} {link} {tags[where]}" for where, link in links.items())
    network = (ESTIMATED if ESTIMATED in tags.values() else MEASURED, found)
    memory = f"formulas by stage; {100 * cost.margin:.0f} % of {device.memory_gib:g} GiB are left free"
    memory += "" if cost.given_margin is not None else ", and what NCCL takes"
    return (
        {"compute": compute}
        | dict.fromkeys(("tensor", "pipeline", "data"), network)
        | {"update": update, "bubble": (ESTIMATED, "simulation of the schedule with the terms above")}
        | {"memory": (ESTIMATED, memory)}
    )


def evidence(cost: Cost) -> str:
    """The source of each term of the estimates."""
    lines = []
    for term, (tag, source) in terms(cost).items():
        lines += textwrap.wrap(source, 118, initial_indent=f"{term:<10}{tag:<11}", subsequent_indent=" " * 21)
    return "\n".join(lines)
