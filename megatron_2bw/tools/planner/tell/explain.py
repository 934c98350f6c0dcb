"""The result of a search in words and tables. Pure Python.

Invariant: every number is from an Estimate, and every term is marked MEASURED or
ESTIMATED.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields, replace
from functools import cached_property
from operator import attrgetter

from megatron_2bw.run.flags.correction_notes import gap
from megatron_2bw.tools.planner.cost.memory import GIB, StageMemory
from megatron_2bw.tools.planner.cost.simulated import Cost, Estimate, Split
from megatron_2bw.tools.planner.descriptions.cluster import Cluster
from megatron_2bw.tools.planner.descriptions.plan import Plan
from megatron_2bw.tools.planner.find.advice import TIGHT, tie
from megatron_2bw.tools.planner.find.search import Search, on_fewer
from megatron_2bw.tools.planner.find.space import Space

MEASURED, ESTIMATED = "MEASURED", "ESTIMATED"
TERMS = [field.name for field in fields(Split)]
KINDS = [field.name for field in fields(StageMemory)]
# of the time per sample: what a plan on fewer GPUs must save to be reported
MIN_FEWER_GAIN = 0.01

LEGEND = (
    (
        "t, d, w: tensor-parallel size, stages, pipelines. b, m: samples a "
        "microbatch, microbatches a batch and pipeline."
    ),
    (
        "c, e: context-, expert-parallel size (--context-parallel-size, "
        "--expert-model-parallel-size). g: m / d, the"
    ),
    "gradient accumulation of Algorithm 1.",
    (
        "ranks: neighbours are the replicas of a stage (dp-pp), or a pipeline's "
        "stages (pp-dp, --use-tp-pp-dp-mapping)."
    ),
    "2bw +k: k extra warm-up forwards on the first stage hide messages (--two-bw-extra-warmup).",
    (
        "2bw shard: the second gradient slot is the own shard "
        "(--two-bw-gradient-slots shard). 2bw host: main weights and"
    ),
    "Adam's moments are in host memory, where the step runs (--two-bw-optimizer host).",
    (
        "gpipe round N: N microbatches at a time, as many as fit, with a bubble "
        "after each round (--gpipe-round)."
    ),
    (
        "layers: per stage, or first/middle/last. optim. sharded: "
        "--use-distributed-optimizer. TF: 10^12 operations."
    ),
)
CAVEAT = """\
The plans assume that the given global batch is the largest that is safe for convergence: throughput grows with the
batch, so a larger, unsafe batch would look better here. The gradients of 2bw are late by one update (delay 1): check
convergence at this batch and learning rate before a long run."""


@dataclass(frozen=True)
class Result:
    """The estimates of the fastest plans in the order of advice (the first `ties` of
    them tie); the search, with what it rejected, and its `seconds`."""

    cost: Cost
    space: Space
    estimates: list[Estimate]
    search: Search
    seconds: float
    ties: int = 1

    @cached_property
    def rivals(self) -> list[Estimate]:
        """The fastest plan of another shape, and of each other schedule: from the table
        or by a further search."""
        winner, *others = self.estimates
        found = [
            estimate
            for estimate in others
            if _shape(estimate.plan) != _shape(winner.plan)
        ][:1]
        for schedule in self.space.schedules:
            if schedule == winner.plan.schedule:
                continue
            best = next(
                (estimate for estimate in others if estimate.plan.schedule == schedule),
                None,
            )
            if best is None:
                search = Search(self.cost, replace(self.space, schedules=(schedule,)))
                best = next((self.cost.estimate(plan) for _, plan in search), None)
            if best is not None and best not in found:
                found.append(best)
        return found

    @cached_property
    def tight(self) -> list[Estimate]:
        """Of the fastest plans that do not fit by the estimate, but may, those that are
        faster than the first one."""
        loose, named = self.cost.on(self.cost.cluster, spare=-TIGHT), {}
        for plan in itertools.islice(filter(loose.fits, self.search.too_large), 6):
            named.setdefault(plan.title, plan)
        found = map(self.cost.estimate, itertools.islice(named.values(), 2))
        return [
            each for each in found if _per_sample(each) < _per_sample(self.estimates[0])
        ]

    @cached_property
    def fewer(self) -> Cluster | None:
        """A part of the cluster whose fastest plan is faster than the first plan on all
        GPUs."""
        limits = (
            _per_sample(estimate) * (1 - MIN_FEWER_GAIN) for estimate in self.estimates
        )
        found = on_fewer(self.cost, self.space, min(limits, default=math.inf))
        return found and found[0].cluster


_shape = attrgetter("tensor", "context", "depth", "width")


def _per_sample(estimate: Estimate) -> float:
    return estimate.seconds / estimate.plan.global_batch


def text(result: Result) -> str:
    """The first plan, the tables of the plans and of its memory, and why it is
    first."""
    return "\n\n".join(
        [
            first(result),
            table(result),
            memory_table(result.estimates[0]),
            reason(result),
        ]
    )


def gpus(cost: Cost) -> str:
    return f"{cost.cluster.gpus} GPU{'s' * (cost.cluster.gpus > 1)}"


def three(number: float) -> str:
    """With three digits, or all that are before the point."""
    return (
        f"{number:.{max(2 - math.floor(math.log10(float(f'{number:.2e}'))), 0)}f}"
        if number
        else "0"
    )


# --- tables
# --------------------------------------------------------------------------------------


def aligned(rows: list[list[str]], left: set[int]) -> list[str]:
    """Lines of a table with two blanks between columns. Columns in `left` are aligned
    left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    pads = [str.ljust if column in left else str.rjust for column in range(len(widths))]
    return [
        "  ".join(
            pad(cell, width) for pad, cell, width in zip(pads, row, widths)
        ).rstrip()
        for row in rows
    ]


