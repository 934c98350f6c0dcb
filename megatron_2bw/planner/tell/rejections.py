"""What a search has left out: counted by cause, with the nearest change that would be legal and fit. Pure Python."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from dataclasses import replace

from megatron_2bw.planner.cost.memory import GIB
from megatron_2bw.planner.cost.simulated import Cost, Estimate
from megatron_2bw.planner.describe.plan import RECOMPUTE, Plan
from megatron_2bw.planner.find.legality import is_legal
from megatron_2bw.planner.find.search import Search, Space
from megatron_2bw.planner.tell.explain import ESTIMATED, Result, wrapped
from megatron_2bw.planner.tell.jobs import by_flag

LOOKED_AT = 1000  # plans that do not fit, for one that a single change lets in


def rejections(result: Result) -> str:
    """What was left out, by cause, and the smallest change that lets the fastest plan in that does not fit."""
    cost, search = result.cost, result.search
    lines = ["Not legal, by cause, with what the smallest of them would have to change:"]
    lines += _counted(search) or ["  none"]
    lines.append(
        f"Too large for {cost.capacity / GIB:.1f} GiB ({ESTIMATED}), though perhaps faster than plans of the "
        f"table: {len(search.too_large)}"
    )
    large, change = too_large(result)
    if large is None:
        return "\n".join(lines)
    first = f" (the first plan: {result.estimates[0].throughput:.1f})" if result.estimates else ""
    text = (
        f"{large.plan.title} would make {large.throughput:.1f} samples/s{first}, but its heaviest stage needs "
        f"{large.heaviest / GIB:.2f} GiB, and {cost.capacity / GIB:.2f} GiB are allowed. "
    )
    if change is None:
        text += "No single change of it is legal and fits."
    else:
        text += (
            f"The nearest change that fits: {changed_flags(large.plan, change.plan, cost.precision)} "
            f"({change.throughput:.1f} samples/s, {change.heaviest / GIB:.2f} GiB)."
        )
    return "\n".join([*lines, wrapped(text)])


def _counted(search: Search) -> list[str]:
    """A line a cause, and below it what the smallest such plan would have to change."""
    lines = []
    for cause, count in search.rejected.most_common():
        lines.append(f"  {count:6}  {cause}")
        if cause in search.examples:
            lines += textwrap.wrap(search.examples[cause], 118, initial_indent=" " * 10, subsequent_indent=" " * 10)
    return lines


def too_large(result: Result) -> tuple[Estimate | None, Estimate | None]:
    """The fastest plan that does not fit and that one change lets in, and that change; or the fastest, and None."""
    plans, cost = result.search.too_large, result.cost
    for plan in plans[:LOOKED_AT]:
        change = nearest(cost, plan)
        if change is not None:
            return cost.estimate(plan), change
    return (cost.estimate(plans[0]) if plans else None), None


def changes(plan: Plan) -> Iterator[Plan]:
    """Plans with less memory on a GPU that differ from `plan` in one choice, the global batch being the same."""
    yield from (replace(plan, recompute=kind) for kind in RECOMPUTE[RECOMPUTE.index(plan.recompute) + 1 :])
    if not plan.distributed_optimizer:
        yield replace(plan, distributed_optimizer=True)
    if plan.schedule == "2bw" and plan.gradient_slots == 2:
        yield replace(plan, gradient_slots=1)
    if any(plan.extra):
        yield replace(plan, extra_warmup=())
    if plan.extrapolate:
        yield replace(plan, extrapolate=False)
    if plan.schedule != "pipedream-flush":
        flush = {"schedule": "pipedream-flush", "gradient_slots": 2, "virtual": 1}
        yield replace(plan, **flush, extra_warmup=(), extrapolate=False)
    if plan.microbatch % 2 == 0:
        yield replace(plan, microbatch=plan.microbatch // 2, microbatches=2 * plan.microbatches)
    deeper = replace(plan, depth=2 * plan.depth, first=0, last=0, extra_warmup=())
    if plan.width % 2 == 0:
        yield replace(deeper, width=plan.width // 2, microbatches=2 * plan.microbatches)
    if plan.tensor % 2 == 0:
        tensor = plan.tensor // 2
        yield replace(deeper, tensor=tensor, sequence_parallel=plan.sequence_parallel and tensor > 1)


def nearest(cost: Cost, plan: Plan) -> Estimate | None:
    """The fastest of the `changes` that is legal and fits."""
    cluster = cost.cluster
    fitting = (
        cost.estimate(change)
        for change in changes(plan)
        if is_legal(change, cost.model, cluster.gpus, cost.precision, cluster.device.bf16) and cost.fits(change)
    )
    return max(fitting, key=lambda estimate: estimate.throughput, default=None)


def changed_flags(before: Plan, after: Plan, precision: str) -> str:
    """The flags to give instead, and those to leave out."""
    old, new = ({flag[0]: flag for flag in by_flag(plan.flags(precision))} for plan in (before, after))
    given = " ".join(" ".join(words) for flag, words in new.items() if old.get(flag) != words)
    without = " and ".join(flag for flag in old if flag not in new)
    return f"{given} without {without}".strip() if without else given


def nothing_fits(cost: Cost, space: Space, search: Search) -> str:
    """Why a search has found nothing, with the smallest need, and what would help: other choices, memory, GPUs."""
    if not search.too_large:
        causes = (
            "; ".join(
                f"{cause} ({count}; {search.examples.get(cause, 'no other size')})"
                for cause, count in search.rejected.most_common()
            )
            or "nothing to try"
        )
        return f"No plan is legal on {cost.cluster.gpus} GPUs with a global batch of {space.batch}: {causes}."
    smallest = min(search.too_large, key=cost.memory.heaviest)
    need, device = cost.memory.heaviest(smallest), cost.cluster.device
    text = (
        f"Nothing fits. The smallest of {len(search.too_large)} plans, {smallest.title}, needs {need / GIB:.2f} GiB "
        f"on its heaviest stage ({ESTIMATED}), and {cost.capacity / GIB:.2f} GiB are allowed ({device.memory_gib:g} "
        f"GiB less {100 * cost.margin:.0f} %)."
    )
    help_ = [f"GPUs of {math.ceil(10 * need / GIB / (1 - cost.margin)) / 10:g} GiB or more"]
    other = _fitting(cost, Space(space.batch, extrapolate=space.extrapolate)) or _fitting(cost, Space(space.batch))
    if other is not None:
        flags = " ".join(other.flags(cost.precision))
        help_.insert(0, f"on these GPUs what the search was told to leave out: {flags}")
    else:
        help_ += _more_servers(cost, space)
    return f"{text} What would fit: {'; or '.join(help_)}."


def _more_servers(cost: Cost, space: Space) -> list[str]:
    """The smallest power of two as many servers on which something fits."""
    for times in (2, 4, 8, 16, 32, 64):
        cluster = replace(cost.cluster, servers=times * cost.cluster.servers)
        plan = _fitting(Cost(cost.model, cluster, cost.precision, cost.memory.flash, cost.margin), space)
        if plan is not None:
            return [f"{cluster.servers} servers ({cluster.gpus} GPUs), for example with {plan.title}"]
    return []


def _fitting(cost: Cost, space: Space) -> Plan | None:
    """Any plan that fits, of those of the space that need least."""
    lean = replace(
        space,
        microbatch=(min(space.microbatch or (1,)),),
        gradient_slots=(min(space.gradient_slots),),
        distributed_optimizer=(max(space.distributed_optimizer),),
        pipeline_inside=space.pipeline_inside[:1],
    )
    search = Search(cost, lean)
    splits = (
        replace(shape, first=first, last=last)
        for shape in search.shapes()
        for first, last in search.splits(shape.depth)
    )
    plans = (plan for split in splits for scheduled in search.scheduled(split) for plan in search.variants(scheduled))
    return next((plan for plan in plans if cost.fits(plan)), None)
