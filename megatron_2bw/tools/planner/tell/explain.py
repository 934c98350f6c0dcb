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
from megatron_2bw.tools.planner.cost.memory import CONTEXT, GIB, StageMemory
from megatron_2bw.tools.planner.cost.simulated import Cost, Estimate, Split
from megatron_2bw.tools.planner.descriptions.cluster import Link
from megatron_2bw.tools.planner.descriptions.plan import Plan
from megatron_2bw.tools.planner.find.advice import tie
from megatron_2bw.tools.planner.find.search import Search

# of the time per sample: what a plan on fewer GPUs, or with less memory left free, must
# save to be named
MIN_GAIN = 0.01
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
2bw shard: the second gradient slot is the own shard (--two-bw-memory shard). host: main weights and Adam's
moments are in host memory, where the step runs (--two-bw-memory host, --optimizer-cpu-offload). remainders:
main weights keep only the 16 bits that the weights lack (--use-precision-aware-optimizer).
gpipe round N: N microbatches at a time, as many as fit, with a bubble after each round (--gpipe-round).
layers: per stage, or first/middle/last. optim. sharded: --use-distributed-optimizer. TF: 10^12 operations."""
NEXT = (
    "Next: --script run.sh or --sbatch job.sbatch writes a job of the best plan, --json plan.json the file of "
    "`megatron-2bw train gpt plan.json`, --report DIR a page; --verbose shows flags, causes of the time, and sources."
)
CAVEAT = """\
The plans assume that the given global batch is the largest that is safe for convergence: throughput grows with the
batch, so a larger, unsafe batch would look better here. The gradients of 2bw are late by one update (delay 1): check
convergence at this batch and learning rate before a long run."""


@dataclass(frozen=True)
class Result:
    """The estimates of the fastest plans in the order of advice; the first `ties` of
    them tie."""

    search: Search
    estimates: list[Estimate]
    ties: int = 1

    @property
    def cost(self) -> Cost:
        return self.search.cost

    @cached_property
    def fastest(self) -> dict[str, Estimate | None]:
        """The fastest plan of 2bw, and the fastest exact one: from the table or by a
        further search."""
        search = self.search
        found = {"exact": self._best(search.exact(), True)}
        if "2bw" in search.space.schedules:
            found["2bw"] = self._best(search.plans(_is_2bw), False)
        return found

    @cached_property
    def tight(self) -> Estimate | None:
        """The fastest plan that fits if nothing but CUDA's context stays free, if it is
        faster than the first."""
        cost = self.cost
        if cost.margin is not None:
            return None
        whole = replace(cost, margin=_least_margin(cost))
        limit = (1 - MIN_GAIN) / self.estimates[0].throughput
        for _, plan in Search(whole, self.search.space, limit=limit):
            return whole.estimate(plan)
        return None

    def _best(
        self, plans: Iterator[tuple[float, Plan]], exact: bool
    ) -> Estimate | None:
        top = max(self.estimates, key=attrgetter("throughput"))
        if top.plan.exact == exact:
            return top
        for _, plan in plans:
            return self.cost.estimate(plan)
        return None


def _is_2bw(plan: Plan) -> bool:
    return plan.schedule == "2bw"


def _least_margin(cost: Cost) -> float:
    return CONTEXT / GIB / cost.cluster.device.memory_gib


def text(result: Result) -> str:
    """The answer, on one screen: the best plan and what 2bw gains, the plans, the late
    microbatches, and what to do next."""
    parts = [first(result), plan_table(result), dial_table(result), wrapped(NEXT)]
    return "\n\n".join(filter(None, parts))


def details(result: Result) -> str:
    """All other columns of the plans, and the meaning and the sources of the
    numbers."""
    return "\n\n".join([time_table(result), evidence(result.cost), CAVEAT])


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


PLAN_COLUMNS = (
    "# schedule t d w b m recompute layers batch samples/s iteration memory"
).split()
TIME_COLUMNS = "# optim. ranks TF/s/GPU".split()


def plan_table(result: Result) -> str:
    """The ranked plans: choices, throughput, memory of the heaviest stage."""
    cost = result.cost
    rows = [PLAN_COLUMNS]
    for place, estimate in _ranked(result):
        rows.append([place, *_plan_cells(cost, estimate)])
    attention = "flash attention"
    if not cost.flash:
        attention = "attention that keeps its scores"
    if cost.torch_adam:
        attention += ", torch's Adam"
    title = (
        f"Plans for {cost.model.name} on {gpus(cost)}, fastest first ({ESTIMATED}; {cost.precision}, "
        f"sequences of {cost.model.sequence}, {attention})"
    )
    lines = [wrapped(title), *aligned(rows, {1, 7, 8})]
    if result.ties > 1:
        within = f"{tie(cost.cluster.device.error):.0%}"
        lines.append(
            f"1=: within {within} of the fastest, a tie. Exact schedules and simpler plans are first."
        )
    return "\n".join(lines)


def time_table(result: Result) -> str:
    """The causes of an iteration's time, and the other choices."""
    rows = [[*TIME_COLUMNS, *TERMS]]
    for place, estimate in _ranked(result):
        rows.append([place, *_time_cells(result.cost, estimate)])
    title = "Where an iteration's time goes"
    return "\n".join([title, *aligned(rows, {1, 2}), LEGEND])