def _percent(share: float, digits: int = 0) -> str:
    # + 0.0 turns a rounded -0.0 into 0.0
    return f"{round(100 * share, digits) + 0.0:.{digits}f} %"


PLAN_COLUMNS = (
    "# schedule t d w b m g recompute optim. ranks layers batch samples/s tok/s/GPU "
    "TF/s/GPU"
).split()


def table(result: Result) -> str:
    """The ranked plans: choices and throughput; then the causes of an iteration's time,
    and the memory."""
    cost, plans, times = result.cost, [], []
    places = [
        "1=" if rank <= result.ties > 1 else str(rank)
        for rank, _ in enumerate(result.estimates, 1)
    ]
    for place, estimate in zip(
        [*places, "tight", "tight"], [*result.estimates, *result.tight]
    ):
        plan, each = estimate.plan, estimate.throughput / estimate.plan.gpus
        sizes = (plan.depth, plan.width, plan.microbatch, plan.microbatches)
        words = (
            f"{plan.accumulation:.1f}",
            plan.recompute_name,
            "sharded" if plan.distributed_optimizer else "whole",
            "pp-dp" if plan.pipeline_inside else "dp-pp",
            _layers(plan.layers_of(cost.model)),
            str(plan.global_batch),
            *map(
                three,
                (
                    estimate.throughput,
                    each * cost.model.sequence,
                    each * cost.model.sample_flops() / 1e12,
                ),
            ),
        )
        tensor = (
            str(plan.tensor)
            + f" c{plan.context}" * (plan.context > 1)
            + f" e{plan.expert}" * (plan.expert > 1)
        )
        plans.append([place, plan.schedule_name, tensor, *map(str, sizes), *words])
        shares = (
            _percent(getattr(estimate.split, term) / estimate.seconds, 1)
            for term in TERMS
        )
        certain = max(stage.certain for stage in estimate.memory)
        memory = (
            f"{size / GIB:.2f} GiB"
            for size in (certain, estimate.heaviest, estimate.headroom)
        )
        seconds = (
            f"{three(time)} s"
            for time in (estimate.seconds, cost.cluster.device.error * estimate.seconds)
        )
        times.append([place, *seconds, *shares, *memory])
    within = _percent(tie(cost.cluster.device.error))
    ties = (
        f"1=: within {within} of the fastest, a tie. Exact schedules and simpler "
        "plans are first."
    )
    attention = (
        "flash attention" if cost.memory.flash else "attention that keeps its scores"
    )
    attention += ", torch's Adam" * cost.memory.torch_adam
    tags = {
        tag: [term for term, found in terms(cost).items() if found[0] == tag]
        for tag in (MEASURED, ESTIMATED)
    }
    tagged = "; ".join(
        f"{tag}: {', '.join(names)}" for tag, names in tags.items() if names
    )
    return "\n".join(
        [
            (
                f"Plans for {cost.model.name} on {gpus(cost)}, fastest first, ties by "
                "simplicity (ESTIMATED)"
            ),
            f"{cost.precision}, sequences of {cost.model.sequence}, {attention}.",
            *aligned([PLAN_COLUMNS, *plans], {1, 8, 9, 10, 11}),
            *LEGEND,
            *[ties] * (result.ties > 1),
            "",
            f"Where an iteration's time goes, and memory ({tagged})",
            *aligned(
                [
                    ["#", "iteration", "+-", *TERMS, "certain", "heaviest", "headroom"],
                    *times,
                ],
                set(),
            ),
            (
                "+-: of measured times nine of ten are within it (calibrate measures "
                "it on your runs). certain: weights,"
            ),
            (
                "gradients, optimizer, on the GPU with most. heaviest: and "
                "activations and buffers, which are estimates."
            ),
            *[
                (
                    f"tight: faster, and at most {_percent(TIGHT)} above the memory "
                    "by the estimate: it may fit, or run out."
                )
            ]
            * bool(result.tight),
        ]
    )


