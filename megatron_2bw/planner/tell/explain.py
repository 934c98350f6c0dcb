"""What a search has found, in words, tables and JSON. Pure Python.

Invariant: every number is one of the estimates, and every term of them says whether it was MEASURED or is ESTIMATED.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_2bw.planner.cost.memory import GIB
from megatron_2bw.planner.cost.simulated import Cost, Estimate
from megatron_2bw.planner.describe.cluster import Link
from megatron_2bw.planner.describe.plan import Plan
from megatron_2bw.planner.find.search import Search, Space

MEASURED, ESTIMATED = "MEASURED", "ESTIMATED"
TERMS = {
    "compute": "compute",
    "tensor": "tensor-parallel collectives",
    "pipeline": "messages between stages",
    "data": "the reduction of gradients",
    "update": "the optimizer's step",
    "bubble": "waiting for other stages",
}
KINDS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers")
DEEP = 12  # stages that are listed one by one
SMALL = 0.02  # of the time; a lesser difference of a term is not told

LEGEND = (
    "t, d, w: tensor-parallel size, stages, pipelines. b, m: samples a microbatch, microbatches a batch and pipeline.",
    "ranks: neighbours are the replicas of a stage (dp-pp), or a pipeline's stages (pp-dp, --use-tp-pp-dp-mapping).",
    "2bw +k: the first stage runs k forwards further ahead, so that messages are hidden (--two-bw-extra-warmup).",
    "layers: of a stage, or of first/middle/last. optim.: sharded: --use-distributed-optimizer. TF: 10^12 operations.",
)
CAVEAT = """\
The global batch is taken to be the largest that is safe for convergence: throughput grows with the batch, so a larger,
unsafe one would look better here. The gradients of 2bw are late by one update (delay 1): check convergence at this
batch and learning rate before a long run."""


@dataclass(frozen=True)
class Result:
    """What a search has found: the fastest plans, fastest first, and what it left out; `seconds` that it took."""

    cost: Cost
    space: Space
    estimates: list[Estimate]
    search: Search
    seconds: float

    @cached_property
    def rivals(self) -> list[Estimate]:
        """The fastest plan of another shape, and of each other schedule: searched for if it is not in the table."""
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


def _shape(plan: Plan) -> tuple[int, int, int]:
    return plan.tensor, plan.depth, plan.width


def _per_sample(estimate: Estimate) -> float:
    return estimate.seconds / estimate.plan.global_batch


# --- tables ----------------------------------------------------------------------------------------------------------


def _aligned(head: list[str], rows: list[list[str]], left: set[str]) -> list[str]:
    """Lines of a table, columns two blanks apart; the columns of `left` are words, the others numbers."""
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    pads = [str.ljust if name in left else str.rjust for name in head]
    lines = ("  ".join(pad(cell, width) for pad, cell, width in zip(pads, row, widths)) for row in [head, *rows])
    return [line.rstrip() for line in lines]


def _percent(share: float, digits: int = 0) -> str:
    return f"{round(100 * share, digits) + 0.0:.{digits}f} %"  # + 0.0: rounding may leave -0.0 of a difference of sums


def table(result: Result) -> str:
    """The ranked plans: what they are and how fast; then where an iteration's time goes, and the memory."""
    cost, plans, times = result.cost, [], []
    for rank, estimate in enumerate(result.estimates, 1):
        plan, split = estimate.plan, estimate.split
        each = estimate.throughput / plan.gpus
        plans.append(
            [
                str(rank),
                plan.schedule_name,
                *map(str, (plan.tensor, plan.depth, plan.width, plan.microbatch, plan.microbatches)),
                plan.recompute,
                "sharded" if plan.distributed_optimizer else "whole",
                "pp-dp" if plan.pipeline_inside else "dp-pp",
                _layers(plan, cost.model.layers),
                str(plan.global_batch),
                f"{estimate.throughput:.1f}",
                f"{each * cost.model.sequence:.0f}",
                f"{each * cost.model.sample_flops() / 1e12:.1f}",
            ]
        )
        times.append(
            [
                str(rank),
                f"{1e3 * estimate.seconds:.1f} ms",
                *(_percent(getattr(split, term) / estimate.seconds, 1) for term in TERMS),
                f"{estimate.heaviest / GIB:.2f} GiB",
                f"{estimate.headroom / GIB:.2f} GiB",
            ]
        )
    head = [
        "#",
        "schedule",
        "t",
        "d",
        "w",
        "b",
        "m",
        "recompute",
        "optim.",
        "ranks",
        "layers",
        "batch",
        "samples/s",
        "tok/s/GPU",
        "TF/s/GPU",
    ]
    first = _aligned(head, plans, {"schedule", "recompute", "optim.", "ranks", "layers"})
    second = _aligned(["#", "iteration", *TERMS, "heaviest", "headroom"], times, set())
    return "\n".join(
        [
            f"Plans for {cost.model.name} on {cost.cluster.gpus} GPUs, fastest first (ESTIMATED)",
            _judged(cost),
            *first,
            *LEGEND,
            "",
            f"Where an iteration's time goes, and memory ({_tags(cost)})",
            *second,
        ]
    )