def _ranked(result: Result) -> Iterator[tuple[str, Estimate]]:
    for rank, estimate in enumerate(result.estimates, 1):
        yield "1=" if rank <= result.ties > 1 else str(rank), estimate


def _plan_cells(cost: Cost, estimate: Estimate) -> list[str]:
    plan = estimate.plan
    tensor = f"{plan.tensor}"
    if plan.context > 1:
        tensor += f" c{plan.context}"
    if plan.expert > 1:
        tensor += f" e{plan.expert}"
    return [
        plan.schedule_name,
        tensor,
        str(plan.depth),
        str(plan.width),
        str(plan.microbatch),
        str(plan.microbatches),
        plan.recompute_name,
        _layers(plan.layers_of(cost.model)),
        str(plan.global_batch),
        three(estimate.throughput),
        f"{three(estimate.seconds)} s",
        gib(estimate.heaviest),
    ]


def _time_cells(cost: Cost, estimate: Estimate) -> list[str]:
    plan = estimate.plan
    cells = [
        "sharded" if plan.distributed_optimizer else "whole",
        "pp-dp" if plan.pipeline_inside else "dp-pp",
        three(estimate.throughput * cost.model.sample_flops() / plan.gpus / 1e12),
    ]
    for time in astuple(estimate.split):
        cells.append(f"{time / estimate.seconds:.1%}")
    return cells


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
    ahead = plan.pipeline.ahead(plan.shape, 0)
    numbers = {0, 1, count // 4, count // 2, ahead, plan.late or count, count}
    late_row = ["late"]
    rate_row = ["samples/s"]
    gap_row = ["gap"]
    for late in sorted(numbers):
        if late > count:
            continue
        other = plan.changed(late=None if late == count else late)
        rate = three(plan.global_batch / cost.seconds(other))
        percent = percent_of(tokens, late / count, other.correction)
        late_row.append(f"{late} of {count}")
        rate_row.append(rate if cost.fits(other) else f"({rate})")
        gap_row.append(f"{percent:+.1f} %")
    title = (
        f"{plan.title} by its late microbatches (--two-bw-late), and the gap of a small GPT at {nearest(tokens):,} "
        "tokens a batch (--max-gap; in brackets: does not fit)"
    )
    rows = [late_row, rate_row, gap_row]
    return "\n".join([wrapped(title), *aligned(rows, {0})])


# --- words
# --------------------------------------------------------------------------------------


def wrapped(text: str) -> str:
    return textwrap.fill(text, 118, break_on_hyphens=False)


def first(result: Result) -> str:
    """The first plan, what 2bw gains over a flush and costs, and a faster plan that may
    fit."""
    winner = result.estimates[0]
    allowed = winner.capacity / GIB
    speed = (
        f"{three(winner.throughput)} samples/s, {three(winner.seconds)} s an iteration"
    )
    error = f"{result.cost.cluster.device.error:.0%}"
    text = (
        f"Best: {winner.plan.title}, {speed}, {gib(winner.heaviest)} of {allowed:.2f} allowed ({ESTIMATED}: nine of "
        f"ten measured times are within {error})."
    )
    texts = [text, *on_host(result.cost, winner.plan), *gain(result)]
    tight = result.tight
    if tight:
        memory = result.cost.cluster.device.memory_gib
        ratio = tight.throughput / winner.throughput
        texts.append(
            f"May fit, with --memory-margin {_least_margin(result.cost):.2f}: {tight.plan.title}, {ratio:.2f} times as "
            f"fast, {gib(tight.heaviest)} of the card's {memory:g}."
        )
    return "\n".join(wrapped(text) for text in texts)


def on_host(cost: Cost, plan: Plan) -> Iterator[str]:
    """What the optimizer takes in host memory."""
    if plan.memory == "host":
        memory = max(cost.memory.host_bytes(plan)) / GIB
        step = three(cost.times(plan).step)
        yield (
            f"The optimizer takes {memory:.1f} GiB of host memory for a GPU, and its step {step} s; a step of 2bw "
            f"overlaps the next batch ({ESTIMATED}; docs/design.md)."
        )


def rate(estimate: Estimate) -> str:
    return f"{estimate.plan.title} ({three(estimate.throughput)} samples/s)"


def gain(result: Result) -> Iterator[str]:
    """What the fastest plan with late microbatches gains over the fastest exact one, and
    what it costs, where both are."""
    late = result.fastest.get("2bw")
    exact = result.fastest["exact"]
    if late and exact and not late.plan.exact:
        plan = late.plan
        ratio = late.throughput / exact.throughput
        count = plan.pipeline.late_of(plan.microbatches)
        tokens = plan.global_batch * result.cost.model.sequence
        yield (
            f"With late microbatches: {rate(late)} is {ratio:.2f} times as fast as the fastest exact plan, "
            f"{rate(exact)}. {count} of {plan.microbatches} microbatches are late by one update: "
            f"{gap(tokens, count / plan.microbatches, plan.correction)}."
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
    sources = (
        f"compute, update: {ESTIMATED}, {device.name}, {device.calibration}",
        f"messages inside servers: {_source(cluster.inside)}",
        f"messages between servers: {_source(cluster.between)}",
        f"bubble: {ESTIMATED}, simulation of the schedule",
        f"memory: {ESTIMATED}, formulas by stage; {memory}",
    )
    return "\n".join(map(wrapped, sources))


def _source(link: Link) -> str:
    return f"{MEASURED if link.measured else ESTIMATED}, {link}"