def _layers(stages: list[int]) -> str:
    """Layers of each stage; of the first, each middle and the last stage; or of all:
    6,3x5,4x3 has 3 stages of 5."""
    if len({*stages[1:-1]}) > 1:
        runs = [(layers, len([*same])) for layers, same in itertools.groupby(stages)]
        return ",".join(
            f"{count}x{layers}" if count > 1 else str(layers) for layers, count in runs
        )
    ends = [stages[0], *stages[1:-1][:1], stages[-1]]
    return "/".join(map(str, ends)) if len(set(stages)) > 1 else str(stages[0])


def memory_table(estimate: Estimate) -> str:
    """GiB on the GPUs of every stage, by kind. Successive stages with equal figures
    share a line."""
    sizes = [
        [*astuple(stage), stage.total, room - stage.total]
        for stage, room in zip(estimate.memory, estimate.capacities)
    ]
    lines, first = [], 0
    for cells, same in itertools.groupby(
        [f"{size / GIB:.2f}" for size in stage] for stage in sizes
    ):
        last = first + len([*same]) - 1
        lines.append([str(first) if first == last else f"{first}-{last}", *cells])
        first = last + 1
    title = (
        f"Memory of a GPU of each stage of {estimate.plan.title}, in GiB ({ESTIMATED})"
    )
    return "\n".join(
        [title, *aligned([["stage", *KINDS, "total", "headroom"], *lines], {0})]
    )


# --- words
# --------------------------------------------------------------------------------------


def wrapped(text: str, mark: str = "- ") -> str:
    return textwrap.fill(
        text,
        118,
        initial_indent=mark,
        subsequent_indent=" " * len(mark),
        break_on_hyphens=False,
    )


def first(result: Result) -> str:
    """The first plan, and what 2bw gains over a flush and costs."""
    winner, fastest = (
        result.estimates[0],
        max(result.estimates, key=attrgetter("throughput")),
    )
    sizes = " GiB of ".join(f"{size / GIB:.2f}" for size in winner.fullest)
    text = (
        f"Best: {winner.plan.title}, {three(winner.throughput)} samples/s, {sizes} "
        f"allowed ({ESTIMATED})."
    )
    if result.ties > 1 and fastest is not winner:
        delay = (
            ""
            if fastest.plan.pipeline.flushes
            else " and the cost of its delay in convergence"
        )
        text += f" The fastest is {rate(fastest)}: the difference is within the error{delay}."
    return "\n".join(
        wrapped(words, "")
        for words in (text, *on_host(result.cost, winner.plan), *gain(result))
    )


def on_host(cost: Cost, plan: Plan) -> Iterator[str]:
    """What the step in host memory takes, and whether the next batch hides it."""
    if plan.host:
        step, (window, _) = cost.times(plan).step, cost.window(plan)
        yield (
            f"The optimizer takes {max(cost.memory.host_bytes(plan)) / GIB:.1f} "
            "GiB of host memory for a GPU. Its step "
            f"takes {three(step)} s, and the next batch hides {three(window)} s "
            f"({ESTIMATED}; docs/host_memory.md)."
        )


def rate(estimate: Estimate) -> str:
    return f"{estimate.plan.title} ({three(estimate.throughput)} samples/s)"


def gain(result: Result) -> Iterator[str]:
    """What the fastest plan of 2bw gains over the fastest exact one, and what it costs,
    where both are."""
    found = sorted([*result.estimates, *result.rivals], key=_per_sample)
    late = next(
        (estimate for estimate in found if estimate.plan.schedule == "2bw"), None
    )
    exact = next(
        (estimate for estimate in found if estimate.plan.pipeline.flushes), None
    )
    if late and exact:
        plan, (fullest, stage) = (
            late.plan,
            max(enumerate(late.memory), key=lambda pair: pair[1].total),
        )
        slots = {
            2: (" and gradient slot", 1 / 2),
            "shard": (" and a gradient shard", 1 / (1 + plan.replicas)),
        }
        slot, part = slots.get(1 if plan.host else plan.gradient_slots, ("", 0.0))
        bubble = "One stage has no bubble to gain: only reductions and step overlap."
        if plan.depth > 1:
            share = (
                f"1 + (d - 1)/m, {1 + (plan.depth - 1) / plan.microbatches:.2f} here"
            )
            bubble = (
                "On even stages its gain over 1F1B of the same d and m is about "
                f"{share}; on slow links it is more."
            )
        corrected = (
            stage.optimizer
            - result.cost.estimate(plan.changed(extrapolate=False))
            .memory[fullest]
            .optimizer
        )
        trained = stage.weights - result.cost.memory.frozen(
            plan, fullest, plan.layers_of(result.cost.model)[fullest]
        )
        tokens = plan.global_batch * result.cost.model.sequence
        loss = gap(
            tokens,
            plan.pipeline.late_microbatches,
            plan.microbatches * plan.extrapolate,
        )
        copy = (
            f", the correction's copy of the weights ({corrected / GIB:.2f} GiB),"
            * (corrected > 0)
        )
        yield (
            f"2bw against a flush: {rate(late)} is "
            f"{late.throughput / exact.throughput:.2f} times as fast as "
            f"{rate(exact)}. {bubble} It costs one more weight version{slot} "
            f"({(trained / 2 + part * stage.gradients) / GIB:.2f} GiB){copy} and "
            f"a delay of one update. {loss}."
        )
    elif not late and result.space.extrapolate and "2bw" in result.space.schedules:
        search = Search(
            result.cost, replace(result.space, schedules=("2bw",), extrapolate=False)
        )
        for _, plan in itertools.islice(search, 1):
            yield (
                "2bw fits only without its correction (--no-extrapolate): "
                f"{rate(result.cost.estimate(plan))}."
            )