def _judged(cost: Cost) -> str:
    attention = "flash attention" if cost.memory.flash else "attention that keeps its scores"
    return f"{cost.precision}, sequences of {cost.model.sequence}, {attention}, times by {cost.method}."


def _layers(plan: Plan, layers: int) -> str:
    """Layers of a stage, or of the first, each middle and the last stage."""
    if not plan.first and not plan.last:
        return str(layers // plan.depth)
    if plan.depth == 2:
        return f"{plan.first or layers - plan.last}/{plan.last or layers - plan.first}"
    ends = (plan.first > 0) + (plan.last > 0)
    middle = (layers - plan.first - plan.last) // (plan.depth - ends)
    return f"{plan.first or middle}/{middle}/{plan.last or middle}"


def memory_table(estimate: Estimate) -> str:
    """GiB of every stage's GPUs by kind. In deep pipelines equal stages between the ends share a line."""
    rows: list[tuple[int, int, list[str]]] = []  # first and last stage of the line
    for number, stage in enumerate(estimate.memory):
        sizes = [*(getattr(stage, kind) for kind in KINDS), stage.total, estimate.capacity - stage.total]
        cells = [f"{size / GIB:.2f}" for size in sizes]
        inner = 1 < number < estimate.plan.depth - 1 and estimate.plan.depth > DEEP
        if inner and rows[-1][2] == cells:
            rows[-1] = (rows[-1][0], number, cells)
        else:
            rows.append((number, number, cells))
    lines = [[str(first) if first == last else f"{first}-{last}", *cells] for first, last, cells in rows]
    return "\n".join(
        [
            f"Memory of a GPU of each stage of {estimate.plan.title}, in GiB ({ESTIMATED})",
            *_aligned(["stage", *KINDS, "total", "headroom"], lines, {"stage"}),
        ]
    )


# --- words -----------------------------------------------------------------------------------------------------------


def wrapped(text: str, mark: str = "- ") -> str:
    return textwrap.fill(text, 118, initial_indent=mark, subsequent_indent=" " * len(mark), break_on_hyphens=False)


def reason(result: Result) -> str:
    """Why the first plan wins: against the best of another shape and of each other schedule, term by term."""
    winner = result.estimates[0]
    lines = [f"{winner.plan.title} is the fastest: {winner.throughput:.1f} samples/s ({ESTIMATED})."]
    lines += [wrapped(_against(winner, rival)) for rival in result.rivals]
    tried = {winner.plan.schedule, *(rival.plan.schedule for rival in result.rivals)}
    missing = [schedule for schedule in result.space.schedules if schedule not in tried]
    if missing:
        lines.append(wrapped(f"No plan of {' or '.join(missing)} is legal and fits."))
    return "\n".join(lines)


def _against(winner: Estimate, rival: Estimate) -> str:
    """One comparison. Shares are of the rival's time per sample, so that they add up to what the winner saves."""
    same = winner.plan.schedule == rival.plan.schedule
    which = "the best plan of another shape" if same else f"the best {rival.plan.schedule} plan"
    ratio = _per_sample(rival) / _per_sample(winner)
    pace = f"{ratio:.2f} times as fast as" if round(ratio, 2) != 1 else "hardly faster than"
    saved, paid = [], []
    for term, words in TERMS.items():
        there, here = (getattr(e.split, term) / e.plan.global_batch / _per_sample(rival) for e in (rival, winner))
        flush = term == "bubble" and rival.plan.pipeline.flushes and not winner.plan.pipeline.flushes
        why = ": no stage waits for a flush" if flush and there > here else ""
        if term == "pipeline" and sum(winner.plan.extra) > sum(rival.plan.extra) and there > here:
            why = ": forwards run further ahead"
        text = f"{words} ({_percent(there)} there, {_percent(here)} here{why})"
        if abs(there - here) >= SMALL:
            (saved if there > here else paid).append((abs(there - here), text))
    parts = [
        f"{verb} {_listed([text for _, text in sorted(differences, reverse=True)[:3]])}"
        for verb, differences in (("less for", saved), ("more for", paid))
        if differences
    ]
    split = f"Of that plan's time a sample it takes {', but '.join(parts)}."
    if not parts:
        split = f"No term differs by {_percent(SMALL)}."
    return (
        f"It is {pace} {which}, {rival.plan.title} ({rival.throughput:.1f} samples/s). {split} Its heaviest stage "
        f"takes {winner.heaviest / GIB:.1f} GiB, there {rival.heaviest / GIB:.1f} GiB."
    )


def _listed(texts: list[str]) -> str:
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if texts[1:] else texts)


