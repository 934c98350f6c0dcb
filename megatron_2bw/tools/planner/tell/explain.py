"""The result of a search in words and tables. Pure Python.

Invariant: every number is from an Estimate, and every term is marked MEASURED or
ESTIMATED.
"""

import itertools
import math
import textwrap
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields, replace
from functools import cached_property
from operator import itemgetter

from megatron_2bw.run.flags.correction_notes import gap, nearest, percent_of
from megatron_2bw.tools.planner.cost.memory import GIB, StageMemory
from megatron_2bw.tools.planner.cost.simulated import Cost, Estimate, Split
from megatron_2bw.tools.planner.descriptions.cluster import Cluster
from megatron_2bw.tools.planner.descriptions.plan import Plan
from megatron_2bw.tools.planner.find.advice import TIGHT, tie
from megatron_2bw.tools.planner.find.search import Search, on_fewer
from megatron_2bw.tools.planner.find.space import Space

MEASURED = "MEASURED"
ESTIMATED = "ESTIMATED"
TERMS = [field.name for field in fields(Split)]
KINDS = [field.name for field in fields(StageMemory)]
# of the time per sample: what a plan on fewer GPUs must save to be reported
MIN_FEWER_GAIN = 0.01

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
TIMES_LEGEND = """\
+-: of measured times nine of ten are within it (calibrate measures it on your runs). certain: weights,
gradients, optimizer, on the GPU with most. heaviest: and activations and buffers, which are estimates."""
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
        """The fastest plan of each schedule but the winner's: from the table or by a
        further search."""
        rivals = []
        for schedule in self.space.schedules:
            if schedule != self.estimates[0].plan.schedule:
                best = self._best(schedule)
                if best is not None:
                    rivals.append(best)
        return rivals

    @cached_property
    def fastest(self) -> dict[str, Estimate]:
        """The fastest plan of 2bw, and the fastest exact one, where they are."""
        found = {}
        for estimate in sorted(self.estimates + self.rivals, key=_per_sample):
            plan = estimate.plan
            kind = "exact" if plan.pipeline.flushes else plan.schedule
            found.setdefault(kind, estimate)
        return found

    def _best(self, schedule: str) -> Estimate | None:
        for estimate in self.estimates:
            if estimate.plan.schedule == schedule:
                return estimate
        space = replace(self.space, schedules=(schedule,))
        for _, plan in Search(self.cost, space):
            return self.cost.estimate(plan)
        return None

    @cached_property
    def tight(self) -> list[Estimate]:
        """The fastest plans that do not fit by the estimate, but may, and are faster
        than the first one."""
        loose = replace(self.cost, spare=-TIGHT)
        named = {}
        fitting = filter(loose.fits, self.search.too_large)
        for plan in itertools.islice(fitting, 6):
            named.setdefault(plan.title, plan)
        limit = _per_sample(self.estimates[0])
        tight = []
        for plan in itertools.islice(named.values(), 2):
            estimate = self.cost.estimate(plan)
            if _per_sample(estimate) < limit:
                tight.append(estimate)
        return tight

    @cached_property
    def fewer(self) -> Cluster | None:
        """A part of the cluster whose fastest plan is faster than the first plan on all
        GPUs."""
        least = min(map(_per_sample, self.estimates), default=math.inf)
        part = on_fewer(self.cost, self.space, least * (1 - MIN_FEWER_GAIN))
        return part and part[0].cluster


def _per_sample(estimate: Estimate) -> float:
    return estimate.seconds / estimate.plan.global_batch


def text(result: Result) -> str:
    """The first plan, and the tables of late microbatches, of the plans, and of its
    memory."""
    memory = memory_table(result.estimates[0])
    parts = [first(result), dial_table(result), table(result), memory]
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
    times = [["#", "iteration", "+-", *TERMS, "certain", "heaviest", "headroom"]]
    for rank, estimate in enumerate(result.estimates + result.tight, 1):
        place = str(rank)
        if rank > len(result.estimates):
            place = "tight"
        elif rank <= result.ties > 1:
            place = "1="
        plans.append([place, *_plan_cells(cost, estimate)])
        times.append([place, *_time_cells(estimate, error)])
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
        f"Where an iteration's time goes, and memory ({_tagged(cost)})",
        *aligned(times, set()),
        TIMES_LEGEND,
    ]
    if result.tight:
        above = f"tight: faster, and at most {_percent(TIGHT)} above the memory"
        lines.append(f"{above} by the estimate: it may fit, or run out.")
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