def reason(result: Result) -> str:
    """Why the first plan is fastest: its time by cause, beside the best of another
    shape and of each other schedule."""
    winner, rows = result.estimates[0], []
    unit, times = ("Milliseconds", 1e3) if _per_sample(winner) < 1 else ("Seconds", 1)
    for estimate in (winner, *result.rivals):
        causes = (
            f"{times * getattr(estimate.split, term) / estimate.plan.global_batch:.2f}"
            for term in TERMS
        )
        rates = (
            three(estimate.throughput),
            f"{winner.throughput / estimate.throughput:.2f}",
        )
        rows.append(
            [estimate.plan.title, *rates, *causes, f"{estimate.heaviest / GIB:.2f} GiB"]
        )
    lines = [
        (
            "The first plan, the best of another shape, and of each other schedule. "
            f"{unit} a sample by cause."
        ),
        *aligned([["plan", "samples/s", "ratio", *TERMS, "heaviest"], *rows], {0}),
        "ratio: the first plan's samples/s by this one's.",
    ]
    tried = {winner.plan.schedule, *(rival.plan.schedule for rival in result.rivals)}
    missing = [schedule for schedule in result.space.schedules if schedule not in tried]
    if missing:
        lines.append(
            wrapped(
                f"No plan of {' or '.join(missing)} is legal and fits with these choices."
            )
        )
    return "\n".join(lines)


def part_flags(cluster: Cluster) -> str:
    return f"--servers {cluster.servers} --gpus-per-server {cluster.gpus_per_server}"


# --- sources of the numbers
# --------------------------------------------------------------------------------------


def terms(cost: Cost) -> dict[str, tuple[str, str]]:
    """For each term MEASURED or ESTIMATED, and the source. A partly measured term is
    ESTIMATED."""
    cluster, profile, device = cost.cluster, cost.cluster.profile, cost.cluster.device
    compute = (ESTIMATED, f"{device.name}, {device.calibration}")
    update = (ESTIMATED, f"{device.name}'s memory bandwidth")
    if profile is not None:
        rest = f"{ESTIMATED} from it: the embedding, selective recompute, tensor sizes above 1"
        compute = (
            MEASURED,
            f"profile of a layer and the output layer on {profile.device}; {rest}",
        )
        update = (
            MEASURED,
            (
                f"profile of the optimizer on {profile.device}; "
                f"{device.step_us / 1e3:g} ms {ESTIMATED}"
            ),
        )
    links = {"inside servers": cluster.inside} | (
        {"between servers": cluster.between} if cluster.servers > 1 else {}
    )
    tags = {
        where: MEASURED if link.measured else ESTIMATED for where, link in links.items()
    }
    found = "; ".join(f"{where} {link} {tags[where]}" for where, link in links.items())
    network = (ESTIMATED if ESTIMATED in tags.values() else MEASURED, found)
    memory = (
        f"formulas by stage; {100 * cost.margin:.0f} % of {device.memory_gib:g} GiB "
        "are left free"
    )
    memory += "" if cost.given_margin is not None else ", and what NCCL takes"
    memory += f"; the plans leave {100 * cost.spare:.0f} % more" * (cost.spare > 0)
    return (
        {"compute": compute}
        | dict.fromkeys(("tensor", "pipeline", "data"), network)
        | {
            "update": update,
            "bubble": (ESTIMATED, "simulation of the schedule with the terms above"),
        }
        | {"memory": (ESTIMATED, memory)}
    )


def evidence(cost: Cost) -> str:
    """The source of each term of the estimates."""
    kinds = itertools.groupby(terms(cost).items(), key=lambda item: item[1])
    return "\n".join(
        wrapped(f"{', '.join(dict(same))}: {tag}, {source}")
        for (tag, source), same in kinds
    )
