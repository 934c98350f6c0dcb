"""The result of a search in words and tables. Pure Python.

Invariant: every number is from an Estimate, and every source is marked MEASURED or
ESTIMATED.
"""

import math
import textwrap
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields, replace
from functools import cached_property
from operator import attrgetter

from megatron_2bw.run.flags.correction_notes import gap, nearest, percent_of
from megatron_2bw.tools.planner.cost.memory import GIB, StageMemory
from megatron_2bw.tools.planner.cost.simulated import Cost, Estimate, Split
from megatron_2bw.tools.planner.descriptions.cluster import Link
from megatron_2bw.tools.planner.descriptions.plan import Plan
from megatron_2bw.tools.planner.find.advice import tie
from megatron_2bw.tools.planner.find.search import Search
from megatron_2bw.tools.planner.find.space import Space

MEASURED = "MEASURED"
ESTIMATED = "ESTIMATED"
TERMS = [field.name for field in fields(Split)]
KINDS = [field.name for field in fields(StageMemory)]

LEGEND = """\
t, d, w: tensor-parallel size, stages, pipelines. b, m: samples a microbatch, microbatches a batch and pipeline.
c, e: context-, expert-parallel size (--context-parallel-size, --expert-model-parallel-size).
ranks: neighbours are the replicas of a stage (dp-pp), or a pipeline's stages (pp-dp, --use-tp-pp-dp-mapping).
2bw K2: two microbatches of a batch are late (--two-bw-late). 2bw +3: three extra warm-up forwards on the first stage
hide messages (--two-bw-extra-warmup).
2bw shard: the second gradient slot is the own shard (--two-bw-memory shard). 2bw host: main weights and
Adam's moments are in host memory, where the step runs (--two-bw-memory host).
gpipe round N: N microbatches at a time, as many as fit, with a bubble after each round (--gpipe-round).
layers: per stage, or first/middle/last. optim. sharded: --use-distributed-optimizer. TF: 10^12 operations."""
CAVEAT = """\
The plans assume that the given global batch is the largest that is safe for convergence: throughput grows with the
batch, so a larger, unsafe batch would look better here. The gradients of 2bw are late by one update (delay 1): check
convergence at this batch and learning rate before a long run."""


@dataclass(frozen=True)
class Result:
    """The estimates of the fastest plans in the order of advice; the first `ties` of
    them tie."""

    cost: Cost
    space: Space
    estimates: list[Estimate]
    ties: int = 1

    @cached_property
    def fastest(self) -> dict[str, Estimate | None]:
        """The fastest plan of 2bw, and the fastest exact one: from the table or by a
        further search."""
        found = {}
        if "2bw" in self.space.schedules:
            found["2bw"] = self._best(("2bw",))
        if self.space.exact:
            found["exact"] = self._best(self.space.exact)
        return found

    def _best(self, schedules: tuple[str, ...]) -> Estimate | None:
        listed = []
        for estimate in self.estimates:
            if estimate.plan.schedule in schedules:
                listed.append(estimate)
        if listed:
            return max(listed, key=attrgetter("throughput"))
        space = replace(self.space, schedules=schedules)
        for _, plan in Search(self.cost, space):
            return self.cost.estimate(plan)
        return None


def text(result: Result) -> str:
    """The first plan, and the tables of late microbatches and of the plans."""
    parts = [first(result), dial_table(result), table(result)]
    return "\n\n".join(filter(None, parts))


def gpus(cost: Cost) -> str:
    count = cost.cluster.gpus
    return f"{count} GPUs" if count > 1 else f"{count} GPU"


def three(number: float) -> str:
    """The number with three digits, or all that are before the point."""
    if not number:
        return "0"
    rounded = float(f"{number:.2e}")
    exponent = math.floor(math.log10(rounded))
    digits = max(2 - exponent, 0)
    return f"{number:.{digits}f}"


def gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


# --- tables
# --------------------------------------------------------------------------------------