def _time_cells(estimate: Estimate, error: float) -> list[str]:
    seconds = estimate.seconds
    cells = [f"{three(time)} s" for time in (seconds, error * seconds)]
    for time in astuple(estimate.split):
        cells.append(_percent(time / seconds, 1))
    certain = max(stage.certain for stage in estimate.memory)
    for size in (certain, estimate.heaviest, estimate.headroom):
        cells.append(gib(size))
    return cells


def _tagged(cost: Cost) -> str:
    """The terms that are measured, and those that are estimated."""
    parts = []
    for tag in (MEASURED, ESTIMATED):
        names = []
        for term, (kind, _) in terms(cost).items():
            if kind == tag:
                names.append(term)
        if names:
            parts.append(f"{tag}: {', '.join(names)}")
    return "; ".join(parts)


def _layers(stages: list[int]) -> str:
    """Layers of each stage, or of the first, each middle and the last stage."""
    first, *middle, last = stages if len(stages) > 1 else stages * 2
    if len({*stages}) == 1:
        return str(first)
    return "/".join(map(str, [first, *middle[:1], last]))


def memory_table(estimate: Estimate) -> str:
    """GiB on the GPUs of every stage, by kind. Successive stages with equal figures
    share a line."""
    rows = []
    for stage in estimate.memory:
        headroom = estimate.capacity - stage.total
        sizes = [*astuple(stage), stage.total, headroom]
        rows.append([f"{size / GIB:.2f}" for size in sizes])
    lines = [["stage", *KINDS, "total", "headroom"]]
    first = 0
    for cells, same in itertools.groupby(rows):
        last = first + len([*same]) - 1
        place = str(first) if first == last else f"{first}-{last}"
        lines.append([place, *cells])
        first = last + 1
    title = (
        f"Memory of a GPU of each stage of {estimate.plan.title}, in GiB ({ESTIMATED})"
    )
    return "\n".join([title, *aligned(lines, {0})])


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


def part_flags(cluster: Cluster) -> str:
    return f"--servers {cluster.servers} --gpus-per-server {cluster.gpus_per_server}"


# --- sources of the numbers
# --------------------------------------------------------------------------------------


def terms(cost: Cost) -> dict[str, tuple[str, str]]:
    """For each term MEASURED or ESTIMATED, and the source. A partly measured term is
    ESTIMATED."""
    cluster = cost.cluster
    profile = cluster.profile
    device = cluster.device
    compute = (ESTIMATED, f"{device.name}, {device.calibration}")
    update = (ESTIMATED, f"{device.name}'s memory bandwidth")
    if profile is not None:
        layers = f"profile of a layer and the output layer on {profile.device}"
        rest = "from it: the embedding, selective recompute, tensor sizes above 1"
        compute = (MEASURED, f"{layers}; {ESTIMATED} {rest}")
        step = f"profile of the optimizer on {profile.device}"
        host = device.step_us / 1e3
        update = (MEASURED, f"{step}; {host:g} ms {ESTIMATED}")
    network = _network(cluster)
    free = 100 * cost.share_left_free
    memory = (
        f"formulas by stage; {free:.0f} % of {device.memory_gib:g} GiB are left free"
    )
    if cost.margin is None:
        memory += ", and what NCCL takes"
    if cost.spare > 0:
        memory += f"; the plans leave {100 * cost.spare:.0f} % more"
    return {
        "compute": compute,
        "tensor": network,
        "pipeline": network,
        "data": network,
        "update": update,
        "bubble": (ESTIMATED, "simulation of the schedule with the terms above"),
        "memory": (ESTIMATED, memory),
    }


def _network(cluster: Cluster) -> tuple[str, str]:
    links = {"inside servers": cluster.inside}
    if cluster.servers > 1:
        links["between servers"] = cluster.between
    whole = MEASURED
    sources = []
    for where, link in links.items():
        tag = MEASURED if link.measured else ESTIMATED
        sources.append(f"{where} {link} {tag}")
        if not link.measured:
            whole = ESTIMATED
    return whole, "; ".join(sources)


def evidence(cost: Cost) -> str:
    """The source of each term of the estimates."""
    lines = []
    by_source = itertools.groupby(terms(cost).items(), key=itemgetter(1))
    for source, same in by_source:
        names = ", ".join(dict(same))
        lines.append(wrapped(f"{names}: {', '.join(source)}"))
    return "\n".join(lines)