# --- where the numbers come from -------------------------------------------------------------------------------------


def terms(cost: Cost) -> dict[str, tuple[str, str]]:
    """For each term MEASURED or ESTIMATED, and from what. What is part measured and part not is ESTIMATED."""
    profile, device = cost.cluster.profile, cost.cluster.device
    compute = (ESTIMATED, f"{device.name}, {device.calibration}")
    update = (ESTIMATED, f"{device.name}'s memory bandwidth")
    if profile is not None:
        compute = (
            MEASURED,
            f"profile of a layer and the output layer on {profile.device}; {ESTIMATED} from it: the "
            "embedding, selective recompute, tensor sizes above 1",
        )
        update = (MEASURED, f"profile of the optimizer on {profile.device}; {device.step_us / 1e3:g} ms {ESTIMATED}")
    links = [("inside servers", cost.cluster.inside)]
    if cost.cluster.servers > 1:
        links.append(("between servers", cost.cluster.between))
    tag = MEASURED if all(link.measured for _, link in links) else ESTIMATED
    network = (tag, "; ".join(_link(where, link) for where, link in links))
    simulated = (ESTIMATED, "the schedule, simulated with the terms above")
    memory = (ESTIMATED, f"formulas by stage; {100 * cost.margin:.0f} % of {device.memory_gib:g} GiB are left free")
    return {
        "compute": compute,
        "tensor": network,
        "pipeline": network,
        "data": network,
        "update": update,
        "bubble": simulated,
        "memory": memory,
    }


def _link(where: str, link: Link) -> str:
    return f"{where} {link.gb_s:g} GB/s, {link.latency_us:g} us {MEASURED if link.measured else ESTIMATED}"


def _tags(cost: Cost) -> str:
    tags = {
        tag: ", ".join(term for term, found in terms(cost).items() if found[0] == tag) for tag in (MEASURED, ESTIMATED)
    }
    return "; ".join(f"{tag}: {names}" for tag, names in tags.items() if names)


def evidence(cost: Cost) -> str:
    """Where each term of the estimates comes from."""
    lines = []
    for term, (tag, source) in terms(cost).items():
        lines += textwrap.wrap(source, 118, initial_indent=f"{term:<10}{tag:<11}", subsequent_indent=" " * 21)
    return "\n".join(lines)


# --- JSON ------------------------------------------------------------------------------------------------------------