def aligned(rows: list[list[str]], left: set[int]) -> list[str]:
    """Lines of a table with two blanks between columns. Columns in `left` are aligned
    left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells = []
        for column, (cell, width) in enumerate(zip(row, widths)):
            align = cell.ljust if column in left else cell.rjust
            cells.append(align(width))
        lines.append("  ".join(cells).rstrip())
    return lines


def _percent(share: float, digits: int = 0) -> str:
    # + 0.0 turns a rounded -0.0 into 0.0
    rounded = round(100 * share, digits) + 0.0
    return f"{rounded:.{digits}f} %"


PLAN_COLUMNS = (
    "# schedule t d w b m recompute optim. ranks layers batch samples/s tok/s/GPU "
    "TF/s/GPU"
).split()


def table(result: Result) -> str:
    """The ranked plans: choices and throughput; then the causes of an iteration's time,
    and the memory."""
    cost = result.cost
    error = cost.cluster.device.error
    plans = [PLAN_COLUMNS]
    times = [["#", "iteration", *TERMS, "heaviest"]]
    for rank, estimate in enumerate(result.estimates, 1):
        place = "1=" if rank <= result.ties > 1 else str(rank)
        plans.append([place, *_plan_cells(cost, estimate)])
        times.append([place, *_time_cells(estimate)])
    attention = "flash attention"
    if not cost.flash:
        attention = "attention that keeps its scores"
    if cost.torch_adam:
        attention += ", torch's Adam"
    name = cost.model.name
    lines = [
        f"Plans for {name} on {gpus(cost)}, fastest first, ties by simplicity (ESTIMATED)",
        f"{cost.precision}, sequences of {cost.model.sequence}, {attention}.",
        *aligned(plans, {1, 7, 8, 9, 10}),
        LEGEND,
    ]
    if result.ties > 1:
        tied = f"1=: within {_percent(tie(error))} of the fastest, a tie."
        lines.append(f"{tied} Exact schedules and simpler plans are first.")
    lines += [
        "",
        "Where an iteration's time goes, and the memory of the heaviest stage",
        *aligned(times, set()),
        f"Of measured times nine of ten are within {_percent(error)} of the estimate.",
    ]
    return "\n".join(lines)


def _plan_cells(cost: Cost, estimate: Estimate) -> list[str]:
    plan = estimate.plan
    tensor = str(plan.tensor)
    if plan.context > 1:
        tensor += f" c{plan.context}"
    if plan.expert > 1:
        tensor += f" e{plan.expert}"
    each = estimate.throughput / plan.gpus
    return [
        plan.schedule_name,
        tensor,
        str(plan.depth),
        str(plan.width),
        str(plan.microbatch),
        str(plan.microbatches),
        plan.recompute_name,
        "sharded" if plan.distributed_optimizer else "whole",
        "pp-dp" if plan.pipeline_inside else "dp-pp",
        _layers(plan.layers_of(cost.model)),
        str(plan.global_batch),
        three(estimate.throughput),
        three(each * cost.model.sequence),
        three(each * cost.model.sample_flops() / 1e12),
    ]


def _time_cells(estimate: Estimate) -> list[str]:
    cells = [f"{three(estimate.seconds)} s"]
    for time in astuple(estimate.split):
        cells.append(_percent(time / estimate.seconds, 1))
    return [*cells, gib(estimate.heaviest)]


def _layers(stages: list[int]) -> str:
    """Layers of each stage, or of the first, each middle and the last stage."""
    first, *middle, last = stages if len(stages) > 1 else stages * 2
    if len({*stages}) == 1:
        return str(first)
    return "/".join(map(str, [first, *middle[:1], last]))


def dial_table(result: Result) -> str:
    """The sizes of the fastest plan of 2bw with other numbers of late microbatches; ""
    without such a plan."""
    estimate = result.fastest.get("2bw")
    if estimate is None or not estimate.plan.corrected:
        return ""
    cost = result.cost
    plan = estimate.plan
    count = plan.microbatches
    tokens = plan.global_batch * cost.model.sequence
    exact = plan.changed(
        schedule="pipedream-flush",
        memory="two-slots",
        extra_warmup=(),
        late=None,
        corrected=False,
    )
    ahead = min(plan.pipeline.ahead(plan.shape, 0), count)
    numbers = {1, count // 4, count // 2, ahead, plan.late or count, count} - {0}
    rows = [["late", "samples/s", "gap"], [f"0 of {count}", _rate_of(cost, exact), "0"]]
    for late in sorted(numbers):
        other = plan.changed(late=None if late == count else late)
        percent = percent_of(tokens, late / count, other.correction)
        rate_of = _rate_of(cost, other)
        rows.append([f"{late} of {count}", rate_of, f"{percent:+.1f} %"])
    title = (
        f"{plan.title} by its late microbatches ({ESTIMATED}), and the gap of a small GPT at "
        f"{nearest(tokens):,} tokens a batch (--max-gap; docs/convergence.md)"
    )
    return "\n".join([title, *aligned(rows, {0})])


def _rate_of(cost: Cost, plan: Plan) -> str:
    rate = three(plan.global_batch / cost.seconds(plan))
    return rate if cost.fits(plan) else f"{rate}, does not fit"


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
    winner = result.estimates[0]
    allowed = winner.capacity / GIB
    sizes = f"{gib(winner.heaviest)} of {allowed:.2f} allowed ({ESTIMATED})"
    speed = three(winner.throughput)
    text = f"Best: {winner.plan.title}, {speed} samples/s, {sizes}."
    texts = [text, *on_host(result.cost, winner.plan), *gain(result)]
    return "\n".join(wrapped(text, "") for text in texts)


def on_host(cost: Cost, plan: Plan) -> Iterator[str]:
    """What the step in host memory takes, and whether the next batch hides it."""
    if plan.memory == "host":
        memory = max(cost.memory.host_bytes(plan)) / GIB
        step = three(cost.times(plan).step)
        window, _ = cost.window(plan)
        yield (
            f"The optimizer takes {memory:.1f} GiB of host memory for a GPU. Its step takes {step} s, "
            f"and the next batch hides {three(window)} s ({ESTIMATED}; docs/host_memory.md)."
        )


def rate(estimate: Estimate) -> str:
    return f"{estimate.plan.title} ({three(estimate.throughput)} samples/s)"


def gain(result: Result) -> Iterator[str]:
    """What the fastest plan of 2bw gains over the fastest exact one, and what it costs,
    where both are."""
    late = result.fastest.get("2bw")
    exact = result.fastest.get("exact")
    if late and exact:
        plan = late.plan
        ratio = late.throughput / exact.throughput
        count = plan.pipeline.late_of(plan.microbatches)
        tokens = plan.global_batch * result.cost.model.sequence
        loss = gap(tokens, count / plan.microbatches, plan.correction)
        yield (
            f"2bw against a flush: {rate(late)} is {ratio:.2f} times as fast as {rate(exact)}. "
            f"{count} of {plan.microbatches} microbatches are late by one update: {loss}."
        )


# --- sources of the numbers
# --------------------------------------------------------------------------------------


def evidence(cost: Cost) -> str:
    """The source of each number."""
    cluster = cost.cluster
    device = cluster.device
    free = 100 * cost.share_left_free
    memory = f"{free:.0f} % of {device.memory_gib:g} GiB are left free"
    if cost.margin is None:
        memory += ", and what NCCL takes"
    sources = {
        "compute, update": f"{ESTIMATED}, {device.name}, {device.calibration}",
        "messages inside servers": _source(cluster.inside),
        "messages between servers": _source(cluster.between),
        "bubble": f"{ESTIMATED}, simulation of the schedule",
        "memory": f"{ESTIMATED}, formulas by stage; {memory}",
    }
    if cluster.servers == 1:
        del sources["messages between servers"]
    lines = []
    for name, source in sources.items():
        lines.append(wrapped(f"{name}: {source}"))
    return "\n".join(lines)


def _source(link: Link) -> str:
    return f"{MEASURED if link.measured else ESTIMATED}, {link}"
